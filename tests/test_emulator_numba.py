"""PTX as it comes: numba's for both chips, and NVRTC's; arrays as structures; faults that name the Python line."""
import inspect
import math

import numpy as np
import pytest
from cuda.bindings import nvrtc
from numba import cuda, types
from numba.cuda import compile_ptx

from qwentin.kernels.emulator import Fault, launch, load

CHIPS = [(9, 0, "a"), (12, 0, "a")]
f32, f64, u32, i32 = types.float32, types.float64, types.uint32, types.int32


def compiled(function, signature, chip):
    return load(compile_ptx(function, signature, cc=chip, lineinfo=True)[0])


def block_sum(x, out, n):
    cell = cuda.shared.array(256, f32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    cell[t] = x[i] if i < n else f32(0)
    cuda.syncthreads()
    k = 128
    while k > 0:
        if t < k:
            cell[t] += cell[t + k]
        cuda.syncthreads()
        k //= 2
    if t == 0:
        cuda.atomic.add(out, 0, cell[0])


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("schedule", [None, 5])
def test_block_sum(chip, schedule):
    program = compiled(block_sum, (f32[::1], f32[::1], u32), chip)
    x, out = np.arange(1000, dtype=np.float32), np.zeros(1, np.float32)
    launch(program, 4, 256, [x, out, np.uint32(1000)], schedule=schedule)
    assert out[0] == 999 * 500


def racy_sum(x, out):
    cell = cuda.shared.array(64, f32)
    t = cuda.threadIdx.x
    cell[t] = x[t]
    out[t] = cell[63 - t]                                                # the barrier is missing: this line races


@pytest.mark.parametrize("chip", CHIPS)
def test_a_race_names_this_file_and_line(chip):
    program = compiled(racy_sum, (f32[::1], f32[::1]), chip)
    with pytest.raises(Fault, match="race: read here, written by thread") as caught:
        launch(program, 1, 64, [np.zeros(64, np.float32), np.zeros(64, np.float32)])
    lines, first = inspect.getsourcelines(racy_sum)
    line = first + next(i for i, text in enumerate(lines) if "races" in text)
    assert caught.value.place.endswith(f"test_emulator_numba.py:{line}")


def stencil(x, out):
    i, j = cuda.grid(2)
    if i < out.shape[0] and j < out.shape[1]:
        total = f64(0)
        for a in range(-1, 2):
            for b in range(-1, 2):
                p, q = (i + a) % x.shape[0], (j + b) % x.shape[1]
                total += x[p, q] / (1 + abs(a) + b * b)
        out[i, j] = total


@pytest.mark.parametrize("chip", CHIPS)
def test_two_dimensions_divergence_and_doubles(chip):
    program = compiled(stencil, (f64[:, ::1], f64[:, ::1]), chip)
    x = np.random.default_rng(1).standard_normal((19, 23))
    out = np.zeros_like(x)
    launch(program, (3, 3), (8, 8), [x, out])
    want = sum(np.roll(np.roll(x, -a, 0), -b, 1) / (1 + abs(a) + b * b) for a in (-1, 0, 1) for b in (-1, 0, 1))
    np.testing.assert_allclose(out, want, rtol=1e-14)


def collatz(out, n):
    i = cuda.grid(1)
    if i < n:
        x, steps = i + 1, 0
        while x != 1:
            x = x // 2 if x % 2 == 0 else 3 * x + 1
            steps += 1
        votes = cuda.ballot_sync(cuda.activemask(), steps > 20)
        out[i, 0] = steps
        out[i, 1] = cuda.popc(votes)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("schedule", [None, 2])
def test_loops_of_different_length(chip, schedule):
    program = compiled(collatz, (i32[:, ::1], i32), chip)
    out = np.zeros((100, 2), np.int32)
    launch(program, 2, 64, [out, np.int32(100)], schedule=schedule)

    def steps(x):
        return 0 if x == 1 else 1 + steps(x // 2 if x % 2 == 0 else 3 * x + 1)
    want = np.array([steps(i + 1) for i in range(100)])
    np.testing.assert_array_equal(out[:, 0], want)
    for warp in range(0, 100, 32):
        assert set(out[warp:warp + 32, 1]) == {(want[warp:warp + 32] > 20).sum()}


def functions(x, out):
    i = cuda.grid(1)
    out[i, 0] = math.exp(x[i])
    out[i, 1] = math.log(x[i])
    out[i, 2] = math.sqrt(x[i])
    out[i, 3] = math.sin(x[i])
    out[i, 4] = math.tanh(x[i])
    out[i, 5] = x[i] ** f32(1.5)
    out[i, 6] = f32(1) / x[i]
    out[i, 7] = math.erf(x[i])


@pytest.mark.parametrize("chip", CHIPS)
def test_the_device_library(chip):
    """libdevice's own code runs here; its documented error is at most 2 ulp for these (16 for powf's product)."""
    program = compiled(functions, (f32[::1], f32[:, ::1]), chip)
    x = np.linspace(0.1, 6, 64, dtype=np.float32)
    out = np.zeros((64, 8), np.float32)
    launch(program, 2, 32, [x, out])
    wide = x.astype(np.float64)
    want = np.stack([np.exp(wide), np.log(wide), np.sqrt(wide), np.sin(wide), np.tanh(wide), wide ** 1.5, 1 / wide,
                     [math.erf(v) for v in wide]], 1)
    ulps = np.abs(out - want) / np.spacing(np.abs(want).astype(np.float32))
    assert (ulps[:, [0, 1, 2, 3, 4, 6, 7]] <= 2).all() and (ulps[:, 5] <= 16).all()


SOURCE = r"""
extern "C" __global__ void rows(const float *x, float *out, int columns) {
    __shared__ float part[8];
    const float *row = x + (size_t)blockIdx.x * columns;
    float sum = 0;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) sum += row[c] * row[c];
    for (int by = 16; by; by >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0;
        for (int w = 0; w < blockDim.x / 32; w++) total += part[w];
        out[blockIdx.x] = sqrtf(total / columns);
    }
}
"""


def nvrtc_ptx(source, arch):
    """PTX of a CUDA source."""
    def checked(result):
        assert result[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS, result[0]
        return result[1] if len(result) > 1 else None
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"rows.cu", 0, [], []))
    options = [f"--gpu-architecture={arch.replace('sm', 'compute')}".encode(), b"-lineinfo"]
    checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
    text = bytearray(checked(nvrtc.nvrtcGetPTXSize(program)))
    checked(nvrtc.nvrtcGetPTX(program, text))
    return bytes(text).rstrip(b"\0").decode()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize("schedule", [None, 7])
def test_what_nvrtc_compiles(arch, schedule):
    text = nvrtc_ptx(SOURCE, arch)
    x, out = np.random.default_rng(0).standard_normal((5, 1000)).astype(np.float32), np.full(5, np.nan, np.float32)
    launch(load(text), 5, 256, [x, out, np.int32(1000)], schedule=schedule, unwritten=[out])
    np.testing.assert_allclose(out, np.sqrt((x.astype(float) ** 2).mean(1)), rtol=1e-6)
