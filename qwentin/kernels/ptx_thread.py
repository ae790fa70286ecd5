"""Who am I, and how do threads meet: indices, barriers, shuffles, votes, dependent launches."""
from .ptx_factory import MEMORY, ORDERED, PURE, f32, imm, instruction, u32


def special(name):
    """A read-only special register."""
    return instruction(f"mov.u32 <d>, %{name};", dict(d=u32), effect=PURE)


thread_x, block_x, block_y, block_z = (special(n) for n in ("tid.x", "ctaid.x", "ctaid.y", "ctaid.z"))
threads_x, blocks_x, blocks_y = (special(n) for n in ("ntid.x", "nctaid.x", "nctaid.y"))
lane = special("laneid")

# ---- barriers of a block. `barrier()` is __syncthreads; a named one gathers `threads` threads (a multiple of 32).
barrier = instruction("bar.sync 0;", effect=MEMORY)
barrier_named = instruction("bar.sync <name>, <threads>;", inputs=dict(name=imm, threads=imm), effect=MEMORY)
arrive_named = instruction("bar.arrive <name>, <threads>;", inputs=dict(name=imm, threads=imm), effect=MEMORY)
warp_barrier = instruction("bar.warp.sync 0xffffffff;", effect=MEMORY)
fence_block = instruction("fence.acq_rel.cta;", effect=MEMORY)
fence_device = instruction("fence.acq_rel.gpu;", effect=MEMORY)


def shuffle(mode, clamp, kind, register):
    """A full-warp shuffle; `by` is a lane (idx), a lane mask (bfly) or a distance (up, down)."""
    return instruction(f"shfl.sync.{mode}.{register} <d>, <x>, <by>, {clamp}, 0xffffffff;",
                       dict(d=kind), dict(x=kind, by=u32), effect=ORDERED)


shuffle_idx, shuffle_idx_f32 = shuffle("idx", 31, u32, "b32"), shuffle("idx", 31, f32, "b32")
shuffle_xor, shuffle_xor_f32 = shuffle("bfly", 31, u32, "b32"), shuffle("bfly", 31, f32, "b32")
shuffle_down, shuffle_down_f32 = shuffle("down", 31, u32, "b32"), shuffle("down", 31, f32, "b32")
shuffle_up, shuffle_up_f32 = shuffle("up", 0, u32, "b32"), shuffle("up", 0, f32, "b32")

# ---- votes and warp reductions; `flag` is nonzero for true
ballot = instruction("{ .reg .pred p; setp.ne.u32 p, <flag>, 0; vote.sync.ballot.b32 <d>, p, 0xffffffff; }",
                     dict(d=u32), dict(flag=u32), effect=ORDERED)
reduce_max = instruction("redux.sync.max.u32 <d>, <x>, 0xffffffff;", dict(d=u32), dict(x=u32), effect=ORDERED)
reduce_min = instruction("redux.sync.min.u32 <d>, <x>, 0xffffffff;", dict(d=u32), dict(x=u32), effect=ORDERED)
reduce_add = instruction("redux.sync.add.u32 <d>, <x>, 0xffffffff;", dict(d=u32), dict(x=u32), effect=ORDERED)

# ---- programmatic dependent launch (sm_90 and up): let the next kernel start early; wait for the previous one's writes
launch_dependents = instruction("griddepcontrol.launch_dependents;", effect=MEMORY)
wait_dependencies = instruction("griddepcontrol.wait;", effect=MEMORY)
