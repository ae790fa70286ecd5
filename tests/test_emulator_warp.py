"""Shuffles, votes, matches, reductions and special registers, against their definitions lane by lane."""
import numpy as np
import pytest

from ptx_text import each, kernel, run
from qwentin.kernels.emulator import Fault, Unsupported, launch, load

LANES = np.arange(32, dtype=np.uint32)
rng = np.random.default_rng(2)


@pytest.mark.parametrize("mode, by, width", [
    ("idx", 5, 32), ("idx", 3, 8), ("up", 1, 32), ("up", 3, 16), ("down", 2, 32), ("down", 9, 16), ("bfly", 16, 32),
    ("bfly", 1, 32), ("bfly", 12, 8)])
def test_shuffles(mode, by, width):
    """CUDA's description: segments of `width` lanes; a source outside the segment leaves the lane its own value."""
    x = rng.integers(0, 2 ** 32, 32, dtype=np.uint32)
    want, valid = [], []
    for lane in range(32):
        start = lane - lane % width
        place = {"idx": start + by % width, "up": lane - by, "down": lane + by, "bfly": lane ^ by}[mode]
        inside = place >= start if mode == "up" else place < start + width
        want.append(int(x[place if inside else lane]))
        valid.append(int(inside))
    control = (32 - width) << 8 | (0 if mode == "up" else 31)
    code = f"shfl.sync.{mode}.b32 %r2|%p1, $0, {by}, {control}, 0xffffffff; "
    assert each(code + "mov.u32 $d, %r2;", [x], np.uint32).tolist() == want
    assert each(code + "selp.u32 $d, 1, 0, %p1;", [x], np.uint32).tolist() == valid


def test_shuffle_by_a_register():
    x, by = LANES * 3, rng.integers(0, 32, 32, dtype=np.uint32)
    assert each("shfl.sync.idx.b32 $d, $0, $1, 31, 0xffffffff;", [x, by], np.uint32).tolist() == x[by].tolist()


def test_votes():
    odd = "and.b32 %r2, $0, 1; setp.eq.u32 %p1, %r2, 1; "
    assert set(each(odd + "vote.sync.ballot.b32 $d, %p1, 0xffffffff;", [LANES], np.uint32)) == {0xAAAAAAAA}
    some = each(odd + "vote.sync.any.pred %p2, %p1, 0xffffffff; selp.u32 $d, 1, 0, %p2;", [LANES], np.uint32)
    every = each(odd + "vote.sync.all.pred %p2, %p1, 0xffffffff; selp.u32 $d, 1, 0, %p2;", [LANES], np.uint32)
    assert some.all() and not every.any()


def test_votes_of_a_diverged_half():
    code = ("setp.lt.u32 %p1, $0, 16; mov.u32 $d, 0; @!%p1 bra OUT; setp.gt.u32 %p2, $0, 3; "
            "vote.sync.ballot.b32 $d, %p2, 0xffff; activemask.b32 %r5; sub.u32 $d, $d, %r5; OUT:")
    got = each(code, [LANES], np.uint32)
    assert got.tolist() == [(0xFFF0 - 0xFFFF) & 0xFFFFFFFF] * 16 + [0] * 16


@pytest.mark.parametrize("op, function", [("add", np.add), ("min", np.minimum), ("max", np.maximum),
                                          ("xor", np.bitwise_xor), ("and", np.bitwise_and), ("or", np.bitwise_or)])
def test_redux(op, function):
    x = rng.integers(0, 2 ** 32, 32, dtype=np.uint32)
    kind = "b32" if op in ("xor", "and", "or") else "u32"
    got = each(f"redux.sync.{op}.{kind} $d, $0, 0xffffffff;", [x], np.uint32)
    assert set(got.tolist()) == {int(function.reduce(x)) & 0xFFFFFFFF}
    if op in ("min", "max"):
        got = each(f"redux.sync.{op}.s32 $d, $0, 0xffffffff;", [x], np.uint32).view(np.int32)
        assert set(got.tolist()) == {int(function.reduce(x.view(np.int32)))}


def test_match_and_elect():
    x = LANES // 5
    want = [sum(1 << j for j in range(32) if x[j] == v) for v in x]
    assert each("match.any.sync.b32 $d, $0, 0xffffffff;", [x], np.uint32).tolist() == want
    both = "match.all.sync.b32 %r2|%p1, {}, 0xffffffff; selp.u32 $d, %r2, 7, %p1;"
    assert set(each(both.format("$0"), [x], np.uint32)) == {7}
    assert set(each(both.format("5"), [x], np.uint32)) == {0xFFFFFFFF}
    code = "elect.sync %r2|%p1, 0xffffffff; selp.u32 $d, 1, 0, %p1;"
    assert each(code, [LANES], np.uint32).tolist() == [1] + [0] * 31


def test_special_registers():
    out = np.zeros((2, 3, 2, 5, 4, 3, 8), np.uint32)                    # ctaid z y x, tid z y x, value
    run("""
    mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ctaid.y;
    mov.u32 %r6, %ctaid.z; mov.u32 %r7, %laneid; mov.u32 %r8, %warpid;
    mov.u32 %r11, %ntid.x; mov.u32 %r12, %ntid.y; mov.u32 %r13, %ntid.z;
    mov.u32 %r14, %nctaid.x; mov.u32 %r15, %nctaid.y;
    mad.lo.u32 %r20, %r6, %r15, %r5; mad.lo.u32 %r20, %r20, %r14, %r4; mad.lo.u32 %r20, %r20, %r13, %r3;
    mad.lo.u32 %r20, %r20, %r12, %r2; mad.lo.u32 %r20, %r20, %r11, %r1;
    ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd1, %r20, 32, %rd1;
    st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4}; st.global.v4.u32 [%rd1+16], {%r5, %r6, %r7, %r8};""",
        out, grid=(2, 3, 2), block=(3, 4, 5))
    z, y, x, tz, ty, tx = np.indices(out.shape[:-1])
    local = tx + 3 * (ty + 4 * tz)
    for i, want in enumerate((tx, ty, tz, x, y, z, local % 32, local // 32)):
        np.testing.assert_array_equal(out[..., i], want)


def test_lane_masks():
    for name, want in (("eq", lambda i: 1 << i), ("lt", lambda i: (1 << i) - 1), ("le", lambda i: (2 << i) - 1),
                       ("gt", lambda i: 2 ** 32 - (2 << i)), ("ge", lambda i: 2 ** 32 - (1 << i))):
        assert each(f"mov.u32 $d, %lanemask_{name};", [LANES], np.uint32).tolist() == [want(i) for i in range(32)]


def test_a_shuffle_must_find_its_lanes():
    body = ("mov.u32 %r1, %laneid; setp.lt.u32 %p1, %r1, 16; @!%p1 bra OUT; "
            "shfl.sync.bfly.b32 %r2, %r1, {}, 31, {}; OUT: mov.u32 %r3, 0;")
    with pytest.raises(Fault, match="a lane in the member mask is not here: the warp is diverged"):
        run(body.format(1, "0xffffffff"))
    with pytest.raises(Fault, match="not in its own member mask"):
        run(body.format(1, "0x7fff"))
    with pytest.raises(Fault, match="reads a lane that is not active"):
        run(body.format(16, "0xffff"))
    run(body.format(1, "0xffff"))


def test_lanes_that_have_left_are_not_waited_for():
    run("mov.u32 %r1, %laneid; setp.gt.u32 %p1, %r1, 20; @%p1 ret; vote.sync.ballot.b32 %r2, %p1, 0xffffffff;")


def test_unknown_special_register():
    with pytest.raises(Unsupported, match="%wobble"):
        launch(load(kernel("mov.u32 %r1, %wobble;", ())), 1, 1, [])
