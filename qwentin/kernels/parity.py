"""How far a kernel's outputs are from its reference: formats, tolerances, poison, guards, the comparison by name."""
from dataclasses import dataclass

import numpy as np

from .. import numerics

GUARD = 256                # bytes of guard before and after an output, one line of the widest access; keeps alignment
# How each dtype is read: bits of bf16 lie in uint16, of e4m3 in uint8. Then what one rounding may cost: relative to a
# normal number, and absolute, among the subnormals.
DECODE = {"uint16": numerics.decode_bf16, "uint8": numerics.E4M3.decode}
ROUNDING = {"uint16": (2.0 ** -8, 2.0 ** -134), "uint8": (2.0 ** -4, 2.0 ** -10), "float16": (2.0 ** -11, 2.0 ** -25),
            "float32": (2.0 ** -24, 2.0 ** -150)}


def real(array):
    """The numbers that an array stands for, as float64."""
    with np.errstate(invalid="ignore"):                          # poison may be a signalling NaN
        return DECODE.get(array.dtype.name, np.asarray)(array).astype(np.float64)


@dataclass(frozen=True)
class Output:
    """How near an output must be to the reference's unrounded value: |got - want| <= atol + rtol |want|, plus what
    rounding to the output's own format costs. `exact` is for integers: equal bit for bit.
    """
    rtol: float = 0.0
    atol: float = 0.0
    exact: bool = False

    def values(self, array):
        """The numbers an array stands for, as float64 (integers as they are)."""
        return array if self.exact else real(array)

    def allowed(self, dtype, want):
        """The largest permitted |got - want| for each element."""
        if self.exact:
            return np.zeros(want.shape)
        relative, absolute = ROUNDING[np.dtype(dtype).name]
        return self.atol + absolute + (self.rtol + relative) * np.where(np.isfinite(want), np.abs(want), 0)


@dataclass(frozen=True)
class Error:
    """The comparison of one output. `used` is the largest error over what is allowed there: above 1 is wrong."""
    name: str
    worst: float                       # |got - want| where it uses most of what is allowed
    at: tuple                          # there
    used: float
    first_bad: tuple | None            # the first coordinate beyond tolerance, in C order
    detail: str = ""

    def __str__(self):
        if self.detail or self.first_bad is not None:
            return f"{self.name}: {self.detail}"
        return f"{self.name} {self.worst:.2e} at {list(self.at)} ({self.used:.0%} of the tolerance)"


def guarded(array, poison):
    """(view, whole): a copy of the array between two guards; poison fills the view too, with NaN (0xA5 for integers)."""
    whole = np.full(array.nbytes + 2 * GUARD, poison_byte(array.dtype), np.uint8)
    view = whole[GUARD:GUARD + array.nbytes].view(array.dtype).reshape(array.shape)
    if not poison:
        view[...] = array
    return view, whole


def unguarded(whole, like):
    """The view again, out of the whole bytes of an output shaped like `like`."""
    return whole[GUARD:GUARD + like.nbytes].view(like.dtype).reshape(like.shape)


def poison_byte(dtype):
    """0xFF repeated is NaN in every float format here, bf16 in u16 and e4m3 in u8 included; 0xA5.. is no likely index."""
    return 0xFF if np.dtype(dtype) in (np.uint8, np.uint16, np.float16, np.float32) else 0xA5


def guards_kept(whole, dtype):
    """True if nothing was written before or after the view."""
    byte = poison_byte(dtype)
    return bool((whole[:GUARD] == byte).all() and (whole[whole.size - GUARD:] == byte).all())


def compare(name, output, got, want, before=None):
    """Error of an output array against the reference's values.

    before: what an in-place output held. Where the reference leaves it as it was, its very bits must have stayed.
    """
    value, want = output.values(got), np.asarray(want)
    if want.shape != got.shape:
        return Error(name, np.inf, (), np.inf, (), f"the reference has shape {want.shape}, the output {got.shape}")
    if not got.size:
        return Error(name, 0.0, (), 0.0, None)
    if output.exact:
        difference = (value != want).astype(np.float64)
    else:
        with np.errstate(invalid="ignore"):
            same = (value == want) | (np.isnan(value) & np.isnan(want))
            difference = np.where(same, 0.0, np.abs(value - want))
        difference = np.where(np.isnan(difference), np.inf, difference)
    if before is not None:
        kept = output.values(before)
        stays = (kept == want) | ((kept != kept) & (want != want))
        bits = np.dtype(f"u{got.itemsize}")
        difference = np.where(stays & (got.view(bits) != before.view(bits)), np.inf, difference)
    return judged(name, value, want, difference, output.allowed(got.dtype, want))


def judged(name, value, want, difference, allowed):
    """The Error of a comparison's differences."""
    with np.errstate(divide="ignore", invalid="ignore"):
        used = np.where(difference == 0, 0.0, difference / allowed)
    at = tuple(int(i) for i in np.unravel_index(np.argmax(used), used.shape))
    bad = np.argwhere(used > 1)
    if not len(bad):
        return Error(name, float(difference[at]), at, float(used[at]), None)
    first = tuple(int(i) for i in bad[0])
    detail = (f"{len(bad)} of {used.size} wrong, the first at {list(first)}: got {value[first]!s}, want {want[first]!s}; "
              f"worst {difference[at]:.3e} at {list(at)}")
    return Error(name, float(difference[at]), at, float(used.max()), first, detail)
