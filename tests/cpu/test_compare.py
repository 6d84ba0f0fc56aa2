"""tools/compare.py on made-up rows."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
compare = importlib.import_module("compare")

RUN = dict(W=1, preset="v3", hidden=7168, intermediate=2048, num_experts=256, top_k=8, knobs="auto", date="2026-12-01")
E2E = dict(RUN, what="e2e", name="graph", impl="megamoe", scale="block", routing="balanced", T=8)
GEMM = dict(RUN, what="gemm", name="fc1", impl="megamoe", scale="block", rows_per_expert=512, experts=32)


@pytest.fixture
def files(tmp_path):
    def write(*runs):
        paths = [tmp_path / f"{name}.jsonl" for name in "ab"]
        for path, rows in zip(paths, runs):
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [str(path) for path in paths]

    return write


def test_table_and_status(files, capsys):
    sizes = {8: 1.01, 64: 0.98, 512: 1.03, 2048: 1.2}
    a = [dict(E2E, T=tokens, us=100.0) for tokens in sizes]
    b = [dict(E2E, T=tokens, us=100.0 * by, date="later", commit="other") for tokens, by in sizes.items()]
    a += [dict(E2E, impl="torch", us=300.0), dict(RUN, what="ceilings", name="hbm read", us=980.0)]
    b += [dict(E2E, impl="torch", us=270.0), dict(RUN, what="ceilings", name="hbm read", us=980.0)]
    a += [dict(E2E, impl="torch", name="eager", skipped="no"), dict(RUN, what="gpu", name="start", watts=400)]
    b += [dict(E2E, scale="tensor", us=90.0)]
    words = files(a, b)
    assert compare.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| e2e | megamoe | 4 | 1.020 | 2.5 % | graph block T=2048 | 1.200 |"
    assert lines[3] == "| e2e | torch | 1 | 0.900 | 10.0 % | graph block T=8 | 0.900 |"
    assert lines[4] == "| ceilings | machine | 1 | 1.000 | 0.0 % | hbm read | 1.000 |"
    assert lines[-2:] == ["0 rows only in A, 1 only in B", "median point differs by 2.5 % (e2e)"]
    assert compare.main([*words, "--limit", "2"]) == 1


@pytest.mark.parametrize(("by", "status"), [(0.94, 1), (0.96, 0), (1.04, 0), (1.06, 1)])
def test_limit(files, by, status):
    assert compare.main(files([dict(E2E, us=50.0)], [dict(E2E, us=50.0 * by)])) == status


@pytest.mark.parametrize("name", [name for name in compare.KEY if name != "what"])
def test_rows_of_other_points_do_not_match(files, capsys, name):
    a = dict(GEMM, us=10.0)
    assert compare.main(files([a], [a | {name: "other"}])) == 2
    assert "no row of" in capsys.readouterr().err


def test_peers_and_ceilings_do_not_outvote_a_slow_section(files, capsys):
    even = [dict(RUN, what="ceilings", name=f"ceiling {n}", us=9.0) for n in range(20)]
    even += [dict(GEMM, impl="deep_gemm", rows_per_expert=n, us=9.0) for n in range(1, 21)]
    even += [dict(RUN, what="stages", name=f"kernel {n}", impl="megamoe", us=9.0) for n in range(20)]
    for slow in (E2E, GEMM):
        assert compare.main(files([*even, dict(slow, us=9.0)], [*even, dict(slow, us=18.0)])) == 1
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == f"median point differs by 100.0 % ({slow['what']}), above 5 %"
    even.append(dict(E2E, what="host", us=9.0))
    others = [dict(r, us=18.0) for r in (*even[:40], even[-1])] + even[40:-1]
    assert compare.main(files(even, others)) == 0
    assert "| host | megamoe | 1 | 2.000 |" in capsys.readouterr().out


def test_a_run_that_died_early(files, capsys):
    a = [dict(E2E, T=tokens, us=9.0) for tokens in range(1, 57)]
    words = files(a, [*a[:1], dict(a[1], us=None, skipped="out of memory"), dict(GEMM, us=9.0)])
    assert compare.main(words) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-2:] == ["55 rows only in A, 1 only in B", "median point differs by 0.0 % (e2e)"]
    assert "lacks 55 rows" in err and "--allow-missing" in err
    assert compare.main([*words, "--allow-missing"]) == 0 and not capsys.readouterr().err
    assert compare.main(files(a[:1], a)) == 0  # more than before is no failure
    ceiling = dict(RUN, what="ceilings", name="hbm read", us=980.0)
    assert compare.main(files([ceiling, *a], [ceiling])) == 2 and "no row of megamoe" in capsys.readouterr().err


def test_settings(files, capsys):
    """Rows of one setting belong together however its fields are ordered."""
    text = "tile_rows=64,cluster_cols=2"
    a = [dict(GEMM, us=10.0), dict(GEMM, us=20.0, knobs=text), dict(GEMM, us=9.0, impl="deep_gemm")]
    other = "cluster_cols=2 stages=None tile_rows=64"
    b = [dict(GEMM, us=40.0, knobs=other), dict(GEMM, us=9.0, impl="deep_gemm", knobs=other), dict(GEMM, us=10.0)]
    a.append(dict(GEMM, us=7.0, skew="zipf"))
    b.append(dict(GEMM, us=7.0, skew="zipf"))
    assert compare.main(files(a, b)) == 0  # the median of three, of which one is twice as slow
    out = capsys.readouterr().out
    assert (
        "| gemm | megamoe | 3 | 1.000 | 0.0 % | fc1 block rows_per_expert=512 cluster_cols=2,tile_rows=64 | 2.000 |"
        in out
    )
    assert "| gemm | deep_gemm | 1 | 1.000 |" in out and "0 rows only in A, 0 only in B" in out
    assert compare.main(files(a, [*b[:2], dict(GEMM, us=20.0), b[-1]])) == 1  # two of three


def test_gaps(files):
    """The gap before a sample changes heat and so times; before it was a key it was 1000 us."""
    old, one, two = (dict(GEMM, us=9.0) | more for more in ({}, {"gap_us": 1000.0}, {"gap_us": 2000.0}))
    assert [compare.main(files([old], [row])) for row in (old, one, two)] == [0, 0, 2]
    assert compare.main(files([two], [two])) == 0


def test_older_rows_and_the_last_of_several(files, capsys):
    old = {name: value for name, value in E2E.items() if name not in ("impl", "preset", "knobs")}
    old["command"] = "python tools/bench.py"
    assert compare.main(files([dict(old, us=10.0)], [dict(E2E, us=99.0), dict(E2E, us=10.2, world="processes")])) == 0
    assert "| e2e | megamoe | 1 | 1.020 | 2.0 % | graph block T=8 | 1.020 |" in capsys.readouterr().out


def test_files_that_cannot_be_read(files, tmp_path, capsys):
    a, b = files([dict(E2E, us=1.0)], [dict(E2E, us=1.0)])
    assert compare.main([a, str(tmp_path / "none.jsonl")]) == 2 and "none.jsonl" in capsys.readouterr().err
    Path(b).write_text("{\n")
    assert compare.main([a, b]) == 2 and "b.jsonl:1" in capsys.readouterr().err
