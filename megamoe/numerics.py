"""Number formats and rounding, in torch, on CPU or GPU: the only definition, shared by weights, reference and tests.

A value v of a group with the largest magnitude amax becomes

    s = max(amax, AMAX_FLOOR) / fp8_max          (fp32)
    code = cast(clamp(v / s, -fp8_max, fp8_max))  (fp32 division, round to nearest, ties to even)

amax ignores NaN, so one NaN does not change its neighbours' codes; the code of NaN is NaN. An infinite
value in a group makes s infinite: the group then dequantises to NaN. With a static scale it saturates.

torch divides a CUDA tensor by a Python number as a product with the reciprocal, which rounds differently;
`_divide` therefore always divides by a tensor on the same device. Every new tensor names its device, so that
torch.set_default_device and `with torch.device(...)` change nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from .config import BLOCK, FP8_MAX
from .errors import InputError

FP8_DTYPE = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""torch dtype of each format name."""

AMAX_FLOOR = 1e-4
"""Smallest amax that a scale is made from, so that a group of zeros has a usable scale."""

_CHUNK = 1 << 24  # elements of a weight that are fp32 at one time


class CanonicalExperts(NamedTuple):
    """FP8 experts in checkpoint order, as the oracle reads them (kernels read a permuted copy).

    w13 [E_local, 2I, H] (gate rows, then up rows) and w2 [E_local, H, I], FP8.
    "block": w13_scale fp32 [E_local, 2I/128, H/128], w2_scale fp32 [E_local, H/128, I/128].
    "tensor": w13_scale and w2_scale fp32 [E_local]; x_scale and act_scale are static.
    Scales multiply: value = code * scale.
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    x_scale: float | None = None
    act_scale: float | None = None


@contextmanager
def exact_matmul() -> Iterator[None]:
    """fp32 products without TF32, bf16 passes or autocast, whatever the process has set; restored afterwards.

    torch has two interfaces for TF32 and refuses the older one once the newer one is in use, so the older
    is tried first and the newer touched only where the process has used it already. Also a decorator.
    """
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            before = torch.get_float32_matmul_precision()
        except RuntimeError:
            for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
                stack.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
                backend.fp32_precision = "ieee"
        else:
            if before != "highest":
                stack.callback(torch.set_float32_matmul_precision, before)
                torch.set_float32_matmul_precision("highest")
        yield


def fp32(value: float) -> float:
    """The fp32 number nearest to `value`, infinite beyond the range of fp32."""
    return ctypes.c_float(value).value


def fp8_dtype(fp8: str) -> torch.dtype:
    """torch dtype of "e4m3" or "e5m2". Raises InputError for another name."""
    if fp8 not in FP8_DTYPE:
        raise InputError("fp8", fp8, "'e4m3' or 'e5m2'")
    return FP8_DTYPE[fp8]


def _divide(x: Tensor, divisor: float) -> Tensor:
    return x / torch.full((1,), divisor, dtype=x.dtype, device=x.device)


def _scale(amax: Tensor, fp8: str) -> Tensor:
    """fp32 scale of an fp32 amax."""
    return _divide(amax.clamp(min=AMAX_FLOOR), FP8_MAX[fp8])


def cast(x: Tensor, fp8: str) -> Tensor:
    """FP8 codes of fp32 values already divided by their scale: saturates, NaN stays NaN."""
    return x.clamp(-FP8_MAX[fp8], FP8_MAX[fp8]).to(fp8_dtype(fp8))


def magnitude(x: Tensor) -> Tensor:
    """fp32 |x| with NaN as 0, for an amax that ignores NaN."""
    x = x.float()
    return torch.where(x.isnan(), 0.0, x.abs())


def _check_multiple(name: str, x: Tensor, multiple: int, dims: int) -> None:
    if x.ndim < dims or any(size % multiple for size in x.shape[-dims:]):
        raise InputError(f"{name}.shape", tuple(x.shape), f"with the last {dims} a multiple of {multiple}")


def quantize_groups(x: Tensor, group: int, fp8: str) -> tuple[Tensor, Tensor]:
    """Quantise rows with one scale for each `group` columns.

    x [..., C], any float dtype (read as fp32). Returns codes FP8 [..., C] and scales fp32 [..., C/group].
    Raises InputError when C is not a multiple of group.
    """
    _check_multiple("x", x, group, 1)
    grouped = x.float().unflatten(-1, (x.shape[-1] // group, group))
    scales = _scale(magnitude(grouped).amax(-1), fp8)
    return cast(grouped / scales.unsqueeze(-1), fp8).flatten(-2), scales


def quantize_static(x: Tensor, scale: float, fp8: str) -> Tensor:
    """Codes FP8 of cast(x / scale) with a static scale (tensor mode); any shape and float dtype."""
    return cast(_divide(x.float(), scale), fp8)


def _row_chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(_CHUNK // columns // BLOCK, 1) * BLOCK
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def quantize_weight_blocks(w: Tensor, fp8: str) -> tuple[Tensor, Tensor]:
    """Quantise weights with one scale for each 128x128 block.

    w [..., N, K], any float dtype, N and K multiples of 128. Returns codes FP8 [..., N, K] and scales
    fp32 [..., N/128, K/128]. fp32 temporaries stay small whatever the size of w.
    """
    _check_multiple("w", w, BLOCK, 2)
    lead, (n, k) = w.shape[:-2], w.shape[-2:]
    codes = torch.empty(w.shape, dtype=fp8_dtype(fp8), device=w.device)
    scales = torch.empty((*lead, n // BLOCK, k // BLOCK), dtype=torch.float32, device=w.device)
    flat_codes, flat_scales = codes.view(-1, n, k), scales.view(-1, n // BLOCK, k // BLOCK)
    for index, matrix in enumerate(w.unsqueeze(0).flatten(0, -3)):
        for rows in _row_chunks(n, k):
            blocks = matrix[rows].float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
            scale = _scale(magnitude(blocks).amax((1, 3)), fp8)
            part = cast(blocks / scale[:, None, :, None], fp8)
            flat_codes[index, rows] = part.view(-1, k)
            flat_scales[index, rows.start // BLOCK : -(-rows.stop // BLOCK)] = scale
    return codes, scales


def quantize_weight_tensor(w: Tensor, fp8: str) -> tuple[Tensor, Tensor]:
    """Quantise weights with one scale an expert.

    w [E, N, K], any float dtype. Returns codes FP8 [E, N, K] and scales fp32 [E].
    """
    if w.ndim != 3:
        raise InputError("w.shape", tuple(w.shape), "[E, N, K]")
    codes = torch.empty(w.shape, dtype=fp8_dtype(fp8), device=w.device)
    amax = torch.zeros(w.shape[0], dtype=torch.float32, device=w.device)
    chunks = list(_row_chunks(*w.shape[1:]))
    for index, matrix in enumerate(w):
        for rows in chunks:
            amax[index] = torch.maximum(amax[index], magnitude(matrix[rows]).amax())
    scales = _scale(amax, fp8)
    for index, matrix in enumerate(w):
        for rows in chunks:
            codes[index, rows] = cast(matrix[rows].float() / scales[index : index + 1], fp8)
    return codes, scales


def dequantize_groups(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of quantize_groups: codes [..., C], scales [..., C/group] -> [..., C] in dtype."""
    groups = scales.shape[-1]
    grouped = codes.to(dtype).unflatten(-1, (groups, codes.shape[-1] // groups))
    return (grouped * scales.to(dtype).unsqueeze(-1)).flatten(-2)


def dequantize_static(codes: Tensor, scale: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of quantize_static, in dtype."""
    return codes.to(dtype) * scale


def dequantize_weight_blocks(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of quantize_weight_blocks: codes [..., N, K], scales [..., N/128, K/128] -> [..., N, K] in dtype.

    The result is whole, 4 or 8 bytes an element: hand in one expert at a time when weights are big.
    """
    blocks = codes.to(dtype).unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    return (blocks * scales.to(dtype)[..., :, None, :, None]).flatten(-2).flatten(-3, -2)


def dequantize_weight_tensor(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of quantize_weight_tensor: codes [E, N, K], scales [E] -> [E, N, K] in dtype."""
    return codes.to(dtype) * scales.to(dtype)[:, None, None]


def swiglu(gate: Tensor, up: Tensor, clamp: float | None = None) -> Tensor:
    """silu(gate) * up in the dtype of its arguments; with clamp = c, gate <= c and |up| <= c before.

    silu(g) = g / (1 + exp(-g)) (Shazeer 2020, "GLU variants improve transformer"). Clamps keep NaN.
    """
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return torch.nn.functional.silu(gate) * up


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] along dimension 0; FP8 goes as bytes, because torch cannot index it everywhere."""
    if x.dtype in FP8_DTYPE.values():
        return x.view(torch.uint8).index_select(0, rows).view(x.dtype)
    return x.index_select(0, rows)


def code_distance(a: Tensor, b: Tensor) -> Tensor:
    """Steps between two FP8 tensors of one dtype and shape, int32: 1 means neighbours, +0 equals -0.

    Sign and magnitude bits order the values. NaN against NaN is 0, NaN against a number is 1000.
    """
    ordered = []
    for codes in (a, b):
        bits = codes.contiguous().view(torch.uint8).to(torch.int32)
        ordered.append(torch.where(bits >= 128, 128 - bits, bits))
    nan_a, nan_b = a.float().isnan(), b.float().isnan()
    distance = (ordered[0] - ordered[1]).abs()
    distance = torch.where(nan_a & nan_b, 0, distance)
    return torch.where(nan_a ^ nan_b, 1000, distance).to(torch.int32)
