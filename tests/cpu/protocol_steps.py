"""The steps of a forward and of reset(), in program order."""

from __future__ import annotations

from tests.cpu.protocol_lane import Lane
from tests.cpu.protocol_rules import (
    BAD,
    LAYER,
    MISSED,
    SPURIOUS,
    STALE_LIST,
    STALE_ROWS,
    STALE_X,
    Outcome,
    Targets,
)


class Program(Lane):
    """A lane's program: forwards and resets."""

    def forward(self, tag: int, layer: int) -> None:
        """The steps of the forward `tag`."""
        self.where, to = f"forward {tag} of layer {layer}", Targets()
        begin, stage = (lambda: self.begin(layer, to)), (lambda: self.stage(tag))
        for part in (begin, stage) if self.rules.abort_before_stage else (stage, begin):
            part()
        self.join()
        self.exchange(tag, layer, to)
        self.join()
        self.pull(tag, layer, to)
        self.join()
        self.token_back(tag, to)
        self.join()
        self.reduce(tag, to)

        def skip(v: bytearray) -> tuple[bool, None]:
            v[self.pc] = to.end
            return True, None

        self.local("leaves reduce", skip)
        self.abort(to)
        to.end = len(self.code)
        self.join()
        self.end(tag, layer)

    def epoch(self, layer: int) -> int:
        return self.at["epoch", self.rank, layer if self.rules.epoch_per_layer else 0]

    def begin(self, layer: int, to: Targets) -> None:
        n, epoch, word = self.at["n", self.rank], self.epoch(layer), self.at["abort", self.rank]

        def run(s: bytes) -> list[Outcome]:
            v = bytearray(s)
            v[n] = s[epoch] + 1
            if not s[word]:
                return [(self.next(v), "", None)]
            v, remark, kind = self.observe(v, to)
            if not self.rules.queued_stops:
                v[self.pc] = s[self.pc] + 1
            return [(v, remark, kind)]

        def quiet(v: bytearray) -> tuple[bool, None]:
            v[n] = v[epoch] + 1
            v[self.pc] += 1
            return True, None

        text = "reads epoch and abort word"
        if self.aborts:
            self.lead(text, run)
        else:
            self.lead_local(text, quiet)

    def stage(self, tag: int) -> None:
        def run(s: bytes) -> list[Outcome]:
            v = self.next(s)
            v[self.at["x", self.rank]] = tag
            return [(v, "", None)]

        self.lead("stages its tokens", run)

    def exchange(self, tag: int, layer: int, to: Targets) -> None:
        n, r = self.at["n", self.rank], self.rank
        for p in self.peers:

            def data(v: bytearray, p: int = p) -> None:
                v[self.at["list", p, self.slot(v[n]), r]] = 4 * tag + layer

            def flag(v: bytearray, p: int = p) -> None:
                v[self.at["flag", p, self.slot(v[n]), r]] = v[n]

            parts = [(f"stores its list at rank {p}", data), (f"publishes its list at rank {p}", flag)]
            for text, write in parts if self.rules.data_before_flag else parts[::-1]:
                self.store(text, write, to)

    def pull(self, tag: int, layer: int, to: Targets) -> None:
        """Every list first (the counts of all give a row its place in the pool), then token rows."""
        n, wrong, sent, r = self.at["n", self.rank], self.at["wrong", self.rank], self.at["sent", self.rank], self.rank
        for p in self.peers:

            def flag(n: int, p: int = p) -> int:
                return self.at["flag", r, self.slot(n), p]

            def read_list(s: bytes, p: int = p) -> list[Outcome]:
                read, header = divmod(s[self.at["list", r, self.slot(s[n]), p]], 4)
                if header != layer and self.rules.check_layer and not s[self.seen]:
                    return [self.give_up(s, LAYER, to)]
                v = self.next(s)
                if (read, header) != (tag, layer):
                    v[wrong] |= 1
                    v[self.at["bad", r, p]] = 1
                if (p, r) in self.scenario.routes.get(read, ()):
                    v[sent] |= 1 << p
                return [(v, f"tag {read}, layer {header}", None)]

            if self.rules.wait_for_lists:
                self.wait(f"waits for the list of rank {p}", flag, tag, to)
            self.add(f"reads the list of rank {p}", read_list)
        self.join()
        for p in self.peers:

            def read_x(s: bytes, p: int = p) -> list[Outcome]:
                v, read = self.next(s), s[self.at["x", p]]
                if not s[sent] >> p & 1:
                    return [(v, "none sent", None)]
                if read != tag:
                    v[wrong] |= 2
                    v[self.at["bad", r, p]] = 1
                return [(v, f"tag {read}", None)]

            self.add(f"pulls token rows of rank {p}", read_x)

    def token_back(self, tag: int, to: Targets) -> None:
        n, sent, r = self.at["n", self.rank], self.at["sent", self.rank], self.rank
        for p in self.peers:

            def rows(v: bytearray, p: int = p) -> None:
                if v[sent] >> p & 1:
                    v[self.at["rows", p, r]] = BAD if v[self.at["bad", r, p]] else tag

            def flag(v: bytearray, p: int = p) -> None:
                v[self.at["ret", p, r]] = v[n]

            parts = [(f"returns rows to rank {p}", rows), (f"publishes their return at rank {p}", flag)]
            for text, write in parts if self.rules.rows_before_flag else parts[::-1]:
                self.store(text, write, to)

    def reduce(self, tag: int, to: Targets) -> None:
        wrong, r = self.at["wrong", self.rank], self.rank
        for p in self.peers:
            routed = (r, p) in self.scenario.routes[tag]

            def flag(n: int, p: int = p) -> int:
                return self.at["ret", r, p]

            def read(s: bytes, p: int = p) -> list[Outcome]:
                v, rows = self.next(s), s[self.at["rows", r, p]]
                if rows != tag:
                    v[wrong] |= 4
                return [(v, "bad rows" if rows == BAD else f"tag {rows}", None)]

            def nothing(v: bytearray) -> tuple[bool, None]:
                v[self.pc] += 1
                return True, None

            if not routed:  # keeps the lanes' programs of equal shape
                self.local("waits for no return", nothing)
                self.local("reads no rows", nothing)
                continue
            if self.rules.wait_for_returns:
                self.wait(f"waits for the return of rank {p}", flag, tag, to)
            else:
                self.local("waits for no return", nothing)
            self.add(f"sums the rows of rank {p}", read)

    def end(self, tag: int, layer: int) -> None:
        n, wrong, sent, r = self.at["n", self.rank], self.at["wrong", self.rank], self.at["sent", self.rank], self.rank
        epoch, seen = self.epoch(layer), [self.at["seen", r, lane] for lane in self.lanes]
        scratch = [n, wrong, sent, *(self.at["bad", r, p] for p in range(self.scenario.world))]

        def step(v: bytearray) -> tuple[bool, str | None]:
            nan, kind = any(v[cell] for cell in seen), None
            if nan and tag in self.scenario.ok:
                kind = SPURIOUS
            elif not nan and v[wrong]:
                kind = STALE_ROWS if v[wrong] & 4 else STALE_LIST if v[wrong] & 1 else STALE_X
            elif not nan and tag in self.scenario.nan:
                kind = MISSED
            if not nan or self.rules.bump_on_abort:
                v[epoch] = v[n]
            for cell in scratch:
                v[cell] = 0
            v[self.pc] += 1
            return True, kind

        self.lead_local("ends", step)

    # reset().

    def reset(self) -> None:
        """Drain (the program has come here), barrier, agree on E, write epoch, flags and abort word, barrier."""
        self.where, r = "reset()", self.rank
        flags = [cell for name, cell in self.at.items() if name[0] in ("flag", "ret") and name[1] == r]
        clear = [cell for name, cell in self.at.items() if name[0] in ("abort", "record", "seen") and name[1] == r]
        mine = [cell for name, cell in self.at.items() if name[0] == "epoch" and name[1] == r]
        posted = [self.at["posted", p] for p in range(self.scenario.world)]

        def agree(s: bytes) -> list[Outcome]:
            v = self.next(s)
            top = max(s[cell] for cell in posted) if self.rules.reset_agrees else s[posted[r]]
            for cell in mine:
                v[cell] = top + self.rules.reset_step
            return [(v, f"epoch is {v[mine[0]]}", None)]

        def write(s: bytes) -> list[Outcome]:
            v = self.next(s)
            for cell in flags if self.rules.reset_flags else ():
                v[cell] = v[mine[0]]
            return [(v, "", None)]

        def unabort(s: bytes) -> list[Outcome]:
            v = self.next(s)
            for cell in clear:
                v[cell] = 0
            return [(v, "", None)]

        if not self.rules.reset_clears_drained:
            self.lead("clears records and abort word", unabort)
        self.barrier(posts=mine)
        self.lead("sets its epoch", agree)
        self.lead("sets its flags", write)
        if self.rules.reset_clears_drained:
            self.lead("clears records and abort word", unabort)
        if self.rules.reset_last_barrier:
            self.barrier()

    def barrier(self, posts: list[int] | None = None) -> None:
        """A host barrier; `posts` hands the largest of these cells to every rank."""
        mine, posted = self.at["barrier", self.rank], self.at["posted", self.rank]
        all_ranks = [self.at["barrier", p] for p in range(self.scenario.world)]

        def arrive(s: bytes) -> list[Outcome]:
            v = self.next(s)
            v[mine] += 1
            if posts:
                v[posted] = max(s[cell] for cell in posts)
            return [(v, "", None)]

        def leave(s: bytes) -> list[Outcome]:
            return [(self.next(s), "", None)] if all(s[cell] >= s[mine] for cell in all_ranks) else []

        self.lead("enters the barrier", arrive)
        self.lead("leaves the barrier", leave)
