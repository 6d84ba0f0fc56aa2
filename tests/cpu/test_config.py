"""MoEConfig and Knobs: what is refused, by name, and what a fingerprint covers."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe.config import BLOCK, MAX_EXPERTS, MAX_RANKS, MAX_TOKENS, MAX_TOP_K, Knobs, MoEConfig, supported_modes
from megamoe.errors import ArgumentError, ConfigError, MegaMoEError

SMALL = dict(hidden=256, intermediate=384, num_experts=8, top_k=2, max_tokens=16)
MODES = supported_modes()


def mode_id(mode: dict[str, object]) -> str:
    """A mode's values, for test ids."""
    return "-".join(str(value) for value in mode.values())


@st.composite
def configs(draw: st.DrawFn) -> MoEConfig:
    """Any config of a supported mode and moderate size."""
    experts = draw(st.integers(1, MAX_EXPERTS))
    return MoEConfig(
        hidden=BLOCK * draw(st.integers(1, 64)),
        intermediate=BLOCK * draw(st.integers(1, 64)),
        num_experts=experts,
        top_k=draw(st.integers(1, min(MAX_TOP_K, experts))),
        max_tokens=draw(st.integers(1, 8192)),
        clamp=draw(st.none() | st.floats(0.5, 100)),
        pool_rows=draw(st.none() | st.integers(1, 10**6)),
        **draw(st.sampled_from(MODES)),
    )


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_supported_modes_are_constructible(mode: dict[str, object]) -> None:
    cfg = MoEConfig(**SMALL, **mode)
    assert all(getattr(cfg, name) == value for name, value in mode.items())


def test_supported_modes_differ_and_cover_the_fields() -> None:
    assert len({MoEConfig(**SMALL, **mode) for mode in MODES}) == len(MODES)
    for field, values in {
        "fp8": {"e4m3", "e5m2"},
        "scale": {"block", "tensor"},
        "act_group": {64, 128},
        "accum": {"promoted", "single"},
        "route_weight": {"output", "activation"},
    }.items():
        assert {getattr(MoEConfig(**SMALL, **mode), field) for mode in MODES} == values


@pytest.mark.parametrize(
    ("field", "value", "others"),
    [
        ("hidden", 0, {}),
        ("hidden", 192, {}),
        ("hidden", 128.0, {}),
        ("hidden", True, {}),
        ("hidden", 128 * 1000, {}),
        ("intermediate", -128, {}),
        ("intermediate", 1400, {}),
        ("intermediate", "2048", {}),
        ("num_experts", 0, {}),
        ("num_experts", MAX_EXPERTS + 1, {}),
        ("top_k", 0, {}),
        ("top_k", MAX_TOP_K + 1, {"num_experts": 64}),
        ("top_k", 9, {}),
        ("max_tokens", 0, {}),
        ("max_tokens", None, {}),
        ("fp8", "e3m4", {}),
        ("fp8", "E4M3", {}),
        ("scale", "row", {}),
        ("act_group", 32, {}),
        ("act_group", 64, {"scale": "tensor"}),
        ("accum", "double", {}),
        ("accum", "single", {"scale": "block"}),
        ("route_weight", "input", {}),
        ("clamp", 0, {}),
        ("clamp", -1.0, {}),
        ("clamp", math.inf, {}),
        ("clamp", math.nan, {}),
        ("clamp", "7", {}),
        ("pool_rows", 0, {}),
        ("pool_rows", 1 << 31, {}),
    ],
)
def test_refusals_name_field_value_and_what_is_allowed(field: str, value: object, others: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        MoEConfig(**{**SMALL, **others, field: value})
    error = caught.value
    assert error.name == field
    assert error.value is value or error.value == value
    assert str(error) == f"{field} = {value!r}: must be {error.allowed}"
    assert isinstance(error, ArgumentError) and isinstance(error, MegaMoEError) and isinstance(error, ValueError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tile_rows", 96),
        ("tile_rows", "128"),
        ("tile_cols", 64),
        ("mma_cols", 192),
        ("cluster_rows", 0),
        ("cluster_rows", 4),
        ("cluster_cols", True),
        ("swap_ab", None),
        ("pingpong", 1),
        ("pingpong", "true"),
        ("stages", 1),
        ("stages", 13),
        ("copy_depth", 1),
        ("copy_depth", 2.0),
    ],
)
def test_knobs_refuse_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Knobs(**{field: value})
    assert caught.value.name == field


def test_turns_need_tiles_of_one_warpgroup() -> None:
    assert Knobs(tile_rows=64, pingpong=True).pingpong
    with pytest.raises(ConfigError, match="pingpong = True: must be False with tile_rows=128"):
        Knobs(pingpong=True)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("tile_rows", dict(tile_rows=48)),
        ("tile_cols", dict(tile_rows=256, tile_cols=256)),
        ("mma_cols", dict(tile_cols=256, mma_cols=256)),
        ("cluster_cols", dict(tile_rows=8, cluster_cols=2)),
        ("pingpong", dict(tile_rows=64, pingpong=True)),
    ],
)
def test_swapped_operands_refuse_by_name(field: str, given: dict) -> None:
    with pytest.raises(ConfigError, match=f"{field} = {given[field]!r}: must be ") as caught:
        Knobs(swap_ab=True, **given)
    assert caught.value.name == field


def test_llama_order_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="Llama-4"):
        MoEConfig(**SMALL, route_weight="input")


@given(configs())
def test_configs_are_values(cfg: MoEConfig) -> None:
    for twin in (dataclasses.replace(cfg), copy.deepcopy(cfg), pickle.loads(pickle.dumps(cfg))):
        assert twin == cfg and hash(twin) == hash(cfg) and twin.fingerprint() == cfg.fingerprint()
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.hidden = 128  # type: ignore[misc]


OTHER = dict(
    hidden=384,
    intermediate=128,
    num_experts=16,
    top_k=3,
    max_tokens=17,
    fp8="e5m2",
    scale="tensor",
    act_group=64,
    accum="single",
    route_weight="activation",
    clamp=7.0,
    pool_rows=9,
)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(MoEConfig)])
def test_fingerprint_covers_every_field(field: str) -> None:
    start = MoEConfig(**SMALL, scale="tensor") if field == "accum" else MoEConfig(**SMALL)
    assert dataclasses.replace(start, **{field: OTHER[field]}).fingerprint() != start.fingerprint()


@given(configs(), configs())
def test_fingerprints_are_equal_only_for_equal_configs(one: MoEConfig, two: MoEConfig) -> None:
    assert (one.fingerprint() == two.fingerprint()) == (one == two)


def test_clamp_is_one_value_whether_int_or_float() -> None:
    assert MoEConfig(**SMALL, clamp=7).fingerprint() == MoEConfig(**SMALL, clamp=7.0).fingerprint()


@given(configs(), st.integers(-1, MAX_RANKS + 1))
def test_experts_local_divides_or_refuses(cfg: MoEConfig, ranks: int) -> None:
    if 1 <= ranks <= MAX_RANKS and cfg.num_experts % ranks == 0:
        assert cfg.experts_local(ranks) * ranks == cfg.num_experts
    else:
        with pytest.raises(ConfigError) as caught:
            cfg.experts_local(ranks)
        assert caught.value.name in ("world_size", "num_experts")


@given(configs(), st.sampled_from([1, 2, 4, 8]))
def test_pool_holds_every_legal_routing(cfg: MoEConfig, ranks: int) -> None:
    cfg = dataclasses.replace(cfg, num_experts=8 * max(1, cfg.num_experts // 8), top_k=min(cfg.top_k, 8))
    most = ranks * cfg.max_tokens * cfg.top_k  # every token names one expert of this rank, K times
    assert cfg.pool_capacity(ranks) == (most if cfg.pool_rows is None else min(most, cfg.pool_rows))


def test_a_pool_without_bound_holds_duplicates_beyond_the_experts() -> None:
    cfg = MoEConfig(hidden=128, intermediate=128, num_experts=8, top_k=6, max_tokens=10)
    assert cfg.pool_capacity(4) == 4 * 10 * 6  # two experts a rank, but unchecked ids may all be 0
    assert dataclasses.replace(cfg, pool_rows=4 * 10 * 2).pool_capacity(4) == 4 * 10 * 2


def test_pool_rows_stay_int32_at_every_maximum() -> None:
    cfg = MoEConfig(hidden=128, intermediate=128, num_experts=MAX_EXPERTS, top_k=MAX_TOP_K, max_tokens=MAX_TOKENS)
    assert cfg.pool_capacity(MAX_RANKS) == MAX_RANKS * MAX_TOKENS * MAX_TOP_K < 1 << 31


def test_knobs_print_what_differs_from_the_defaults() -> None:
    assert repr(Knobs()) == "Knobs()"
    text = "Knobs(tile_cols=256, cluster_rows=2, schedule='atomic')"
    assert repr(Knobs(tile_cols=256, cluster_rows=2, schedule="atomic")) == text
    for knobs in (Knobs(tile_rows=64, pingpong=True, stages=4, copy_depth=2), Knobs(swap_ab=True, tile_rows=8)):
        assert eval(repr(knobs)) == knobs


def test_knobs_describe_names_every_field() -> None:
    text = Knobs(tile_rows=64, stages=4).describe()
    assert all(f"{f.name}=" in text for f in dataclasses.fields(Knobs))
    assert "tile_rows=64" in text and "stages=4" in text
