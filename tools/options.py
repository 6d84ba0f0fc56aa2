"""The command line of tools/bench.py, and how large a layer the GPU's memory allows."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import floors
import inputs
import peers

import megamoe
from megamoe import Knobs, MoEConfig

PRESETS = {
    "v3": dict(hidden=7168, intermediate=2048, num_experts=256, top_k=8),
    "v4-pro": dict(hidden=7168, intermediate=3072, num_experts=384, top_k=6),
    "v4-flash": dict(hidden=4096, intermediate=2048, num_experts=256, top_k=6),
    "qwen3-235b": dict(hidden=4096, intermediate=1536, num_experts=128, top_k=8),
    "kimi-k2": dict(hidden=7168, intermediate=2048, num_experts=384, top_k=8),
    "small": dict(hidden=2048, intermediate=768, num_experts=64, top_k=8),
}
SECTIONS = ("ceilings", "stages", "link", "gemm", "e2e", "host")
"""Sections in the order in which they run."""

GEMMS = ("fc1", "fc2")
GEMM_ROWS, QUICK_GEMM_ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096), (1, 64, 512)
LEAST_GAP_US = 200  # the sleep also covers the host's launch time
TOKENS, QUICK_TOKENS = (8, 64, 512, 2048, 8192, 32768), (8, 512, 8192)
SPARE_BYTES = 14 << 30  # tokens, results, dense operands and the ceilings' buffers
KNOBS_HELP = "fields of Knobs, as in tile_rows=128,tile_cols=256, or auto, what the layer chooses (default)"
ALL_PEERS = peers.LAYER_PEERS | peers.GEMM_PEERS
TORCH_PEERS = ("torch", "scaled_mm", "scaled_grouped_mm")
LIBRARIES = {"flashinfer_pull": "flashinfer", "flashinfer_push": "flashinfer", "deep_gemm": "deep_gemm"}
"""What must be importable for a peer to be measured by default."""


def add_shape(top: argparse.ArgumentParser) -> None:
    """Options of the layer's shape, for shape_of."""
    top.add_argument("--preset", choices=tuple(PRESETS), default="v3", help="layer shape (default: v3)")
    for name, what in ("hidden", "H"), ("intermediate", "I"), ("top-k", "K"):
        top.add_argument(f"--{name}", type=int, help=f"{what} instead of the preset's")
    top.add_argument(
        "--experts", type=int, help="experts over all ranks (default: the preset's, halved until they fit)"
    )


def shape_of(args: argparse.Namespace) -> dict[str, int]:
    """hidden, intermediate, num_experts and top_k: the preset's, or those given instead."""
    given = dict(hidden=args.hidden, intermediate=args.intermediate, num_experts=args.experts, top_k=args.top_k)
    return PRESETS[args.preset] | {name: value for name, value in given.items() if value is not None}


def check_ranks(top: argparse.ArgumentParser, args: argparse.Namespace, world_size: int, kinds: list[str]) -> None:
    """End the command line `top` on a --virtual out of range, or one of routings `kinds` that needs more ranks."""
    if args.virtual is not None and not 2 <= args.virtual <= 8:
        top.error(f"--virtual {args.virtual}: 2 to 8")
    if "empty_rank" in kinds and world_size == 1:
        top.error("--routing empty_rank: needs several ranks")


def parser(description: str | None = None) -> argparse.ArgumentParser:
    """The command line; None where --quick or the number of ranks decides."""
    top = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")  # noqa: E731
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    top.add_argument("--what", type=words, help=f"sections, a comma list of {', '.join((*SECTIONS, *GEMMS))}")
    add_shape(top)
    top.add_argument(
        "--tokens", type=numbers, help="T of each rank, a comma list (default: those of 8..32768 that fit)"
    )
    top.add_argument("--scale", choices=("block", "tensor", "both"), help="scale modes (default: both; block if quick)")
    top.add_argument("--accum", choices=("promoted", "single"), default="promoted", help="in tensor mode")
    top.add_argument(
        "--routing",
        type=words,
        default=["balanced"],
        help=f"of stages, e2e and host, a comma list of {', '.join(inputs.ROUTINGS)} (default: balanced)",
    )
    top.add_argument(
        "--peers",
        default="importable",
        help=f"a comma list of {', '.join(ALL_PEERS)} (torch brings its GEMMs), all or none "
        "(default: torch and those whose library is installed)",
    )
    top.add_argument("--virtual", type=int, metavar="N", help="N ranks (2 to 8) on one GPU; without peers")
    top.add_argument(
        "--knobs",
        default="auto",
        help=f"{KNOBS_HELP}; for GEMMs alone several, in quotes with ; between them",
    )
    top.add_argument("--gemm-rows", type=numbers, help="rows an expert of section gemm, a comma list (1..4096)")
    top.add_argument(
        "--gemm-experts", type=int, default=32, help="experts with rows there (default: 32; at most what fits)"
    )
    top.add_argument(
        "--gemm-skew",
        type=words,
        default=["balanced"],
        help=f"how rows are spread over them, a comma list of {', '.join(inputs.SKEWS)} (default: balanced)",
    )
    top.add_argument(
        "--gap-us", type=float, default=2000.0, help="GPU sleep before each sample there, 200 or more (default: 2000)"
    )
    top.add_argument("--quick", action="store_true", help="fewer points and samples")
    top.add_argument("--seed", type=int, default=0)
    top.add_argument("--timeout-s", type=float, default=60.0, help="limit of every wait for a peer (default: 60)")
    top.add_argument(
        "--turns",
        type=Path,
        metavar="FILE",
        help="take turns with other runs on the same GPUs that name this file; with --experts and --tokens",
    )
    top.add_argument("--out", type=Path, help="file to which rows are appended, as JSON lines")
    return top


def parse(argv: list[str] | None, processes: int, description: str | None = None) -> argparse.Namespace:
    """Checked arguments with every default filled in. Adds world_size, shape (None preset if it is not one's),
    scales, gemms, layer_peers, gemm_peers, settings, given_tokens and runs (samples of a point)."""
    top = parser(description)
    args = top.parse_args(argv)
    args.world_size = args.virtual or processes
    check_ranks(top, args, args.world_size, args.routing)
    if args.virtual and processes > 1:
        top.error("--virtual: without torchrun")
    _sections(top, args, processes)
    _peers(top, args)
    for kind in args.routing:
        if kind not in inputs.ROUTINGS:
            top.error(f"--routing {kind}: one of {', '.join(inputs.ROUTINGS)}")
    args.shape = shape_of(args)
    if any(args.shape[name] != PRESETS[args.preset][name] for name in ("hidden", "intermediate", "top_k")):
        args.preset = None
    scale = args.scale or ("block" if args.quick else "both")
    args.scales = ("block", "tensor") if scale == "both" else (scale,)
    _settings(top, args)
    _gemms(top, args)
    args.given_tokens = args.tokens is not None
    if args.turns and not (args.experts and args.given_tokens):
        top.error("--turns: needs --experts and --tokens, because free memory, which decides else, is shared")
    if args.turns and (args.turns.is_dir() or not args.turns.parent.is_dir()):
        top.error(f"--turns {args.turns}: a file in a folder that is there")
    if args.turns and "host" in args.what:
        top.error("--turns: not for section host, whose times the others' compilation would change")
    args.tokens = sorted(args.tokens or (QUICK_TOKENS if args.quick else TOKENS))
    args.runs = 10 if args.quick else 20
    return args


def parse_knobs(top: argparse.ArgumentParser, text: str) -> Knobs | None:
    """Knobs of "field=value,field=value"; None of "auto". Another text ends the command line `top`."""
    if text == "auto":
        return None
    try:
        pairs = [part.split("=") for part in text.split(",")]
        words = {"true": True, "false": False}
        read = lambda value: words.get(value.lower(), value) if value.isalpha() else int(value)  # noqa: E731
        return Knobs(**{name: read(value) for name, value in pairs})
    except (TypeError, ValueError) as error:
        top.error(f"--knobs {text}: auto, or fields of Knobs as in tile_rows=128,cluster_cols=2 ({error})")


def _settings(top: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fill in `settings`, Knobs or None by text, and `knobs`, the first: the only one where layers run."""
    texts = ["".join(part.split()) for part in args.knobs.split(";")]
    args.settings = {text: parse_knobs(top, text) for text in texts}
    if len(args.settings) < len(texts):
        top.error(f"--knobs {args.knobs}: a setting is there twice")
    whole = [what for what in args.what if what not in ("ceilings", "gemm")]
    if len(texts) > 1 and whole:
        top.error(f"--knobs: {len(texts)} settings are for --what gemm, fc1 or fc2 alone, not for {', '.join(whole)}")
    args.knobs = args.settings[texts[0]]


def _sections(top: argparse.ArgumentParser, args: argparse.Namespace, processes: int) -> None:
    """Fill in `what` and `gemms`: fc1 and fc2 are sections gemm of one kernel."""
    skipped = {"link"} if processes == 1 else {"gemm"}
    named = args.what or [what for what in SECTIONS if what not in skipped | ({"gemm"} if args.virtual else set())]
    for what in named:
        if what not in (*SECTIONS, *GEMMS):
            top.error(f"--what {what}: one of {', '.join((*SECTIONS, *GEMMS))}")
        if what == "link" and processes == 1:
            top.error("--what link: needs several ranks on GPUs of their own, see torchrun above")
        if what in ("gemm", *GEMMS) and args.virtual:
            top.error(f"--what {what}: without --virtual")
    args.gemms = tuple(name for name in GEMMS if name in named or "gemm" in named)
    args.what = [what for what in SECTIONS if what in named or (what == "gemm" and args.gemms)]


def _gemms(top: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check the options of section gemm and fill in `gemm_rows`, in ascending order."""
    args.gemm_rows = sorted(set(args.gemm_rows or (QUICK_GEMM_ROWS if args.quick else GEMM_ROWS)))
    if args.gemm_rows[0] < 1:
        top.error(f"--gemm-rows {args.gemm_rows[0]}: 1 or more")
    if args.gemm_experts < 1:
        top.error(f"--gemm-experts {args.gemm_experts}: 1 or more")
    for kind in args.gemm_skew:
        if kind not in inputs.SKEWS:
            top.error(f"--gemm-skew {kind}: one of {', '.join(inputs.SKEWS)}")
    if not LEAST_GAP_US <= args.gap_us <= 1e6:
        top.error(f"--gap-us {args.gap_us:g}: {LEAST_GAP_US} to 1000000")


def _peers(top: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fill in layer_peers and gemm_peers."""
    if args.peers == "importable":
        chosen = [n for n in ALL_PEERS if n in TORCH_PEERS or importlib.util.find_spec(LIBRARIES[n]) is not None]
    elif args.peers in ("all", "none"):
        chosen = list(ALL_PEERS) if args.peers == "all" else []
    else:
        chosen = args.peers.split(",")
        chosen += TORCH_PEERS if "torch" in chosen else ()
    for name in chosen:
        if name not in ALL_PEERS:
            top.error(f"--peers {name}: one of {', '.join(ALL_PEERS)}, all, none")
    args.layer_peers = tuple(name for name in peers.LAYER_PEERS if name in chosen)
    args.gemm_peers = tuple(name for name in peers.GEMM_PEERS if name in chosen)


def make_config(args: argparse.Namespace, scale: str, experts: int, max_tokens: int) -> MoEConfig:
    """The layer of a scale mode."""
    shape = args.shape | dict(num_experts=experts)
    accum = args.accum if scale == "tensor" else "promoted"
    return MoEConfig(**shape, max_tokens=max_tokens, scale=scale, accum=accum)


def plan(args: argparse.Namespace, world_size: int, free: int) -> dict[str, MoEConfig]:
    """A config a scale mode, as large as `free` bytes for each rank allow; drops default T that do not fit.

    One scale mode's weights are held at a time, and beside them a peer's: they take up to a fifth each.
    """
    probe = make_config(args, "block", args.shape["num_experts"], 1)
    each = floors.weight_bytes(probe, 2 * probe.intermediate, probe.hidden) * 3 // 2  # w13 is two thirds
    experts = args.experts or floors.pick_experts(probe.num_experts, each, world_size, int(0.2 * free))
    extra: list[int] = []
    for scale in args.scales if "link" in args.what else ():
        extra += floors.link_tokens(make_config(args, scale, experts, 1), args.quick)
    spare = SPARE_BYTES // (args.virtual or 1)
    while True:
        largest = max([*args.tokens, *extra])
        configs = {scale: make_config(args, scale, experts, largest) for scale in args.scales}
        sizes = [megamoe.memory_estimate(cfg, world_size) for cfg in configs.values()]
        need = sum(size["arena"] + size["pools"] for size in sizes) + 2 * max(size["layer_weights"] for size in sizes)
        if need + spare <= free or args.given_tokens or len(args.tokens) == 1:
            return configs
        args.tokens.pop()
