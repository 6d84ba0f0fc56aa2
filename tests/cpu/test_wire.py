"""The wire format: regions, records, control words, and the weight permutations against the fragment layout."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe import errors, wire
from megamoe.config import BLOCK, MAX_RANKS, MAX_TOP_K, MoEConfig, supported_modes

ranks = st.sampled_from(range(1, MAX_RANKS + 1))


@st.composite
def problems(draw: st.DrawFn) -> tuple[MoEConfig, int]:
    """A config and a world size that divides its experts."""
    world_size = draw(ranks)
    local = draw(st.integers(1, 512 // world_size))
    cfg = MoEConfig(
        hidden=BLOCK * draw(st.integers(1, 64)),
        intermediate=BLOCK * draw(st.integers(1, 64)),
        num_experts=local * world_size,
        top_k=draw(st.integers(1, min(MAX_TOP_K, local * world_size))),
        max_tokens=draw(st.integers(1, 8192)),
        pool_rows=draw(st.none() | st.integers(1, 10**6)),
        **draw(st.sampled_from(supported_modes())),
    )
    return cfg, world_size


def check_layout(layout: wire.Layout) -> None:
    """Regions are aligned, in order, apart, and inside nbytes."""
    assert layout.nbytes % wire.ALIGN == 0
    for name, region in layout.items():
        assert region.name == name
        assert region.offset % wire.ALIGN == 0
        assert region.nbytes > 0
        assert region.offset + region.nbytes <= layout.nbytes
    for before, after in pairwise(layout.values()):
        assert before.offset + before.nbytes <= after.offset
        assert after.offset - (before.offset + before.nbytes) < wire.ALIGN  # no more waste than alignment


@given(problems())
def test_layouts(problem: tuple[MoEConfig, int]) -> None:
    cfg, world_size = problem
    arena, local = wire.arena_layout(cfg, world_size), wire.local_layout(cfg, world_size)
    check_layout(arena)
    check_layout(local)
    rows, routes, experts = cfg.pool_capacity(world_size), cfg.max_tokens * cfg.top_k, cfg.experts_local(world_size)
    assert arena["control"].nbytes == 8 * wire.CONTROL_WORDS
    assert arena["counts"].nbytes >= 2 * world_size * (wire.HEADER + experts) * 4
    assert arena["lists"].nbytes == 2 * world_size * routes * 8
    assert arena["x"].nbytes == cfg.max_tokens * wire.input_format(cfg).pitch
    assert arena["slots"].nbytes == routes * cfg.hidden * 2
    assert local["pool_x"].nbytes == rows * wire.input_format(cfg).pitch
    assert local["pool_act"].nbytes == rows * wire.activation_format(cfg).pitch
    assert local["pool_y"].nbytes == rows * cfg.hidden * 2
    assert local["expert_start"].nbytes == (experts + 1) * 4
    assert local["send_start"].nbytes == (world_size + 1) * 4


def test_a_pool_holds_every_route_of_tokens_that_name_one_expert_top_k_times() -> None:
    cfg = MoEConfig(hidden=256, intermediate=256, num_experts=4, top_k=3, max_tokens=64)
    assert wire.local_layout(cfg, 4)["pool_meta"].nbytes == 8 * 4 * 64 * 3  # one expert a rank


def test_arena_does_not_grow_with_the_pool() -> None:
    small = MoEConfig(hidden=256, intermediate=256, num_experts=8, top_k=2, max_tokens=64, pool_rows=1)
    large = MoEConfig(hidden=256, intermediate=256, num_experts=8, top_k=2, max_tokens=64)
    assert wire.arena_layout(small, 4) == wire.arena_layout(large, 4)


@given(st.dictionaries(st.text(min_size=1, max_size=4), st.integers(0, 10**13), max_size=8))
def test_layout_of_any_sizes(sizes: dict[str, int]) -> None:
    layout = wire.Layout(sizes)
    assert list(layout) == list(sizes)
    for before, after in pairwise(layout.values()):
        assert before.offset + before.nbytes <= after.offset
    assert all(region.offset % wire.ALIGN == 0 for region in layout.values())


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 16))
def test_round_up(value: int, multiple: int) -> None:
    result = wire.round_up(value, multiple)
    assert result % multiple == 0
    assert value <= result < value + multiple


@given(problems())
def test_row_records(problem: tuple[MoEConfig, int]) -> None:
    cfg, _ = problem
    for record, columns, group in (
        (wire.input_format(cfg), cfg.hidden, BLOCK),
        (wire.activation_format(cfg), cfg.intermediate, cfg.act_group),
    ):
        assert record.columns == columns
        assert record.scales == (columns // group if cfg.scale == "block" else 0)
        used = record.columns + 4 * record.scales
        assert used <= record.row_bytes < used + 16
        assert record.row_bytes <= record.pitch < used + BLOCK
        assert record.row_bytes % 16 == 0  # bulk copies move whole 16-byte units
        assert record.pitch % BLOCK == 0
        assert record.columns % 16 == 0  # scales start where fp32 and 16-byte loads are aligned
        if cfg.scale == "tensor":
            assert record.pitch == record.row_bytes == record.columns


@given(st.integers(1, 512))
def test_counts_pitch(experts_local: int) -> None:
    words = wire.counts_pitch(experts_local)
    assert words % 4 == 0  # each source's header starts on 16 bytes
    assert wire.HEADER + experts_local <= words < wire.HEADER + experts_local + 4
    assert wire.HEADER_LAYER < wire.HEADER


def test_control_words_do_not_overlap() -> None:
    words = {
        "epoch": [wire.EPOCH],
        "deadline": [wire.DEADLINE],
        "abort": [wire.ABORT],
        "claim": [wire.CLAIM],
        "list flags": [wire.list_flag(slot, source) for slot in (0, 1) for source in range(MAX_RANKS)],
        "return flags": [wire.RETURN_FLAG + owner for owner in range(MAX_RANKS)],
        "done": [wire.DONE_EXCHANGE, wire.DONE_RETURN, wire.DONE_REDUCE],
        "records": list(range(wire.RECORDS, wire.RECORDS + MAX_RANKS * wire.RECORD_FIELDS)),
    }
    every = [word for group in words.values() for word in group]
    assert len(set(every)) == len(every)
    assert min(every) >= 0
    assert max(every) < wire.CONTROL_WORDS
    assert wire.HOST_STATE < wire.HOST_RECORD and wire.HOST_RECORD + wire.RECORD_FIELDS <= wire.HOST_WORDS


def test_words_that_peers_write_share_no_line_with_local_ones() -> None:
    line = 128 // 8
    local = {word // line for word in (wire.EPOCH, wire.DEADLINE, wire.ABORT, wire.CLAIM)}
    local |= {word // line for word in (wire.DONE_EXCHANGE, wire.DONE_RETURN, wire.DONE_REDUCE)}
    lists = {wire.list_flag(slot, source) // line for slot in (0, 1) for source in range(MAX_RANKS)}
    returns = {(wire.RETURN_FLAG + owner) // line for owner in range(MAX_RANKS)}
    assert not local & lists and not local & returns and not lists & returns


@pytest.mark.parametrize("order", [wire.interleave_gate_up(), wire.interleave_down()], ids=["gate_up", "down"])
def test_interleaves_are_permutations(order: list[int]) -> None:
    assert sorted(order) == list(range(BLOCK))


def fragment_columns(quad: int) -> list[int]:
    """Columns of D that a thread with lane % 4 == quad holds, in register order (PTX ISA, wgmma m64nNk32 D)."""
    return [8 * chunk + 2 * quad + low for chunk in range(BLOCK // 8) for low in range(2)]


@pytest.mark.parametrize("quad", range(4))
def test_a_thread_holds_gate_and_up_of_sixteen_neighbouring_columns(quad: int) -> None:
    order = wire.interleave_gate_up()
    held = [order[column] for column in fragment_columns(quad)]
    pairs = [(gate, up) for i in range(0, 32, 4) for gate, up in zip(held[i : i + 2], held[i + 2 : i + 4])]
    assert [gate for gate, _ in pairs] == list(range(16 * quad, 16 * quad + 16))
    assert all(up == gate + 64 for gate, up in pairs)


def test_a_quad_stores_sixty_four_neighbouring_bytes_of_fc2() -> None:
    order = wire.interleave_down()
    for store in range(4):
        columns = []
        for quad in range(4):
            held = [order[column] for column in fragment_columns(quad)]
            run = held[8 * store : 8 * store + 8]
            assert run == list(range(run[0], run[0] + 8))  # one 16-byte store of bf16
            columns += run
        assert columns == list(range(32 * store, 32 * store + 32))


@given(st.integers(1, 10**6), st.data())
def test_search_steps_find_every_entry(entries: int, data: st.DataObject) -> None:
    target = data.draw(st.integers(0, entries - 1))
    low, high = 0, entries
    for _ in range(wire.search_steps(entries)):
        middle = (low + high) // 2
        low, high = (middle, high) if middle <= target else (low, middle)
    assert low == target


def test_the_abort_in_a_control_block_is_that_of_the_rank_it_names() -> None:
    control = [0] * wire.CONTROL_WORDS
    assert wire.abort_in(control) is None
    control[wire.ABORT] = 1 + 5
    first = wire.RECORDS + 5 * wire.RECORD_FIELDS
    control[first : first + wire.RECORD_FIELDS] = [1, 5, 3, 2, -1, 8, 7, 8]  # a time-out in pull that blames rank 3
    error = wire.abort_in(control)
    assert isinstance(error, errors.AbortedTimeout)
    assert (error.record.origin, error.record.blamed, error.record.phase) == (5, 3, errors.Phase.PULL)
