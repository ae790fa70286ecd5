"""The sanitizer: races, barriers, deadlocks, each planted in a kernel that is right without it; and the schedules.

Every fault is checked to be found in program order and under shuffled schedules, and to name the instruction.
"""
import numpy as np
import pytest

from ptx_text import kernel, run
from qwentin.kernels.emulator import Fault, launch, load

SCHEDULES = [None, 1, 2, 3]
HEAD = "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; ld.param.u64 %rd1, [p0];" \
       "mov.u32 %r4, cell; mad.lo.u32 %r4, %r1, 4, %r4; mad.lo.u32 %r5, %r2, %r3, %r1; mad.wide.u32 %rd2, %r5, 4, %rd1;"
CELL = ".shared .align 16 .b8 cell[4096];"


def ran(body, n=64, block=64, grid=1, dtype=np.uint32, **options):
    out = np.zeros(n, dtype)
    run(HEAD + body, out, static=CELL, block=block, grid=grid, **options)
    return out


def wrong(message, body, schedules=SCHEDULES, **options):
    for schedule in schedules:
        with pytest.raises(Fault, match=message) as caught:
            ran(body, schedule=schedule, **options)
    return caught.value


# ------------------------------------------------------------------------------------------------ shared memory
REVERSE = "st.shared.u32 [%r4], %r1; BARRIER sub.u32 %r6, 252, 0; mov.u32 %r7, cell; mad.lo.u32 %r8, %r1, 4, 0;" \
          "sub.u32 %r8, %r6, %r8; add.u32 %r8, %r8, %r7; ld.shared.u32 %r9, [%r8]; st.global.u32 [%rd2], %r9;"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_reverse_is_right_with_its_barrier(schedule):
    assert ran(REVERSE.replace("BARRIER", "bar.sync 0;"), schedule=schedule).tolist() == list(range(63, -1, -1))


def test_missing_barrier():
    fault = wrong("race: read here, written by thread|nothing wrote", REVERSE.replace("BARRIER", ""))
    assert fault.instruction == "ld.shared.u32 %r9, [%r8]"
    assert "block (0, 0, 0), thread (" in str(fault)
    whole = "race: read here, written by thread 63 with no barrier in between, shared offset 252"
    with pytest.raises(Fault, match=whole):
        ran(REVERSE.replace("BARRIER", ""))


def test_within_a_warp_a_warp_barrier_is_enough_and_needed():
    swap = "st.shared.u32 [%r4], %r1; BARRIER xor.b32 %r4, %r4, 4; ld.shared.u32 %r9, [%r4]; st.global.u32 [%rd2], %r9;"
    got = ran(swap.replace("BARRIER", "bar.warp.sync 0xffffffff;"))
    assert got.tolist() == [t ^ 1 for t in range(64)]
    wrong("race: read here, written by thread", swap.replace("BARRIER", ""))
    pairs = "and.b32 %r20, %r1, 30; mov.u32 %r21, 3; shl.b32 %r21, %r21, %r20; bar.warp.sync %r21;"     # two lanes each
    np.testing.assert_array_equal(ran(swap.replace("BARRIER", pairs)), got)


def test_write_after_read():
    body = ("st.shared.u32 [%r4], %r1; bar.sync 0; xor.b32 %r6, %r4, 128; ld.shared.u32 %r9, [%r6]; BARRIER"
            "st.shared.u32 [%r4], %r9; bar.sync 0; ld.shared.u32 %r9, [%r4]; st.global.u32 [%rd2], %r9;")
    assert ran(body.replace("BARRIER", "bar.sync 0;")).tolist() == [t ^ 32 for t in range(64)]
    wrong("race: written here, read by another thread|race: read here, written by", body.replace("BARRIER", ""))


def test_write_after_write():
    wrong("race: two threads write the same bytes at once|race: written here, written by thread",
          "st.shared.u32 [cell], %r1;")
    body = "setp.eq.u32 %p1, %r1, {}; @%p1 st.shared.u32 [cell], %r1; {}" \
           "setp.eq.u32 %p1, %r1, {}; @%p1 st.shared.u32 [cell], 5;"
    ran(body.format(0, "bar.sync 0;", 40))
    ran(body.format(7, "", 7))                                         # one thread may overwrite its own
    wrong("race: written here, written by thread", body.format(0, "", 40))


def test_readers_of_several_warps_are_all_remembered():
    body = ("st.shared.u32 [%r4], %r1; bar.sync 0; ld.shared.u32 %r9, [cell]; setp.eq.u32 %p1, %r1, 0; "
            "BARRIER @%p1 st.shared.u32 [cell], %r9;")
    ran(body.replace("BARRIER", "bar.sync 0;"), block=256)
    wrong("race: written here, read by another thread|race: read here, written by thread 0",
          body.replace("BARRIER", ""), block=256)


def test_atomics_do_not_race_with_each_other_but_with_the_rest():
    body = "setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.u32 [cell], 0; bar.sync 0; red.shared.add.u32 [cell], 1;"
    ran(body)
    wrong("race: read here, written by thread", body + "ld.shared.u32 %r9, [cell];")
    wrong("race", body.replace("bar.sync 0;", ""))


def test_named_barriers_order_only_their_threads():
    """Two pairs of warps with a barrier each; then a pair reads what the other wrote."""
    body = ("st.shared.u32 [%r4], %r1; shr.u32 %r10, %r1, 6; add.u32 %r10, %r10, 1; bar.sync %r10, 64;"
            "xor.b32 %r6, %r4, {}; ld.shared.u32 %r9, [%r6]; st.global.u32 [%rd2], %r9;")
    for schedule in SCHEDULES:
        got = ran(body.format(128), block=128, n=128, schedule=schedule)
        assert got.tolist() == [t ^ 32 for t in range(128)]
    wrong("race: read here, written by thread|nothing wrote", body.format(256), block=128, n=128)


def test_arrive_and_sync():
    """Warp 1 produces and arrives, warp 0 waits: bar.arrive orders like bar.sync but does not block."""
    body = ("setp.lt.u32 %p1, %r1, 32; @%p1 bra TAKE; xor.b32 %r6, %r4, 128; st.shared.u32 [%r6], %r1;"
            "bar.arrive 3, 64; bra OUT; TAKE: bar.sync 3, 64; ld.shared.u32 %r9, [%r4]; st.global.u32 [%rd2], %r9;"
            "\nOUT:")
    for schedule in SCHEDULES:
        assert ran(body, schedule=schedule)[:32].tolist() == list(range(32, 64))
    wrong("deadlock: 32 threads wait at barrier 3, which gathers 96", body.replace("3, 64", "3, 96"))


def test_barrier_reductions():
    body = "setp.gt.u32 %p1, %r1, 40; bar.red.{} {}, 0, %p1; {} st.global.u32 [%rd2], %r9;"
    assert set(ran(body.format("popc.u32", "%r9", ""))) == {23}
    for op, want in (("or", 1), ("and", 0)):
        assert set(ran(body.format(f"{op}.pred", "%p2", "selp.u32 %r9, 1, 0, %p2;"))) == {want}


# ------------------------------------------------------------------------------------------------ barriers
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_divergent_barrier(schedule):
    body = "setp.lt.u32 %p1, %r1, 16; @%p1 bra A; bar.sync 0; bra OUT; A: bar.sync 0;\nOUT: mov.u32 %r9, 0;"
    whole = "divergent barrier: some lanes of the warp are here, others are elsewhere"
    with pytest.raises(Fault, match=whole) as caught:
        ran(body, schedule=schedule)
    assert caught.value.instruction == "bar.sync 0"
    ran(body.replace("16", "32"), schedule=schedule)                   # whole warps may use different barriers' text


def test_a_predicated_barrier_within_a_warp():
    wrong("divergent barrier", "setp.lt.u32 %p1, %r1, 16; @%p1 bar.sync 0; add.u32 %r9, %r1, 1; bar.sync 0;")


def test_deadlock():
    fault = wrong("deadlock: 32 threads wait at barrier 1, which gathers 64, and nobody else will come",
                  "setp.lt.u32 %p1, %r1, 32; @!%p1 bra OUT; bar.sync 1, 64;\nOUT:")
    assert fault.instruction == "bar.sync 1, 64"


def test_barriers_that_cannot_be():
    with pytest.raises(Fault, match="64 threads at barrier 1, which gathers 32"):
        ran("bar.sync 1, 32;")
    wrong("barrier 16 gathering 0 threads, wanted one of 16 barriers", "bar.sync 16;")
    wrong("barrier 1 gathering 40 threads, wanted .* a multiple of 32", "bar.sync 1, 40;")


def test_threads_that_have_left_are_not_waited_for():
    body = "setp.ge.u32 %p1, %r1, 40; @%p1 ret; st.shared.u32 [%r4], %r1; bar.sync 0; ld.shared.u32 %r9, [cell+124]; " \
           "st.global.u32 [%rd2], %r9;"
    for schedule in SCHEDULES:
        assert ran(body, schedule=schedule).tolist() == [31] * 40 + [0] * 24


def test_an_endless_loop_is_stuck():
    with pytest.raises(Fault, match="stuck: 1000 blocks of code were executed"):
        ran("AGAIN: add.u32 %r9, %r9, 1; setp.ne.u32 %p1, %r9, 0; @%p1 bra AGAIN;", limit=1000)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_who_polls_memory_takes_no_turns_from_whom_it_waits_for(schedule):
    """Block 0 polls a word that block 1 writes after 1,000 turns of a loop; 1,600 blocks of code are all it takes."""
    body = ("setp.ne.u32 %p1, %r2, 0; @%p1 bra COUNT;\nLOOK: ld.relaxed.gpu.global.u32 %r9, [%rd1+128];"
            "setp.ne.u32 %p2, %r9, 7; @%p2 bra LOOK; st.global.u32 [%rd2], %r9; bra OUT;\n"
            "COUNT: mov.u32 %r10, 0;\nMORE: add.u32 %r10, %r10, 1; setp.lt.u32 %p2, %r10, 1000; @%p2 bra MORE;"
            "mov.u32 %r9, 7; setp.eq.u32 %p3, %r1, 0; @%p3 st.relaxed.gpu.global.u32 [%rd2], %r9;\nOUT:")
    got = ran(body, block=32, grid=2, schedule=schedule, limit=1600)
    assert got.tolist() == [7] * 33 + [0] * 31


def test_a_word_that_nobody_writes_is_polled_until_the_limit():
    with pytest.raises(Fault, match="stuck: 1000 blocks of code were executed"):
        ran("LOOK: ld.relaxed.gpu.global.u32 %r9, [%rd1]; setp.ne.u32 %p1, %r9, 7; @%p1 bra LOOK;", limit=1000)


def test_trap_and_missing_functions():
    wrong("trap", "setp.eq.u32 %p1, %r1, 5; @!%p1 bra OUT; trap;\nOUT:")
    head = ".extern .func (.param .b32 r) helper (.param .b32 a);"
    call = "{ .param .b32 q; .param .b32 s; st.param.b32 [q], %r1; call.uni (s), helper, (q); ld.param.b32 %r9, [s]; }"
    program = load(kernel("setp.eq.u32 %p1, %r1, 1; @!%p1 bra OUT;" + call + "\nOUT:", ("u64",), head=head))
    launch(program, 1, 32, [np.zeros(1, np.uint32)])                   # not reached: %r1 is 0
    with pytest.raises(Fault, match="call of helper, which is not in the PTX"):
        launch(load(kernel(call, ("u64",), head=head)), 1, 32, [np.zeros(1, np.uint32)])


# ------------------------------------------------------------------------------------------------ reconvergence
def test_lanes_meet_again_after_branches_and_loops():
    """Loops of different length and nested branches; the ballot afterwards needs the whole warp."""
    body = """
    mov.u32 %r9, 0; and.b32 %r10, %r1, 7;
LOOP: setp.eq.u32 %p1, %r10, 0; @%p1 bra DONE; and.b32 %r11, %r10, 1; setp.eq.u32 %p2, %r11, 1; @%p2 bra ODD;
    add.u32 %r9, %r9, 10; bra NEXT;
ODD: add.u32 %r9, %r9, 1;
NEXT: sub.u32 %r10, %r10, 1; bra LOOP;
DONE: setp.gt.u32 %p3, %r9, 20; vote.sync.ballot.b32 %r12, %p3, 0xffffffff; popc.b32 %r12, %r12;
    mad.lo.u32 %r9, %r12, 1000, %r9; st.global.u32 [%rd2], %r9;"""
    value = [sum(1 if i % 2 else 10 for i in range(1, t % 8 + 1)) for t in range(64)]
    for schedule in SCHEDULES:
        assert ran(body, schedule=schedule).tolist() == [sum(v > 20 for v in value[:32]) * 1000 + v for v in value]


def test_code_moved_out_of_line_still_comes_before_the_join():
    """Compilers put unlikely code behind the join; text order alone would run the join half-populated."""
    body = """
    setp.lt.u32 %p1, %r1, 7; @%p1 bra COLD;
JOIN: vote.sync.ballot.b32 %r12, %p1, 0xffffffff; st.global.u32 [%rd2], %r12; bra OUT;
COLD: mov.u32 %r9, 1; bra JOIN;
OUT: bar.sync 0;"""
    for schedule in SCHEDULES:
        assert ran(body, schedule=schedule).tolist() == [127] * 32 + [0] * 32


def test_a_block_size_that_is_no_multiple_of_32():
    body = "st.shared.u32 [%r4], %r1; bar.sync 0; ld.shared.u32 %r9, [cell+172]; st.global.u32 [%rd2], %r9;"
    for schedule in SCHEDULES:
        assert ran(body, block=45, n=45, schedule=schedule).tolist() == [43] * 45


# ------------------------------------------------------------------------------------------------ global races
def test_two_threads_write_one_place():
    with pytest.raises(Fault, match="race: two threads write the same bytes of argument 0 at once"):
        ran("st.global.u32 [%rd1], %r1;")
    wrong("race", "st.global.u32 [%rd1], %r1;")


def test_blocks_are_in_no_order():
    """Block 1 reads what block 0 writes: in whatever order they run, in one group or in two."""
    body = "st.global.u32 [%rd2], %r1; bar.sync 0; ld.global.u32 %r9, [%rd1];"
    ran(body)
    for block in (64, 1024):
        fault = wrong("race: argument 0 is (read|written) here and (written by thread 0 of block|read by another)",
                      body, grid=8, n=8 * block, block=block)
        assert "with nothing to order them" in str(fault)
    wrong("race: argument 0 is written here and read by another thread|is read here and written",
          "ld.global.u32 %r9, [%rd1]; setp.eq.u32 %p1, %r5, 3; @%p1 st.global.u32 [%rd1], %r9;")


def test_a_barrier_orders_global_memory_within_a_block():
    body = "st.global.u32 [%rd2], %r1; BARRIER ld.global.u32 %r9, [%rd1+128]; BARRIER st.global.u32 [%rd2], %r9;"
    assert ran(body.replace("BARRIER", "bar.sync 0;")).tolist() == [32] * 64
    wrong("race: argument 0 is read here and written by thread 32 of block 0|nothing to order",
          body.replace("BARRIER", ""))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_read_then_each_updates_its_own_after_a_barrier(schedule):
    """What a barrier ordered is forgotten, also where a thread reads again before it writes."""
    body = "ld.global.u32 %r9, [%rd1+20]; bar.sync 0; ld.global.u32 %r9, [%rd2]; add.u32 %r9, %r9, 1;" \
           "st.global.u32 [%rd2], %r9;"
    assert ran(body, schedule=schedule).tolist() == [1] * 64
    wrong("race: argument 0 is (written|read) here", body.replace("bar.sync 0;", ""), schedules=[schedule])


LAST = """
    ld.param.u64 %rd5, [p1]; ld.param.u64 %rd6, [p2]; cvt.rn.f32.u32 %f1, %r2; st.global.f32 [%rd2], %f1; bar.sync 0;
    setp.ne.u32 %p1, %r1, 0; @%p1 bra WAIT; FENCE
    atom.global.add.u32 %r9, [%rd5], 1; st.shared.u32 [cell], %r9; FENCE
WAIT: bar.sync 0; ld.shared.u32 %r9, [cell]; mov.u32 %r10, %nctaid.x; sub.u32 %r10, %r10, 1; setp.ne.u32 %p2, %r9, %r10;
    @%p2 ret; mad.wide.u32 %rd7, %r1, 4, %rd1; mov.f32 %f2, 0f00000000; mov.u32 %r11, 0; mul.wide.u32 %rd8, %r3, 4;
SUM: ld.global.f32 %f3, [%rd7]; add.f32 %f2, %f2, %f3; add.u64 %rd7, %rd7, %rd8; add.u32 %r11, %r11, 1;
    setp.le.u32 %p3, %r11, %r10; @%p3 bra SUM; mad.wide.u32 %rd9, %r1, 4, %rd6; st.global.f32 [%rd9], %f2; RESET
"""


@pytest.mark.parametrize("fence", ["membar.gl;", "fence.acq_rel.gpu;"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_last_block_to_arrive_may_read_the_others(fence, schedule):
    """The split-K pattern: publish a partial sum, count, and the last block adds them up (and resets the counter)."""
    body = HEAD + LAST.replace("FENCE", fence).replace("RESET", "@!%p1 st.global.u32 [%rd5], 0;")
    partial, counter, total = np.zeros(20 * 256, np.float32), np.zeros(1, np.uint32), np.zeros(256, np.float32)
    run(body, partial, counter, total, grid=20, block=256, static=CELL, schedule=schedule)
    assert (total == 190).all() and counter[0] == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_its_fence_the_last_block_races(schedule):
    body = HEAD + LAST.replace("FENCE", "").replace("RESET", "")
    args = np.zeros(20 * 256, np.float32), np.zeros(1, np.uint32), np.zeros(256, np.float32)
    with pytest.raises(Fault, match="race: argument 0 is read here and written by thread"):
        run(body, *args, grid=20, block=256, static=CELL, schedule=schedule)
    released = body.replace("atom.global.add", "atom.acq_rel.gpu.global.add")
    run(released, *args, grid=20, block=256, static=CELL, schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_flag_passes_data_from_block_to_block(schedule):
    """Block 0 writes, releases a flag; the others acquire it, spinning, and read."""
    body = HEAD + """
    ld.param.u64 %rd5, [p1]; setp.ne.u32 %p1, %r2, 0; @%p1 bra SPIN; st.global.u32 [%rd2], 77; bar.sync 0;
    setp.eq.u32 %p2, %r1, 0; @%p2 st.RELEASE.gpu.global.u32 [%rd5], 1; bra OUT;
SPIN: ld.acquire.gpu.global.u32 %r9, [%rd5]; setp.eq.u32 %p3, %r9, 0; @%p3 bra SPIN;
    mad.wide.u32 %rd6, %r1, 4, %rd1; ld.global.u32 %r9, [%rd6]; st.global.u32 [%rd2], %r9;
OUT:"""
    data, flag = np.zeros(4 * 64, np.uint32), np.zeros(1, np.uint32)
    run(body.replace("RELEASE", "release"), data, flag, grid=4, block=64, static=CELL, schedule=schedule)
    assert (data == 77).all()
    flag[:] = 0
    with pytest.raises(Fault, match="race: argument 0 is read here and written by thread"):
        run(body.replace("RELEASE", "relaxed"), data, flag, grid=4, block=64, static=CELL, schedule=schedule)


def test_atomics_of_many_blocks_and_a_plain_read():
    ran("red.global.add.u32 [%rd1], 1;", grid=8)
    wrong("race", "red.global.add.u32 [%rd1], 1; bar.sync 0; ld.global.u32 %r9, [%rd1];", grid=8)


# ------------------------------------------------------------------------------------------------ schedules
def test_a_seed_is_deterministic_and_seeds_differ():
    """The order in which warps win an atomic counter is the schedule made visible."""
    body = HEAD + "ld.param.u64 %rd5, [p1]; atom.global.add.u32 %r9, [%rd5], 1; st.global.u32 [%rd2], %r9;"
    orders = []
    for schedule in (None, 1, 1, 2, 3):
        out, counter = np.zeros(512, np.uint32), np.zeros(1, np.uint32)
        run(body, out, counter, grid=2, block=256, static=CELL, schedule=schedule)
        assert sorted(out.tolist()) == list(range(512))
        orders.append(out.tolist())
    assert orders[0] == list(range(512)) and orders[1] == orders[2]
    assert len({tuple(o) for o in orders}) == 4


def test_results_do_not_depend_on_the_schedule_when_barriers_are_there():
    tree = """
    st.shared.u32 [%r4], %r1; mov.u32 %r10, 128;
LOOP: bar.sync 0; setp.ge.u32 %p1, %r1, %r10; @%p1 bra SKIP;
    mad.lo.u32 %r11, %r10, 4, %r4; ld.shared.u32 %r12, [%r11]; ld.shared.u32 %r13, [%r4]; add.u32 %r12, %r12, %r13;
    st.shared.u32 [%r4], %r12;
SKIP: shr.u32 %r10, %r10, 1; setp.ne.u32 %p2, %r10, 0; @%p2 bra LOOP;
    bar.sync 0; ld.shared.u32 %r9, [cell]; st.global.u32 [%rd2], %r9;"""
    for schedule in SCHEDULES:
        assert set(ran(tree, block=256, n=256, schedule=schedule)) == {255 * 128}


# ------------------------------------------------------------------------------------------------ registers
GIVE = "shr.u32 %r6, %r1, 7; setp.eq.u32 %p1, %r6, 2; @%p1 bra FETCH; setmaxnreg.inc.sync.aligned.u32 MORE; bra END;" \
       "FETCH: setmaxnreg.dec.sync.aligned.u32 LESS; END: st.global.u32 [%rd2], %r1;"


@pytest.mark.parametrize("more, less, message", [
    (240, 24, None),
    (232, 40, None),
    (240, 40, "ask for 66560 registers of 65536: one waits for ever"),
    (244, 24, "244 registers: a multiple of 8"),
    (160, 24, r"setmaxnreg.inc from 168 to 160"),
    (240, 200, r"setmaxnreg.dec from 168 to 200"),
])
def test_registers_are_handed_over_as_far_as_there_are_some(more, less, message):
    body = GIVE.replace("MORE", str(more)).replace("LESS", str(less))
    if message:
        wrong(message, body, n=384, block=384)
    else:
        assert ran(body, n=384, block=384).tolist() == list(range(384))


def test_a_warpgroup_hands_registers_over_whole():
    wrong("needs all 128 lanes of its warpgroup", "setp.lt.u32 %p1, %r1, 64; @%p1 setmaxnreg.dec.sync.aligned.u32 24;"
          "st.global.u32 [%rd2], %r1;", n=128, block=128)
