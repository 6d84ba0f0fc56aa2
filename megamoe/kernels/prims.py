"""Device primitives on plain 64-bit addresses: the only place with PTX.

Peer memory is `local address + delta`, so kernels carry addresses as Int64 rather than typed tensors.
Every memory access here is a volatile asm with a memory clobber: the compiler keeps their order among
themselves. `ld_weak_*` are the exception: read-only data that may be hoisted and cached.
PTX ISA 9.x sections: ld, st, atom, fence, cp.async.bulk, mbarrier, nanosleep.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import arith, llvm
from cutlass.cutlass_dsl import T, dsl_user_op

_CONSTRAINT = {"i32": "r", "i64": "l", "f32": "f"}
_WRAP = {"i32": Int32, "i64": Int64, "f32": Float32}
_MLIR = {"i32": lambda: T.i32(), "i64": lambda: T.i64(), "f32": lambda: T.f32()}


def _asm(text, outs, args, *, pure=False, tied=0, loc=None, ip=None):
    """Inline asm; `outs` are type names, `args` DSL scalars, the first `tied` of them in the registers of as many outs.
    Returns DSL scalars, in order."""
    values = [a.ir_value(loc=loc, ip=ip) for a in args]
    types = [_MLIR[o]() for o in outs]
    constraints = ["=" + _CONSTRAINT[o] for o in outs] + [str(i) for i in range(tied)]
    constraints += [_CONSTRAINT[str(v.type)] for v in values[tied:]]
    if not pure:
        constraints.append("~{memory}")
    if len(types) == 1:
        result = types[0]
    elif types:
        result = llvm.StructType.get_literal(types)
    else:
        result = None
    got = llvm.inline_asm(
        result,
        values,
        text,
        ",".join(constraints),
        has_side_effects=not pure,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if not types:
        return None
    if len(types) == 1:
        return _WRAP[outs[0]](got)
    parts = [llvm.extractvalue(t, got, [i], loc=loc, ip=ip) for i, t in enumerate(types)]
    return tuple(_WRAP[o](p) for o, p in zip(outs, parts))


# ---- plain global memory -------------------------------------------------------------------------


@dsl_user_op
def ld_i32(addr: Int64, *, loc=None, ip=None) -> Int32:
    """Load an int32."""
    return _asm("ld.global.b32 $0, [$1];", ["i32"], [Int64(addr)], loc=loc, ip=ip)


@dsl_user_op
def ld_i64(addr: Int64, *, loc=None, ip=None) -> Int64:
    """Load an int64."""
    return _asm("ld.global.b64 $0, [$1];", ["i64"], [Int64(addr)], loc=loc, ip=ip)


@dsl_user_op
def ld_u16(addr: Int64, *, loc=None, ip=None) -> Int32:
    """Load 16 bits, zero extended."""
    text = "{ .reg .b16 h; ld.global.b16 h, [$1]; cvt.u32.u16 $0, h; }"
    return _asm(text, ["i32"], [Int64(addr)], loc=loc, ip=ip)


@dsl_user_op
def ld_f32(addr: Int64, *, loc=None, ip=None) -> Float32:
    """Load an fp32."""
    return _asm("ld.global.f32 $0, [$1];", ["f32"], [Int64(addr)], loc=loc, ip=ip)


@dsl_user_op
def ld_weak_f32(addr: Int64, *, loc=None, ip=None) -> Float32:
    """Load a read-only fp32; may be hoisted or merged."""
    return _asm("ld.global.nc.f32 $0, [$1];", ["f32"], [Int64(addr)], pure=True, loc=loc, ip=ip)


@dsl_user_op
def ld_stream_v4(addr: Int64, *, loc=None, ip=None) -> tuple[Int32, Int32, Int32, Int32]:
    """Load 16 bytes that are read once, as four int32."""
    text = "ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];"
    return _asm(text, ["i32"] * 4, [Int64(addr)], loc=loc, ip=ip)


@dsl_user_op
def st_i32(addr: Int64, value: Int32, *, loc=None, ip=None) -> None:
    """Store an int32."""
    _asm("st.global.b32 [$0], $1;", [], [Int64(addr), Int32(value)], loc=loc, ip=ip)


@dsl_user_op
def st_i64(addr: Int64, value: Int64, *, loc=None, ip=None) -> None:
    """Store an int64."""
    _asm("st.global.b64 [$0], $1;", [], [Int64(addr), Int64(value)], loc=loc, ip=ip)


@dsl_user_op
def st_f32(addr: Int64, value: Float32, *, loc=None, ip=None) -> None:
    """Store an fp32."""
    _asm("st.global.f32 [$0], $1;", [], [Int64(addr), Float32(value)], loc=loc, ip=ip)


@dsl_user_op
def st_v4(addr: Int64, a: Int32, b: Int32, c: Int32, d: Int32, *, loc=None, ip=None) -> None:
    """Store 16 bytes; the address is a multiple of 16."""
    args = [Int64(addr), Int32(a), Int32(b), Int32(c), Int32(d)]
    _asm("st.global.v4.b32 [$0], {$1, $2, $3, $4};", [], args, loc=loc, ip=ip)


# ---- synchronising accesses -----------------------------------------------------------------------


@dsl_user_op
def ld_acquire_sys(addr: Int64, *, loc=None, ip=None) -> Int64:
    """Acquire an int64 at system scope."""
    return _asm("ld.acquire.sys.global.b64 $0, [$1];", ["i64"], [Int64(addr)], loc=loc, ip=ip)


@dsl_user_op
def ld_relaxed_sys(addr: Int64, *, loc=None, ip=None) -> Int64:
    """Read an int64 that peers may write; never a stale cached copy."""
    return _asm("ld.relaxed.sys.global.b64 $0, [$1];", ["i64"], [Int64(addr)], loc=loc, ip=ip)


@dsl_user_op
def st_release_sys(addr: Int64, value: Int64, *, loc=None, ip=None) -> None:
    """Release an int64 at system scope."""
    _asm("st.release.sys.global.b64 [$0], $1;", [], [Int64(addr), Int64(value)], loc=loc, ip=ip)


@dsl_user_op
def st_relaxed_sys(addr: Int64, value: Int64, *, loc=None, ip=None) -> None:
    """Store an int64 that another device or the host reads after a release."""
    _asm("st.relaxed.sys.global.b64 [$0], $1;", [], [Int64(addr), Int64(value)], loc=loc, ip=ip)


@dsl_user_op
def atom_add_i32(addr: Int64, value: Int32, *, loc=None, ip=None) -> Int32:
    """Relaxed GPU-scope add; returns the old value."""
    args = [Int64(addr), Int32(value)]
    return _asm("atom.relaxed.gpu.global.add.s32 $0, [$1], $2;", ["i32"], args, loc=loc, ip=ip)


@dsl_user_op
def atom_add_acq_rel_i64(addr: Int64, value: Int64, *, loc=None, ip=None) -> Int64:
    """Acquire-release GPU-scope add; returns the old value."""
    args = [Int64(addr), Int64(value)]
    return _asm("atom.acq_rel.gpu.global.add.u64 $0, [$1], $2;", ["i64"], args, loc=loc, ip=ip)


@dsl_user_op
def cas_sys_i64(addr: Int64, expected: Int64, value: Int64, *, loc=None, ip=None) -> Int64:
    """Acquire-release compare and swap at system scope; returns the old value."""
    args = [Int64(addr), Int64(expected), Int64(value)]
    return _asm("atom.acq_rel.sys.global.cas.b64 $0, [$1], $2, $3;", ["i64"], args, loc=loc, ip=ip)


@dsl_user_op
def fence_sys(*, loc=None, ip=None) -> None:
    """fence.acq_rel.sys: orders this thread's earlier and later accesses for every observer."""
    _asm("fence.acq_rel.sys;", [], [], loc=loc, ip=ip)


@dsl_user_op
def fence_gpu(*, loc=None, ip=None) -> None:
    """fence.acq_rel.gpu."""
    _asm("fence.acq_rel.gpu;", [], [], loc=loc, ip=ip)


@dsl_user_op
def fence_proxy_async(*, loc=None, ip=None) -> None:
    """Order generic-proxy and async-proxy (bulk copy, TMA) accesses of this thread, all spaces."""
    _asm("fence.proxy.async;", [], [], loc=loc, ip=ip)


@dsl_user_op
def nanosleep(ns: Int32, *, loc=None, ip=None) -> None:
    """Suspend the thread for about `ns` nanoseconds (at most 1 ms)."""
    _asm("nanosleep.u32 $0;", [], [Int32(ns)], loc=loc, ip=ip)


@dsl_user_op
def globaltimer(*, loc=None, ip=None) -> Int64:
    """Nanoseconds of a clock that all SMs of a GPU share."""
    return _asm("mov.u64 $0, %globaltimer;", ["i64"], [], loc=loc, ip=ip)


@dsl_user_op
def clock(*, loc=None, ip=None) -> Int32:
    """Cycles of this SM's clock, the low 32 bits."""
    return _asm("mov.u32 $0, %clock;", ["i32"], [], loc=loc, ip=ip)


@dsl_user_op
def smid(*, loc=None, ip=None) -> Int32:
    """Number of the SM that the thread runs on."""
    return _asm("mov.u32 $0, %smid;", ["i32"], [], pure=True, loc=loc, ip=ip)


# ---- 1-D bulk copies and their barriers -----------------------------------------------------------
# One thread issues them (CuTeDSL's own CopyBulk atoms changed twice who elects, so none are used).


@dsl_user_op
def smem_addr(ptr: cute.Pointer, *, loc=None, ip=None) -> Int32:
    """Shared-window address of a shared memory pointer."""
    return Int32(ptr.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip))


@dsl_user_op
def bulk_load(dst: Int32, src: Int64, nbytes: Int32, mbar: Int32, *, loc=None, ip=None) -> None:
    """Copy global to shared memory; completes `nbytes` on `mbar`. Addresses and size: multiples of 16 B."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    _asm(text, [], [Int32(dst), Int64(src), Int32(nbytes), Int32(mbar)], loc=loc, ip=ip)


@dsl_user_op
def bulk_store(dst: Int64, src: Int32, nbytes: Int32, *, loc=None, ip=None) -> None:
    """Copy shared to global memory, in the thread's open bulk group."""
    text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    _asm(text, [], [Int64(dst), Int32(src), Int32(nbytes)], loc=loc, ip=ip)


@dsl_user_op
def bulk_commit(*, loc=None, ip=None) -> None:
    """Close the thread's bulk group."""
    _asm("cp.async.bulk.commit_group;", [], [], loc=loc, ip=ip)


@dsl_user_op
def bulk_wait_read(pending: int, *, loc=None, ip=None) -> None:
    """Wait until at most `pending` groups still read shared memory (the buffer may be reused)."""
    _asm(f"cp.async.bulk.wait_group.read {int(pending)};", [], [], loc=loc, ip=ip)


@dsl_user_op
def bulk_wait(pending: int, *, loc=None, ip=None) -> None:
    """Wait until at most `pending` groups are incomplete (their writes are done)."""
    _asm(f"cp.async.bulk.wait_group {int(pending)};", [], [], loc=loc, ip=ip)


@dsl_user_op
def mbar_init(mbar: Int32, arrivals: Int32, *, loc=None, ip=None) -> None:
    """Initialise an mbarrier (8 B of shared memory)."""
    _asm("mbarrier.init.shared::cta.b64 [$0], $1;", [], [Int32(mbar), Int32(arrivals)], loc=loc, ip=ip)


@dsl_user_op
def mbar_expect(mbar: Int32, nbytes: Int32, *, loc=None, ip=None) -> None:
    """Arrive once and expect `nbytes` of bulk copies."""
    text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    _asm(text, [], [Int32(mbar), Int32(nbytes)], loc=loc, ip=ip)


@dsl_user_op
def mbar_wait(mbar: Int32, parity: Int32, *, loc=None, ip=None) -> None:
    """Wait for the phase of `parity`. CTA-local only: the arrivals come whatever peers do."""
    text = (
        "{ .reg .pred p; L_wait_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1, 10000000; "
        "@!p bra L_wait_${:uid}; }"
    )
    _asm(text, [], [Int32(mbar), Int32(parity)], loc=loc, ip=ip)


# ---- number conversion ----------------------------------------------------------------------------


@dsl_user_op
def bf16_pair_to_f32(packed: Int32, *, loc=None, ip=None) -> tuple[Float32, Float32]:
    """The two bf16 of a word (low half first) as fp32."""
    text = "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }"
    low, high = _asm(text, ["i32", "i32"], [Int32(packed)], pure=True, loc=loc, ip=ip)
    return bits_to_f32(low, loc=loc, ip=ip), bits_to_f32(high, loc=loc, ip=ip)


@dsl_user_op
def bits_to_f32(bits: Int32, *, loc=None, ip=None) -> Float32:
    """Reinterpret."""
    return Float32(arith.bitcast(T.f32(), Int32(bits).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def f32_to_bits(value: Float32, *, loc=None, ip=None) -> Int32:
    """Reinterpret."""
    return Int32(arith.bitcast(T.i32(), Float32(value).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def f32_pair_to_bf16(low: Float32, high: Float32, *, loc=None, ip=None) -> Int32:
    """Round two fp32 to nearest even bf16, packed, `low` in the low half."""
    text = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return _asm(text, ["i32"], [Float32(low), Float32(high)], pure=True, loc=loc, ip=ip)


@dsl_user_op
def f32_quad_to_fp8(a: Float32, b: Float32, c: Float32, d: Float32, fmt: str, *, loc=None, ip=None) -> Int32:
    """Round four fp32 to nearest even FP8, saturating, NaN kept; `a` in the lowest byte. fmt: e4m3, e5m2."""
    text = (
        "{ .reg .b16 lo, hi; "
        f"cvt.rn.satfinite.{fmt}x2.f32 lo, $2, $1; cvt.rn.satfinite.{fmt}x2.f32 hi, $4, $3; "
        "mov.b32 $0, {lo, hi}; }"
    )
    args = [Float32(a), Float32(b), Float32(c), Float32(d)]
    return _asm(text, ["i32"], args, pure=True, loc=loc, ip=ip)


@dsl_user_op
def div_rn(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """IEEE division (round to nearest even), as numerics.py defines quantisation."""
    return _asm("div.rn.f32 $0, $1, $2;", ["f32"], [Float32(a), Float32(b)], pure=True, loc=loc, ip=ip)


@dsl_user_op
def fmax(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """max; a NaN loses against a number."""
    return _asm("max.f32 $0, $1, $2;", ["f32"], [Float32(a), Float32(b)], pure=True, loc=loc, ip=ip)


@dsl_user_op
def fabs(a: Float32, *, loc=None, ip=None) -> Float32:
    """Magnitude."""
    return _asm("abs.f32 $0, $1;", ["f32"], [Float32(a)], pure=True, loc=loc, ip=ip)


@dsl_user_op
def keep(value: Int32, *, loc=None, ip=None) -> Int32:
    """The value, in a register from here on; ptxas may otherwise compute it again, from %tid, wherever it is used."""
    return _asm("mov.b32 $0, $1;", ["i32"], [Int32(value)], loc=loc, ip=ip)


# ---- shared memory by 32-bit address --------------------------------------------------------------


@dsl_user_op
def smem_ld(addr: Int32, *, loc=None, ip=None) -> Int32:
    """Load an int32 from shared memory."""
    return _asm("ld.shared.b32 $0, [$1];", ["i32"], [Int32(addr)], loc=loc, ip=ip)


@dsl_user_op
def smem_ld_f32(addr: Int32, *, loc=None, ip=None) -> Float32:
    """Load an fp32 from shared memory."""
    return _asm("ld.shared.f32 $0, [$1];", ["f32"], [Int32(addr)], loc=loc, ip=ip)


@dsl_user_op
def smem_st(addr: Int32, value: Int32, *, loc=None, ip=None) -> None:
    """Store an int32 to shared memory."""
    _asm("st.shared.b32 [$0], $1;", [], [Int32(addr), Int32(value)], loc=loc, ip=ip)


@dsl_user_op
def smem_ld_v4(addr: Int32, *, loc=None, ip=None) -> tuple[Int32, Int32, Int32, Int32]:
    """Load 16 bytes from shared memory, as four int32."""
    return _asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", ["i32"] * 4, [Int32(addr)], loc=loc, ip=ip)


@dsl_user_op
def smem_ld_v2_f32(addr: Int32, *, loc=None, ip=None) -> tuple[Float32, Float32]:
    """Load 8 bytes from shared memory, as two fp32."""
    return _asm("ld.shared.v2.f32 {$0, $1}, [$2];", ["f32"] * 2, [Int32(addr)], loc=loc, ip=ip)


@dsl_user_op
def smem_st_f32(addr: Int32, value: Float32, *, loc=None, ip=None) -> None:
    """Store an fp32 to shared memory."""
    _asm("st.shared.f32 [$0], $1;", [], [Int32(addr), Float32(value)], loc=loc, ip=ip)


@dsl_user_op
def smem_st_v4(addr: Int32, a: Int32, b: Int32, c: Int32, d: Int32, *, loc=None, ip=None) -> None:
    """Store 16 bytes to shared memory."""
    args = [Int32(addr), Int32(a), Int32(b), Int32(c), Int32(d)]
    _asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", [], args, loc=loc, ip=ip)


@dsl_user_op
def peer_smem(addr: Int32, cta: int, *, loc=None, ip=None) -> Int32:
    """Address, for this cluster, of what lies at a CTA's own shared address `addr` in CTA `cta` (PTX ISA, "mapa")."""
    return _asm(f"mapa.shared::cluster.u32 $0, $1, {cta};", ["i32"], [Int32(addr)], pure=True, loc=loc, ip=ip)


@dsl_user_op
def send_i32(addr: Int32, value: Int32, mbar: Int32, *, loc=None, ip=None) -> None:
    """Store an int32 to a peer_smem address and complete its 4 bytes on a barrier there (PTX ISA, "st.async")."""
    text = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [$0], $1, [$2];"
    _asm(text, [], [Int32(addr), Int32(value), Int32(mbar)], loc=loc, ip=ip)


@dsl_user_op
def smem_ld_i64(addr: Int32, *, loc=None, ip=None) -> Int64:
    """Load an int64 from shared memory."""
    return _asm("ld.shared.b64 $0, [$1];", ["i64"], [Int32(addr)], loc=loc, ip=ip)


@dsl_user_op
def smem_st_i64(addr: Int32, value: Int64, *, loc=None, ip=None) -> None:
    """Store an int64 to shared memory."""
    _asm("st.shared.b64 [$0], $1;", [], [Int32(addr), Int64(value)], loc=loc, ip=ip)


@dsl_user_op
def smem_add(addr: Int32, value: Int32, *, loc=None, ip=None) -> Int32:
    """Atomic add in shared memory; returns the old value."""
    return _asm("atom.shared.add.s32 $0, [$1], $2;", ["i32"], [Int32(addr), Int32(value)], loc=loc, ip=ip)


# ---- tensor cores ---------------------------------------------------------------------------------


def sw128_descriptor(addr: Int32) -> Int32:
    """Lower half of the descriptor of a K-major SW128 operand at a shared address that is a multiple of 1024, or of the
    slice of it that begins up to 96 bytes later (PTX ISA, "wgmma matrix descriptor"). 16 bytes on are 1 more.

    The mask drops the CTA's rank in its cluster, which shared addresses carry above. Bit 16 is a leading offset, which
    SW128 does not use.
    """
    return (addr & 0x3FFFF) >> 4 | 1 << 16


@dsl_user_op
def wgmma(into: cute.Tensor, a: Int32, b: Int32, fp8: str, keep: bool, *, loc=None, ip=None) -> None:
    """A warpgroup: start [64, 32] x [n, 32]^T of FP8 operands (sw128_descriptor, `fp8` "e4m3" or "e5m2") into fp32
    registers [n / 2]; keep: add to what they hold. PTX ISA, "wgmma.mma_async"."""
    count = cute.size(into)
    names = ", ".join(f"${i}" for i in range(count))
    operand = f"wgmma.mma_async.sync.aligned.m64n{2 * count}k32.f32.{fp8}.{fp8}"
    # Upper half: 1024 bytes, in units of 16, from 8 rows to the next 8; and SW128.
    pack = " ".join(f"mov.b64 {d}, {{${2 * count + i}, 0x40000040}};" for i, d in enumerate("ab"))
    text = f"{{ .reg .b64 a, b; .reg .pred p; {pack} setp.ne.b32 p, {int(keep)}, 0; "
    text += f"{operand} {{{names}}}, a, b, p, 1, 1; }}"
    held = [into[i] for i in range(count)]  # also to be overwritten: so ptxas keeps the registers
    values = _asm(text, ["f32"] * count, [*held, Int32(a), Int32(b)], tied=count, loc=loc, ip=ip)
    for i in range(count):
        into[i] = values[i]


# ---- the whole CTA --------------------------------------------------------------------------------


@dsl_user_op
def cta_any(flag: Int32, *, loc=None, ip=None) -> Int32:
    """Barrier of all threads of the CTA; returns 1 in each of them when any passed a non-zero flag."""
    text = "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; barrier.cta.red.or.pred.aligned q, 0, p; selp.s32 $0, 1, 0, q; }"
    return _asm(text, ["i32"], [Int32(flag)], loc=loc, ip=ip)


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """a * b + c with one rounding."""
    args = [Float32(a), Float32(b), Float32(c)]
    return _asm("fma.rn.f32 $0, $1, $2, $3;", ["f32"], args, pure=True, loc=loc, ip=ip)


@dsl_user_op
def bf16_pair_max(a: Int32, b: Int32, *, loc=None, ip=None) -> Int32:
    """Larger of each of two packed bf16; a NaN loses against a number."""
    return _asm("max.bf16x2 $0, $1, $2;", ["i32"], [Int32(a), Int32(b)], pure=True, loc=loc, ip=ip)
