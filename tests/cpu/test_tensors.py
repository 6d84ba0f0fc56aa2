"""Tensors whose address a kernel may get, and everything that only looks like one."""

from __future__ import annotations

import os

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given as given_examples
from torch._subclasses import FakeTensorMode

from megamoe import InputError, MoEConfig
from megamoe.inputs import check_inputs, check_out, quick_inputs
from megamoe.kernels import rows
from megamoe.tensors import check_tensor

CFG = MoEConfig(hidden=128, intermediate=128, num_experts=4, top_k=2, max_tokens=8)
CPU = torch.device("cpu")


class Labelled(torch.Tensor):
    """A subclass with nothing but a name, as frameworks make them for their parameters."""


class Wrapper(torch.Tensor):
    """A wrapper subclass: its elements are in another tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


@pytest.fixture(scope="module")
def mesh():
    """A device mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def freed(t: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory was given back, as FSDP does with gathered parameters."""
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def shrunk(t: torch.Tensor) -> torch.Tensor:
    """A tensor whose storage no longer holds its last element."""
    t = t.clone()
    t.untyped_storage().resize_(t.untyped_storage().nbytes() - 1)
    return t


def fake(t: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode().from_tensor(t)


SPOILED = {
    "fake": (fake, "FakeTensor.*torch.ops.megamoe"),
    "functional": (torch._to_functional_tensor, "functional tensor.*torch.ops.megamoe"),
    "freed": (freed, "on a storage of 0.*resized or freed"),
    "shrunk": (shrunk, "on a storage of .*resized or freed"),
    "wrapper": (Wrapper, "Wrapper.*not a wrapper"),
    "negative": (lambda t: torch._neg_view(t) if t.is_floating_point() else t[:, :1], "resolve_neg|shape"),
    "sparse": (lambda t: t.to_sparse(), "layout.*dense"),
    "nested": (lambda t: torch.nested.nested_tensor([t[:1], t[1:]]), "nested.*dense"),
    "meta": (lambda t: t.to("meta"), "device = 'meta'"),
    "list": (lambda t: t.tolist(), "torch.Tensor|one tensor"),
}


def given(tokens: int = 4) -> dict[str, torch.Tensor]:
    """Good arguments of a forward, and its output."""
    return dict(
        x=torch.zeros(tokens, 128, dtype=torch.bfloat16),
        topk_ids=torch.zeros(tokens, 2, dtype=torch.int32),
        topk_weights=torch.zeros(tokens, 2),
        out=torch.zeros(tokens, 128, dtype=torch.bfloat16),
    )


def check(args: dict[str, torch.Tensor]) -> None:
    """What a forward checks."""
    quick = quick_inputs(CFG, CPU, args["x"], args["topk_ids"], args["topk_weights"], args["out"])
    found = check_inputs(CFG, CPU, args["x"], args["topk_ids"], args["topk_weights"])
    check_out(CFG, CPU, args["out"], found.tokens)
    assert quick is None or (all(a is b for a, b in zip(quick[:4], found[:4])) and quick.tokens == found.tokens)


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights", "out"])
@pytest.mark.parametrize("kind", SPOILED)
def test_a_forward_names_what_it_cannot_read(kind: str, name: str) -> None:
    args = given()
    check(args)
    spoil, text = SPOILED[kind]
    args[name] = spoil(args[name])
    assert quick_inputs(CFG, CPU, args["x"], args["topk_ids"], args["topk_weights"], args["out"]) is None
    with pytest.raises(InputError, match=text) as caught:
        check(args)
    assert caught.value.name.split(".")[0] == name


@pytest.mark.parametrize("kind", ["fake", "functional", "wrapper"])
def test_an_empty_one_is_refused_too(kind: str) -> None:
    args = given(0)
    check(args)
    args["x"] = SPOILED[kind][0](args["x"])
    with pytest.raises(InputError):
        check(args)


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights", "out"])
def test_dtensors_are_told_what_to_pass(name: str, mesh) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    args = given()
    args[name] = distribute_tensor(args[name], mesh, [Replicate()])
    with pytest.raises(InputError, match=rf"{name} = 'a DTensor': .*{name}.to_local\(\)"):
        check(args)
    args[name] = args[name].to_local()
    check(args)


@pytest.mark.parametrize("kind", [k for k in SPOILED if k not in ("sparse", "nested")])  # torch has none of FP8
def test_codes_and_scales_are_checked_like_x(kind: str) -> None:
    args, scales = given(), torch.ones(4, 1)
    codes = args["x"].to(torch.float8_e4m3fn)
    check({**args, "x": (codes, scales)})
    spoil, _ = SPOILED[kind]
    for name, x in (("x scales", (codes, spoil(scales))), ("x", (spoil(codes), scales))):
        if kind == "negative" and name == "x":
            continue  # nor negative views of it
        with pytest.raises(InputError) as caught:
            check({**args, "x": x})
        assert caught.value.name.split(".")[0] == name


WRONG = {
    "x": [
        lambda t: t.float(),
        lambda t: t[:, :64].contiguous(),
        lambda t: t[None],
        lambda t: t.repeat(3, 1),
        lambda t: t[0],
    ],
    "topk_ids": [
        lambda t: t.short(),
        lambda t: t[:3],
        lambda t: t[:, :1].contiguous(),
        lambda t: t.t().contiguous().t(),
    ],
    "topk_weights": [lambda t: t.double(), lambda t: t[:3], lambda t: t.half()],
    "out": [lambda t: t.float(), lambda t: t[:3], lambda t: t.t().contiguous().t(), lambda t: t.requires_grad_()],
}
"""What the shortcut must leave to the checks: other dtypes, shapes, strides, too many tokens, autograd."""


@pytest.mark.parametrize("name,number", [(name, i) for name, spoils in WRONG.items() for i in range(len(spoils))])
def test_the_shortcut_of_good_arguments_passes_no_others(name: str, number: int) -> None:
    args = given()
    assert quick_inputs(CFG, CPU, *args.values()) is not None
    args[name] = WRONG[name][number](args[name])
    assert quick_inputs(CFG, CPU, *args.values()) is None
    with pytest.raises(InputError):
        check(args)


def cut(t: torch.Tensor) -> torch.Tensor:
    return shrunk(t) if t.numel() else t


LAYOUTS = {
    "plain": lambda t: t,
    "view": lambda t: torch.cat([t, t])[len(t) :],
    "shifted": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) if t.numel() else t,
    "columns": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "transposed": lambda t: t.t().contiguous().t(),
    "expanded": lambda t: t[:1].expand(len(t), -1),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "freed": freed,
    "shrunk": cut,
}
"""How a tensor of the right size may lie in memory."""


@given_examples(
    tokens=st.sampled_from([0, 1, 4, 8, 9]),
    columns=st.sampled_from([128, 128, 64]),
    dtypes=st.tuples(*(st.sampled_from([torch.bfloat16, torch.float32, torch.int32, torch.int64]) for _ in range(4))),
    right=st.tuples(*(st.sampled_from([True, True, True, True, False]) for _ in range(4))),
    layouts=st.tuples(*(st.sampled_from(["plain"] * 9 + list(LAYOUTS)) for _ in range(4))),
)
def test_the_shortcut_accepts_nothing_that_the_checks_refuse(tokens, columns, dtypes, right, layouts) -> None:
    good = (torch.bfloat16, torch.int32, torch.float32, torch.bfloat16)
    shapes = ((tokens, columns), (tokens, 2), (tokens, 2), (tokens, columns))
    args = [
        LAYOUTS[layout](torch.zeros(shape, dtype=fits if ok else other))
        for shape, fits, ok, other, layout in zip(shapes, good, right, dtypes, layouts)
    ]
    if quick_inputs(CFG, CPU, *args) is not None:
        check(dict(zip(("x", "topk_ids", "topk_weights", "out"), args)))  # raises if they refuse


def test_the_shortcut_minds_alignment() -> None:
    args, flat = given(), torch.zeros(4 * 128 + 1, dtype=torch.bfloat16)
    for name in ("x", "out"):
        assert quick_inputs(CFG, CPU, *{**args, name: flat[1:].view(4, 128)}.values()) is None


def test_inside_vmap_is_named() -> None:
    args = given()

    def one(x: torch.Tensor) -> torch.Tensor:
        check({**args, "x": x})
        return x

    with pytest.raises(InputError, match="vmap"):
        torch.vmap(one)(torch.zeros(2, 4, 128, dtype=torch.bfloat16))


def test_harmless_subclasses_pass() -> None:
    args = given()
    for kind in (lambda t: t.as_subclass(Labelled), lambda t: torch.nn.Parameter(t, requires_grad=False)):
        check({name: kind(t) for name, t in args.items()})


def test_views_and_offsets_pass() -> None:
    big = torch.zeros(10, 128, dtype=torch.bfloat16)
    check_tensor("x", big[6:], (torch.bfloat16,), (4, 128), CPU, 16)
    check_tensor("x", big[10:], (torch.bfloat16,), (0, 128), CPU, 16)
    with pytest.raises(InputError, match=r"x\.data_ptr"):
        check_tensor("x", big.flatten()[1:129], (torch.bfloat16,), (128,), CPU, 16)


@pytest.mark.parametrize("kind", [k for k in SPOILED if k != "meta"])
def test_kernels_alone_check_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    good = torch.zeros(4, 16)
    rows.check("rows", good, torch.float32, 4, 16)
    with pytest.raises(InputError, match="rows"):
        rows.check("rows", SPOILED[kind][0](good), torch.float32, 4, 16)
