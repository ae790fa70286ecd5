"""octet: every format read and written as ml_dtypes does, all codes and the awkward values."""
import ml_dtypes
import numpy as np
import pytest

from qwentin.kernels import machines, octet, ptx
from qwentin.kernels.build import CHIPS, kernel
from qwentin.kernels.ptx import u64

OUTSIDE = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn}
DTYPE = {name: dtype for dtype, name in octet.FORMATS.items()}


def copied(source, to, x, chip):
    """x (an array of `source` format) read by octets and written as `to`."""
    load, store = octet.load(source), octet.store(to)

    @kernel(threads=32)
    def copy(x: u64, out: u64):
        i = ptx.block_x() * 32 + ptx.thread_x()
        store(out, i, load(x, i))
    out = np.zeros(x.shape, DTYPE[to])
    machines.EmulatorStream(chip).launch(copy, x.size // 256, x, out)
    return out


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("format", octet.FORMATS.values())
def test_every_code_is_read(format, chip):
    codes = np.arange(256 if format == "e4m3" else 65536, dtype=np.uint8 if format == "e4m3" else np.uint16)
    if format == "f32":
        codes = np.random.default_rng(0).integers(0, 2 ** 32, 1024, np.uint32)
    want = codes.view(OUTSIDE[format]).astype(np.float32)
    finite = np.isfinite(want)
    got = copied(format, "f32", codes.view(DTYPE[format]), chip)
    assert (got[finite].view(np.uint32) == want[finite].view(np.uint32)).all()
    if format == "e4m3":
        assert got[~finite].tolist() == [480.0, -480.0]
    else:
        assert (np.isnan(got) == np.isnan(want)).all() and (np.isinf(got) == np.isinf(want)).all()


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("format", octet.FORMATS.values())
def test_values_are_rounded_to_nearest_even(format, chip):
    """Random magnitudes, and every midpoint between neighbours of e4m3; e4m3 saturates."""
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(4096) * 2.0 ** rng.integers(-12, 10, 4096)).astype(np.float32)
    grid = np.sort(np.arange(0x7F, dtype=np.uint8).view(OUTSIDE["e4m3"]).astype(np.float32))
    middle = (grid[1:] + grid[:-1]) / 2
    x[:middle.size], x[middle.size:2 * middle.size] = middle, -middle
    x[-4:] = [1000, -1000, 448, 464]
    got = copied("f32", format, x, chip)
    want = np.clip(x, -448, 448).astype(OUTSIDE[format]) if format == "e4m3" else x.astype(OUTSIDE[format])
    assert (got.view(np.uint8) == want.view(np.uint8)).all()


def test_formats_are_named_by_dtype():
    assert octet.format_of("x", np.zeros(8, np.uint16), "f32", "bf16") == "bf16"
    with pytest.raises(ValueError, match="x must be f32 or bf16, got dtype uint8"):
        octet.format_of("x", np.zeros(8, np.uint8), "f32", "bf16")
    with pytest.raises(ValueError, match="x must be f32, got dtype int64"):
        octet.format_of("x", np.zeros(8, np.int64), "f32")
