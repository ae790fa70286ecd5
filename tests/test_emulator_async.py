"""cp.async, bulk copies and mbarriers: what arrives when, and what may not be touched before."""
import numpy as np
import pytest

from ptx_text import kernel, run
from qwentin.kernels.emulator import Fault, Unsupported, load

X = np.arange(4096, dtype=np.uint32)
HEAD = """
    mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; mov.u32 %r2, stage; mov.u32 %r3, bar;
    mad.wide.u32 %rd3, %r1, 16, %rd1; mad.lo.u32 %r4, %r1, 16, %r2; mad.wide.u32 %rd4, %r1, 16, %rd2;
    setp.eq.u32 %p1, %r1, 0;
"""
STATIC = ".shared .align 128 .b8 stage[16384];\n.shared .align 8 .b8 bar[64];"
READ = "ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r4]; st.global.v4.u32 [%rd4], {%r10, %r11, %r12, %r13};"


def ran(body, n=128, block=32, x=X, **options):
    out = np.zeros(n, np.uint32)
    run(HEAD + body, x, out, static=STATIC, block=block, **options)
    return out


def wrong(message, body, **options):
    with pytest.raises(Fault, match=message) as caught:
        ran(body, **options)
    return caught.value


# ------------------------------------------------------------------------------------------------ cp.async
COPY = "cp.async.cg.shared.global.L2::128B [%r4], [%rd3], 16; cp.async.commit_group;"


def test_groups_land_in_order():
    two = COPY + "cp.async.ca.shared.global [%r4+1024], [%rd3+1024], 16; cp.async.commit_group;"
    np.testing.assert_array_equal(ran(two + "cp.async.wait_group 1;" + READ + "cp.async.wait_group 0;"), X[:128])
    moved = READ.replace("[%r4]", "[%r4+1024]")
    np.testing.assert_array_equal(ran(two + "cp.async.wait_group 0;" + moved), X[256:384])
    fault = wrong("touched while an asynchronous copy to it is in flight", two + "cp.async.wait_group 1;" + moved)
    assert fault.instruction.startswith("ld.shared.v4")
    wrong("in flight", two + "cp.async.wait_group 2;" + READ)
    wrong("in flight", COPY.replace("cp.async.commit_group;", "cp.async.wait_group 0;") + READ)     # never committed
    np.testing.assert_array_equal(ran(COPY.replace("cp.async.commit_group;", "cp.async.wait_all;") + READ), X[:128])


@pytest.mark.parametrize("schedule", [None, 1, 2, 3])
def test_a_wait_covers_only_ones_own_copies(schedule):
    """Every thread waits for its own; to read a neighbour's takes a barrier, too."""
    neighbour = "xor.b32 %r4, %r4, 16;"
    body = COPY + "cp.async.wait_group 0; BARRIER" + neighbour + READ
    got = ran(body.replace("BARRIER", "bar.sync 0;"), n=512, block=128, schedule=schedule)
    np.testing.assert_array_equal(got.reshape(-1, 2, 4)[:, ::-1].ravel(), X[:512])
    wrong("race: read here, written by thread|in flight", body.replace("BARRIER", ""), n=512, block=128,
          schedule=schedule)


def test_copies_fill_with_zeros():
    body = "and.b32 %r5, %r1, 3; mul.lo.u32 %r5, %r5, 4; cp.async.cg.shared.global [%r4], [%rd3], 16, %r5;" \
           "cp.async.wait_all;"
    want = X[:128].reshape(32, 4).copy()
    for t in range(32):
        want[t, t % 4:] = 0
    np.testing.assert_array_equal(ran(body + READ), want.ravel())


def test_nothing_is_read_where_nothing_is_copied():
    """With 0 bytes to copy the source may lie outside; with 4 it may not."""
    body = "mov.u32 %r5, {}; add.u64 %rd3, %rd3, 16384; cp.async.cg.shared.global [%r4], [%rd3], 16, %r5;" \
           "cp.async.wait_all;"
    assert not ran(body.format(0) + READ).any()
    wrong("out of bounds", body.format(4) + READ)


def test_copies_are_checked():
    wrong("misaligned cp.async source", "cp.async.ca.shared.global [%r4], [%rd3+4], 16;")
    wrong("misaligned cp.async destination", "cp.async.ca.shared.global [%r4+4], [%rd3], 8;")
    wrong("outside the block's", "cp.async.ca.shared.global [%r4+16384], [%rd3], 16;")
    wrong("out of bounds", "cp.async.ca.shared.global [%r4], [%rd3+16384], 16;")
    wrong("ends with a cp.async in flight", COPY)
    with pytest.raises(Unsupported, match="a copy of 8 bytes"):
        load(kernel(HEAD + "cp.async.cg.shared.global [%r4], [%rd3], 8;", ("u64", "u64"), STATIC))


def test_a_stage_refilled_too_early():
    """Refilling what another thread may still be reading: no barrier between the read and the next copy."""
    body = COPY + ("cp.async.wait_group 0; bar.sync 0; xor.b32 %r5, %r4, 16; ld.shared.u32 %r6, [%r5]; {}"
                   "cp.async.cg.shared.global [%r4], [%rd3+1024], 16; cp.async.wait_all;")
    ran(body.format("bar.sync 0;"))
    wrong("race: written here, read by another thread", body.format(""))


# ------------------------------------------------------------------------------------------------ mbarriers
INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r3], {}; bar.sync 0;"
WAIT = """
WAIT{0}: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r3+{1}], {2}; @!%p5 bra WAIT{0};
"""


def wait(label=0, bar=0, parity=0):
    return WAIT.format(label, bar, parity)


@pytest.mark.parametrize("schedule", [None, 1, 2, 3])
def test_arrivals_order_what_was_written_before(schedule):
    """Warp 1 writes and arrives, warp 0 waits and reads; without the arrival's order it would be a race."""
    body = INIT.format(32) + """
    setp.lt.u32 %p2, %r1, 32; xor.b32 %r5, %r4, 512; @%p2 bra READER;
    st.shared.v4.u32 [%r5], {%r1, %r1, %r1, %r1}; mbarrier.arrive.shared::cta.b64 %rd9, [%r3]; bra OUT;
READER:""" + wait() + READ + "\nOUT:"
    np.testing.assert_array_equal(ran(body, block=64, schedule=schedule), np.repeat(np.arange(32, 64), 4))


def test_one_lane_arriving_for_its_warp_needs_a_warp_barrier():
    body = INIT.format(1) + """
    setp.lt.u32 %p2, %r1, 32; xor.b32 %r5, %r4, 512; setp.eq.u32 %p3, %r1, 32; @%p2 bra READER;
    st.shared.v4.u32 [%r5], {%r1, %r1, %r1, %r1}; BARRIER
    @%p3 mbarrier.arrive.shared::cta.b64 _, [%r3]; bra OUT;
READER:""" + wait() + READ + "\nOUT:"
    whole = body.replace("BARRIER", "bar.warp.sync 0xffffffff;")
    np.testing.assert_array_equal(ran(whole, block=64), np.repeat(np.arange(32, 64), 4))
    wrong("race: read here, written by thread 33", body.replace("BARRIER", ""), block=64)


def test_phases_and_tokens():
    """Two rounds: the parity test passes for the last completed phase, and a token for its own phase."""
    body = INIT.format(32) + """
    mbarrier.test_wait.parity.shared::cta.b64 %p5, [%r3], 1; selp.u32 %r10, 1, 0, %p5;
    mbarrier.test_wait.parity.shared::cta.b64 %p5, [%r3], 0; selp.u32 %r11, 1, 0, %p5; bar.sync 0;
    mbarrier.arrive.shared::cta.b64 %rd9, [%r3];
    mbarrier.test_wait.shared::cta.b64 %p5, [%r3], %rd9; selp.u32 %r12, 1, 0, %p5; bar.sync 0;
    mbarrier.arrive.shared::cta.b64 %rd9, [%r3];
    mbarrier.test_wait.parity.shared::cta.b64 %p5, [%r3], 1; selp.u32 %r13, 1, 0, %p5;
    st.global.v4.u32 [%rd4], {%r10, %r11, %r12, %r13};"""
    assert ran(body).tolist() == [1, 0, 1, 1] * 32


def test_drop_and_counts():
    """Half of the arrivals drop out of the next phase; one thread can arrive many times."""
    body = INIT.format(64) + """
    mbarrier.arrive_drop.shared::cta.b64 _, [%r3]; mbarrier.arrive.shared::cta.b64 _, [%r3];""" + wait(0) + """
    bar.sync 0; @%p1 mbarrier.arrive.shared::cta.b64 _, [%r3], 32;""" + wait(1, 0, 1) + """
    st.global.u32 [%rd4], %r1;"""
    assert ran(body)[::4].tolist() == list(range(32))


def test_mbarriers_are_checked():
    arrive = "mbarrier.arrive.shared::cta.b64 _, [%r3];"
    wrong("was not initialised", arrive)
    wrong("before its initialisation is known", "@%p1 mbarrier.init.shared::cta.b64 [%r3], 32;" + arrive)
    wrong("9 arrivals at an mbarrier whose phase awaits 8",
          INIT.format(40) + arrive + "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r3], 9;")
    wrong("touched as if it were data", INIT.format(1) + "st.shared.u32 [%r3+4], %r1;")
    wrong("misaligned mbarrier", "@%p1 mbarrier.init.shared::cta.b64 [%r3+4], 32;")
    wrong("several threads initialise one mbarrier", "mbarrier.init.shared::cta.b64 [%r3], 32;")
    wrong("was not initialised", INIT.format(1) + "@%p1 mbarrier.inval.shared::cta.b64 [%r3]; bar.sync 0;" + arrive)


@pytest.mark.parametrize("schedule", [None, 4])
def test_a_phase_that_never_completes_is_a_deadlock(schedule):
    fault = wrong("deadlock: waits for an mbarrier phase",
                  INIT.format(33) + "mbarrier.arrive.shared::cta.b64 _, [%r3];" + wait(), schedule=schedule)
    assert "lacks 1 arrivals and 0 bytes" in str(fault) and "try_wait" in fault.instruction


def test_copies_that_report_to_an_mbarrier():
    body = INIT.format(32) + """
    cp.async.cg.shared.global [%r4], [%rd3], 16; cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r3];
    xor.b32 %r4, %r4, 16;"""
    got = ran(body + wait() + READ)
    np.testing.assert_array_equal(got.reshape(-1, 2, 4)[:, ::-1].ravel(), X[:128])
    counted = body.replace(".noinc", "").replace("xor", "mbarrier.arrive.shared::cta.b64 _, [%r3]; xor")
    np.testing.assert_array_equal(ran(counted + wait() + READ), got)
    wrong("has not seen complete", body + READ)


# ------------------------------------------------------------------------------------------------ bulk copies
LOAD = """
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {bytes};
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], {size}, [%r3];
"""


def bulk(expected=512, size=512):
    return INIT.format(1) + LOAD.format(bytes=expected, size=size)


@pytest.mark.parametrize("schedule", [None, 1, 2])
def test_bulk_load(schedule):
    np.testing.assert_array_equal(ran(bulk() + wait() + READ, schedule=schedule), X[:128])


def test_bulk_load_without_its_wait():
    wrong("an asynchronous copy whose mbarrier this thread has not seen complete", bulk() + READ)


def test_one_thread_waits_and_a_barrier_passes_it_on():
    body = bulk() + "@!%p1 bra MEET;" + wait() + "MEET: {}" + READ
    np.testing.assert_array_equal(ran(body.replace("{}", "bar.sync 0;")), X[:128])
    wrong("has not seen complete", body.replace("{}", ""))


def test_bytes_must_add_up():
    wrong("lacks 0 arrivals and 16 bytes", bulk(expected=528) + wait() + READ)
    wrong("lacks 0 arrivals and -256 bytes", bulk(expected=256) + wait() + READ)


def test_two_stages_of_a_ring():
    """A producer warp fills two stages in turn, consumers empty them: full and empty mbarriers, eight rounds."""
    body = """
    @%p1 mbarrier.init.shared::cta.b64 [%r3], 1;     @%p1 mbarrier.init.shared::cta.b64 [%r3+8], 1;
    @%p1 mbarrier.init.shared::cta.b64 [%r3+16], 32; @%p1 mbarrier.init.shared::cta.b64 [%r3+24], 32; bar.sync 0;
    mov.u32 %r20, 0; setp.ge.u32 %p2, %r1, 32; @%p2 bra CONSUME; @!%p1 bra OUT;
PRODUCE: and.b32 %r21, %r20, 1; shr.u32 %r22, %r20, 1; and.b32 %r22, %r22, 1; xor.b32 %r23, %r22, 1;
    mad.lo.u32 %r24, %r21, 8, %r3; mad.lo.u32 %r25, %r21, 512, %r2;
EMPTY: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r24+16], %r23; @!%p5 bra EMPTY;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r24], 512;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r25], [%rd1], 512, [%r24];
    add.u64 %rd1, %rd1, 512; add.u32 %r20, %r20, 1; setp.lt.u32 %p6, %r20, 8; @%p6 bra PRODUCE; bra OUT;
CONSUME: sub.u32 %r30, %r1, 32; mov.u32 %r31, 0;
AGAIN: and.b32 %r21, %r20, 1; shr.u32 %r22, %r20, 1; and.b32 %r22, %r22, 1; mad.lo.u32 %r24, %r21, 8, %r3;
    mad.lo.u32 %r25, %r21, 512, %r2; mad.lo.u32 %r25, %r30, 16, %r25;
FULL: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r24], %r22; @!%p5 bra FULL;
    ld.shared.u32 %r26, [%r25]; add.u32 %r31, %r31, %r26; {}
    add.u32 %r20, %r20, 1; setp.lt.u32 %p6, %r20, 8; @%p6 bra AGAIN;
    mad.wide.u32 %rd5, %r30, 4, %rd2; st.global.u32 [%rd5], %r31;
OUT:"""
    release = "mbarrier.arrive.shared::cta.b64 _, [%r24+16];"
    want = X[:1024].reshape(8, 32, 4)[:, :, 0].sum(0)
    for schedule in (None, 1, 2, 3, 4):
        np.testing.assert_array_equal(ran(body.replace("{}", release), n=32, block=64, schedule=schedule), want)
    early = body.replace("{}", release).replace("ld.shared.u32 %r26, [%r25]; add.u32 %r31, %r31, %r26;", "") \
        .replace(release, release + "ld.shared.u32 %r26, [%r25]; add.u32 %r31, %r31, %r26;")
    with pytest.raises(Fault, match="race: written here, read by another|in flight|not seen complete"):
        for schedule in (None, 1, 2, 3, 4):
            ran(early, n=32, block=64, schedule=schedule)
    fault = wrong("deadlock", body.replace("{}", ""), n=32, block=64)
    assert "lacks 32 arrivals" in str(fault)


def test_bulk_copies_are_checked():
    wrong("misaligned cp.async.bulk source", bulk().replace("[%rd1]", "[%rd1+8]") + wait())
    wrong("misaligned cp.async.bulk destination", bulk().replace("[%r2]", "[%r2+8]") + wait())
    wrong("wanted a multiple of 16", bulk(520, 520) + wait())
    wrong("out of bounds", bulk().replace("[%rd1]", "[%rd1+16128]") + wait())
    wrong("outside the block's", bulk().replace("[%r2]", "[%r2+16128]") + wait())
    wrong("ends with a cp.async.bulk in flight", bulk(expected=1024))


def test_a_bulk_load_over_what_threads_wrote_needs_a_proxy_fence():
    fill = "st.shared.v4.u32 [%r4], {%r1, %r1, %r1, %r1}; {}"
    wrong("no fence.proxy.async in between",
          fill.replace("{}", "") + bulk() + wait() + READ)
    got = ran(fill.replace("{}", "fence.proxy.async.shared::cta;") + bulk() + wait() + READ)
    np.testing.assert_array_equal(got, X[:128])


STORE = """
    st.shared.v4.u32 [%r4], {%r1, %r1, %r1, %r1}; fence.proxy.async.shared::cta; bar.sync 0; @!%p1 bra OUT;
    cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2], 512; cp.async.bulk.commit_group;
"""


def test_bulk_store():
    want = np.repeat(np.arange(32), 4)
    np.testing.assert_array_equal(ran(STORE + "cp.async.bulk.wait_group.read 0;\nOUT:"), want)
    wrong("no fence.proxy.async",
          STORE.replace("fence.proxy.async.shared::cta;", "") + "cp.async.bulk.wait_group 0;\nOUT:")
    wrong("still reading shared memory", STORE + "OUT:")
    wrong("overwritten while an asynchronous operation may still read it",
          STORE + "st.shared.u32 [%r2], %r1; cp.async.bulk.wait_group 0;\nOUT:")
    ran(STORE + "cp.async.bulk.wait_group.read 0; st.shared.u32 [%r2], %r1;\nOUT:")
    wrong("out of bounds", STORE.replace("[%rd2]", "[%rd2+16]") + "cp.async.bulk.wait_group 0;\nOUT:")


def test_hints_do_nothing():
    ran("prefetch.global.L2 [%rd1]; cp.async.bulk.prefetch.L2.global [%rd1], 512; griddepcontrol.wait;"
        "nanosleep.u32 40; griddepcontrol.launch_dependents; createpolicy.fractional.L2::evict_first.b64 %rd9, 1.0;"
        "ld.global.L2::cache_hint.u32 %r5, [%rd1], %rd9;")
