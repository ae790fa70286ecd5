"""parity: what the comparison catches. Each fault is planted in an otherwise right output."""
import numpy as np
import pytest

from qwentin import numerics
from qwentin.kernels.parity import GUARD, Output, compare, guarded, guards_kept, unguarded


def test_a_right_output_passes_and_says_where_it_was_worst():
    want = np.array([[1.0, 2.0], [3.0, 4.0]])
    got = np.array([[1.0, 2.0], [3.0, 4.002]], np.float32)
    error = compare("out", Output(rtol=1e-3), got, want)
    assert error.first_bad is None and error.at == (1, 1)
    assert error.worst == pytest.approx(0.002, rel=1e-3) and error.used == pytest.approx(0.5, rel=1e-3)
    assert "out 2.00e-03 at [1, 1] (50% of the tolerance)" == str(error)


@pytest.mark.parametrize("fault", [1e-4, np.nan, np.inf, -1.0])
def test_a_wrong_element_is_named(fault):
    want = np.linspace(1, 2, 12).reshape(3, 4)
    got = want.astype(np.float32)
    got[1, 2] += fault
    got[2, 3] += 2e-5
    error = compare("out", Output(rtol=1e-6), got, want)
    assert error.used > 1 and error.first_bad == (1, 2)
    assert str(error).startswith("out: 2 of 12 wrong, the first at [1, 2]: got ")


@pytest.mark.parametrize("dtype, encode", [(np.uint16, numerics.encode_bf16), (np.uint8, numerics.E4M3.encode),
                                           (np.float16, lambda x: x.astype(np.float16)),
                                           (np.float32, lambda x: x)])
def test_one_rounding_is_allowed_and_one_step_is_not(dtype, encode):
    """Over four binades, midpoints between neighbours included, the codec's own rounding passes; the next code fails."""
    x = np.linspace(1, 16, 4001).astype(np.float32)
    right = encode(x)
    assert compare("out", Output(), right, x.astype(np.float64)).used <= 1
    wrong = right.copy()
    wrong[100:101].view(f"u{right.itemsize}")[...] += 2
    assert compare("out", Output(), wrong, x.astype(np.float64)).first_bad == (100,)


def test_integers_are_equal_or_wrong():
    want = np.array([3, 4, 0xFFFFFFFF], np.uint32)
    assert compare("ids", Output(exact=True), want.copy(), want).used == 0
    assert compare("ids", Output(exact=True), want ^ np.array([0, 1, 0], np.uint32), want).first_bad == (1,)


def test_what_was_to_stay_must_keep_its_bits():
    """An in-place output: -0.0 equals 0.0, but it was written where nothing should be."""
    before = np.array([0.0, 1.0, np.nan], np.float32)
    after = np.array([-0.0, 2.0, np.nan], np.float32)
    want = np.array([0.0, 2.0, np.nan])
    assert compare("h", Output(), after, want).used == 0
    assert compare("h", Output(), after, want, before).first_bad == (0,)
    after[0] = 0.0
    assert compare("h", Output(), after, want, before).used == 0
    after[2:].view(np.uint32)[...] ^= 1                                        # another NaN
    assert compare("h", Output(), after, want, before).first_bad == (2,)


def test_poison_guards_and_shapes():
    like = np.zeros((3, 5), np.float32)
    view, whole = guarded(like, poison=True)
    assert np.isnan(view).all() and view.shape == (3, 5) and guards_kept(whole, like.dtype)
    assert compare("out", Output(rtol=9.0), view, like).first_bad == (0, 0), "an output nobody wrote"
    for at in (GUARD - 1, GUARD + like.nbytes):
        _, whole = guarded(like, poison=False)
        whole[at] ^= 1
        assert not guards_kept(whole, like.dtype)
        assert (unguarded(whole, like) == 0).all()
    assert "has shape (2, 2)" in str(compare("out", Output(), like, np.zeros((2, 2))))
    assert compare("out", Output(), like[:0], np.zeros((0, 5))).used == 0
