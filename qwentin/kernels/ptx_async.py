"""Copies that run beside the threads: cp.async (sm_80), bulk copies and the mbarriers that count them (sm_90).

Shared addresses are u32. A cp.async group is private to its thread: commit, wait, then meet at a barrier. A bulk copy
is issued by one thread for all and reports its bytes to an mbarrier, which everyone waits for by phase parity:

    phase 0: arrive_expect(bar, bytes) ... copies land ... completes -> test_wait(bar, 0) gives 1; phase 1 follows
"""
from .ptx_factory import MEMORY, imm, instruction, u32, u64

# ---- cp.async: 16 bytes global -> shared past L1; `_zfill` writes zeros beyond `bytes` (0 reads nothing)
copy_16 = instruction("cp.async.cg.shared.global.L2::128B [<to>], [<source>], 16;",
                      inputs=dict(to=u32, source=u64), effect=MEMORY)
copy_16_zfill = instruction("cp.async.cg.shared.global.L2::128B [<to>], [<source>], 16, <bytes>;",
                            inputs=dict(to=u32, source=u64, bytes=u32), effect=MEMORY)
copy_8 = instruction("cp.async.ca.shared.global [<to>], [<source>], 8;", inputs=dict(to=u32, source=u64), effect=MEMORY)
copy_4 = instruction("cp.async.ca.shared.global [<to>], [<source>], 4;", inputs=dict(to=u32, source=u64), effect=MEMORY)
copy_commit = instruction("cp.async.commit_group;", effect=MEMORY)
copy_wait = instruction("cp.async.wait_group <pending>;", inputs=dict(pending=imm), effect=MEMORY)
copy_wait_all = instruction("cp.async.wait_all;", effect=MEMORY)

# ---- mbarrier: 8 bytes of shared memory, initialised by one thread with the number of arrivals that end a phase
mbarrier_init = instruction("mbarrier.init.shared::cta.b64 [<bar>], <count>;", inputs=dict(bar=u32, count=u32),
                            effect=MEMORY)
mbarrier_invalidate = instruction("mbarrier.inval.shared::cta.b64 [<bar>];", inputs=dict(bar=u32), effect=MEMORY)
mbarrier_arrive = instruction("mbarrier.arrive.shared::cta.b64 _, [<bar>];", inputs=dict(bar=u32), effect=MEMORY)
mbarrier_arrive_expect = instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [<bar>], <bytes>;",
                                     inputs=dict(bar=u32, bytes=u32), effect=MEMORY)
mbarrier_expect = instruction("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [<bar>], <bytes>;",
                              inputs=dict(bar=u32, bytes=u32), effect=MEMORY)
mbarrier_test = instruction(
    "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [<bar>], <parity>; selp.u32 <d>, 1, 0, p; }",
    dict(d=u32), dict(bar=u32, parity=u32), effect=MEMORY)
mbarrier_try = instruction(          # may suspend the thread for a while: the right one to spin on
    "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [<bar>], <parity>; selp.u32 <d>, 1, 0, p; }",
    dict(d=u32), dict(bar=u32, parity=u32), effect=MEMORY)
copy_arrive = instruction("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [<bar>];", inputs=dict(bar=u32),
                          effect=MEMORY)

# ---- bulk copies: 16-byte aligned, `bytes` a multiple of 16
bulk_load = instruction(
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [<to>], [<source>], <bytes>, [<bar>];",
    inputs=dict(to=u32, source=u64, bytes=u32, bar=u32), effect=MEMORY)
bulk_load_hint = instruction(
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[<to>], [<source>], <bytes>, [<bar>], <policy>;",
    inputs=dict(to=u32, source=u64, bytes=u32, bar=u32, policy=u64), effect=MEMORY)
evict_first = instruction("createpolicy.fractional.L2::evict_first.b64 <d>, 1.0;", dict(d=u64), effect=MEMORY)
bulk_store = instruction("cp.async.bulk.global.shared::cta.bulk_group [<to>], [<source>], <bytes>;",
                         inputs=dict(to=u64, source=u32, bytes=u32), effect=MEMORY)
bulk_commit = instruction("cp.async.bulk.commit_group;", effect=MEMORY)
bulk_wait = instruction("cp.async.bulk.wait_group <pending>;", inputs=dict(pending=imm), effect=MEMORY)
bulk_wait_read = instruction("cp.async.bulk.wait_group.read <pending>;", inputs=dict(pending=imm), effect=MEMORY)

# ---- ordering between ordinary shared accesses and the asynchronous engines (wgmma and bulk copies read through them)
fence_async = instruction("fence.proxy.async.shared::cta;", effect=MEMORY)
fence_mbarrier_init = instruction("fence.mbarrier_init.release.cluster;", effect=MEMORY)
