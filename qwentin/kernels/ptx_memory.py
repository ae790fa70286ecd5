"""Loads, stores, prefetch and atomics. Global addresses are u64, shared ones u32; 16 bytes a load wherever it can be.

`load_*` reads memory that nobody writes while the kernel runs (the non-coherent path); `read_*` is the ordinary load
for memory this kernel, or a kernel it overlaps with, writes. Suffixes: u16, u32, f32, x2 and x4 for vectors of 32-bit
words (8 and 16 bytes, aligned as wide), `_stream` for data used once (kept out of L1, evicted first from L2).
"""
from llvmlite import ir
from numba.cuda.extending import intrinsic

from .ptx_factory import MEMORY, ORDERED, PURE, f32, f32x2, f32x4, instruction, u16, u32, u32x2, u32x4, u64

SHARED = 3                            # NVVM's number of the shared address space


def load(op, kind, address=u64, effect=ORDERED):
    """One load: `op` is everything before the operands."""
    return instruction(f"{op} <d>, [<p>];", dict(d=kind), dict(p=address), effect=effect)


def store(op, kind, address=u64):
    """One store: the address first, then the value."""
    return instruction(f"{op} [<p>], <x>;", inputs=dict(p=address, x=kind), effect=MEMORY)


load_u16, load_u32, load_f32 = (load(f"ld.global.nc.{s}", k) for s, k in (("u16", u16), ("u32", u32), ("f32", f32)))
load_x2, load_x4 = load("ld.global.nc.v2.u32", u32x2), load("ld.global.nc.v4.u32", u32x4)
load_f32x4 = load("ld.global.nc.v4.f32", f32x4)
load_u8 = load("ld.global.nc.u8", u16)

# Weights: read once by one block. L1 would only be polluted; L2 fetches whole 128-byte lines, or 256 for long runs.
load_x4_stream = load("ld.global.nc.L1::no_allocate.L2::128B.v4.u32", u32x4)
load_x4_stream256 = load("ld.global.nc.L1::no_allocate.L2::256B.v4.u32", u32x4)
load_x2_stream = load("ld.global.nc.L1::no_allocate.L2::128B.v2.u32", u32x2)
load_u32_stream = load("ld.global.nc.L1::no_allocate.L2::128B.u32", u32)

read_u16, read_u32, read_f32 = (load(f"ld.global.{s}", k, effect=MEMORY)
                                for s, k in (("u16", u16), ("u32", u32), ("f32", f32)))
read_u64 = load("ld.global.u64", u64, effect=MEMORY)
read_x2, read_x4 = load("ld.global.v2.u32", u32x2, effect=MEMORY), load("ld.global.v4.u32", u32x4, effect=MEMORY)
read_f32x2, read_f32x4 = load("ld.global.v2.f32", f32x2, effect=MEMORY), load("ld.global.v4.f32", f32x4, effect=MEMORY)
# A relaxed access of device scope goes to L2, where other blocks' relaxed stores are seen: to poll data by its value.
read_x4_relaxed = load("ld.relaxed.gpu.global.v4.u32", u32x4, effect=MEMORY)
store_x4_relaxed = store("st.relaxed.gpu.global.v4.u32", u32x4)
read_u32_acquire = load("ld.acquire.gpu.global.u32", u32, effect=MEMORY)      # a flag another block releases

store_u16, store_u32, store_f32 = (store(f"st.global.{s}", k) for s, k in (("u16", u16), ("u32", u32), ("f32", f32)))
store_u8, store_u64 = store("st.global.u8", u16), store("st.global.u64", u64)
store_x2, store_x4 = store("st.global.v2.u32", u32x2), store("st.global.v4.u32", u32x4)
store_f32x2, store_f32x4 = store("st.global.v2.f32", f32x2), store("st.global.v4.f32", f32x4)
store_u32_release = store("st.release.gpu.global.u32", u32)

shared_u16, shared_u32, shared_f32 = (load(f"ld.shared.{s}", k, u32, MEMORY)
                                      for s, k in (("u16", u16), ("u32", u32), ("f32", f32)))
shared_x2, shared_x4 = load("ld.shared.v2.u32", u32x2, u32, MEMORY), load("ld.shared.v4.u32", u32x4, u32, MEMORY)
shared_f32x2, shared_f32x4 = load("ld.shared.v2.f32", f32x2, u32, MEMORY), load("ld.shared.v4.f32", f32x4, u32, MEMORY)
store_shared_u16, store_shared_u32, store_shared_f32 = (store(f"st.shared.{s}", k, u32)
                                                        for s, k in (("u16", u16), ("u32", u32), ("f32", f32)))
store_shared_x2, store_shared_x4 = store("st.shared.v2.u32", u32x2, u32), store("st.shared.v4.u32", u32x4, u32)
store_shared_f32x2, store_shared_f32x4 = store("st.shared.v2.f32", f32x2, u32), store("st.shared.v4.f32", f32x4, u32)

prefetch_l2 = instruction("prefetch.global.L2 [<p>];", inputs=dict(p=u64), effect=ORDERED)
prefetch_l2_bulk = instruction("cp.async.bulk.prefetch.L2.global [<p>], <bytes>;",       # sm_90 and up
                               inputs=dict(p=u64, bytes=u32), effect=ORDERED)

atomic_add_u32 = instruction("atom.global.add.u32 <d>, [<p>], <x>;", dict(d=u32), dict(p=u64, x=u32), effect=MEMORY)
atomic_add_u32_acq_rel = instruction("atom.acq_rel.gpu.global.add.u32 <d>, [<p>], <x>;", dict(d=u32),
                                     dict(p=u64, x=u32), effect=MEMORY)
atomic_max_u64 = instruction("atom.global.max.u64 <d>, [<p>], <x>;", dict(d=u64), dict(p=u64, x=u64), effect=MEMORY)
add_f32 = instruction("red.global.add.f32 [<p>], <x>;", inputs=dict(p=u64, x=f32), effect=MEMORY)

to_shared = instruction("{ .reg .u64 t; cvta.to.shared.u64 t, <generic>; cvt.u32.u64 <d>, t; }",
                        dict(d=u32), dict(generic=u64), effect=PURE)


@intrinsic
def shared_address(typingctx, array):
    """The u32 shared-space address of a `cuda.shared.array`; of `cuda.shared.array(0, ...)`: of the dynamic memory."""
    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        in_shared = builder.addrspacecast(data, ir.PointerType(ir.IntType(8), SHARED))
        return builder.ptrtoint(in_shared, ir.IntType(32))
    return u32(array), codegen
