"""build: the ABI, the code two chips get, the disk cache and what it depends on, and CUDA source linked in."""
import threading

import numpy as np
import pytest
from numba.cuda import types

from qwentin.kernels import build, emulator, nvrtc, ptx
from qwentin.kernels.build import BuildError, device, kernel
from qwentin.kernels.disassembler import opcodes
from qwentin.kernels.ptx import f32, u32, u64
from qwentin.kernels.unroll import static_range


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache folder, and nothing remembered in the process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for remembered in (build.ptx_of, build.cubin_of, build.stem):
        remembered.cache_clear()
    return tmp_path / "qwentin" / "kernels"


def scale(factor, threads=64):
    """out = factor x, by a device function that closes over `factor`."""
    @device
    def scaled(x):
        return x * factor

    @kernel(threads=threads)
    def scale(x: u64, out: u64, n: u32):
        i = ptx.block_x() * threads + ptx.thread_x()
        if i < n:
            ptx.store_f32(out + i * 4, scaled(ptx.load_f32(x + i * 4)))
    return scale


def test_ptx_is_tidy_and_computes():
    made = scale(2.5)
    for chip in build.CHIPS:
        text = made.ptx(chip)
        assert f".target {chip}" in text and ".entry scale(" in text and ".maxntid 64" in text
        assert "NumbaEnv" not in text and "call" not in text and ".f64" not in text
        assert __file__ in text, "line info names this file"
        x, out = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
        emulator.launch(emulator.load(text), (2, 1, 1), (64, 1, 1), [x, out, np.uint32(100)], unwritten=[out])
        assert (out == x * 2.5).all()


def test_cubin_reports_what_it_takes():
    @kernel(threads=32)
    def hungry(x: u64, n: u32):
        from_ = tuple(ptx.read_f32(x + 128 * i) for i in static_range(100))
        ptx.barrier()
        for k in range(n):
            from_ = tuple(from_[i] * from_[(i + 1) % 100] for i in static_range(100))
        for i in static_range(100):
            ptx.store_f32(x + 128 * i, from_[i])
    cubin = hungry.cubin("sm_90a")
    assert cubin.code[:4] == b"\x7fELF" and cubin.registers > 100 and cubin.shared == 0
    squeezed = build.Kernel("hungry", hungry.function, hungry.signature, 1024, 0, 2, ())
    assert squeezed.cubin("sm_90a").registers <= 32 and squeezed.cubin("sm_90a").spills > 0


def test_shared_memory_is_counted():
    from numba import cuda

    @kernel(threads=32, shared=70000)
    def sharing(x: u64):
        fixed = cuda.shared.array((4, 32), f32)
        whole = ptx.shared_address(cuda.shared.array(0, types.uint8))
        fixed[3, ptx.lane()] = 1.0
        ptx.store_shared_f32(whole + 69996, 2.0)
        ptx.barrier()
        ptx.store_f32(x + ptx.lane() * 4, fixed[3, 31 - ptx.lane()] + ptx.shared_f32(whole + 69996))
    assert sharing.cubin("sm_90a").shared == sharing.cubin("sm_120a").shared == 512 and sharing.shared == 70000


def test_setmaxnreg_counts_in_a_whole_program():
    """As PTX that might be linked with other code it would be ignored; the name of the entry is the compiler's own."""
    def give(x: u64):
        ptx.registers_down(40)
        ptx.store_f32(x + ptx.thread_x() * 4, 1.0)
    part, whole = kernel(threads=384)(give), kernel(threads=384, whole=True)(give)
    taken = [any(op.startswith("USETMAXREG") for op in opcodes(k.cubin("sm_90a"))) for k in (part, whole)]
    assert taken == [False, True]
    assert part.cubin("sm_90a").entry == "give" and whole.cubin("sm_90a").entry.encode() in whole.cubin("sm_90a").code
    out = np.zeros(384, np.float32)
    emulator.launch(emulator.load(whole.ptx("sm_90a")), (1, 1, 1), (384, 1, 1), [out], unwritten=[out])
    assert (out == 1).all()


@pytest.mark.parametrize("annotation", [None, types.float64, types.int32])
def test_only_the_abi_crosses_a_launch(annotation):
    def bad(x: u64, n):
        pass
    if annotation:
        bad.__annotations__["n"] = annotation
    with pytest.raises(TypeError, match="argument n must be annotated u64, u32 or f32"):
        kernel(threads=32)(bad)


def test_chips_are_named_as_the_assembler_does():
    assert build.capability("sm_120a") == (12, 0, "a") and build.capability("sm_80") == (8, 0)
    with pytest.raises(ValueError, match="named like 'sm_90a', got 'hopper'"):
        build.capability("hopper")


def test_what_does_not_assemble_says_so():
    with pytest.raises(BuildError, match="sm_90a: .*nonsense"):
        build.link("sm_90a", [("PTX", b".version 8.0\n.target sm_90a\n.address_size 64\nnonsense")])


# ---------------------------------------------------------------------------------------------- the cache
def test_second_time_comes_from_the_disk(cache, monkeypatch):
    first = scale(2.5)
    cubin = first.cubin("sm_90a")
    assert sorted(p.suffix for p in cache.iterdir()) == [".cubin", ".ptx"]

    def unexpected(*_):
        raise AssertionError("compiled again")
    monkeypatch.setattr(build, "compiled", unexpected)
    monkeypatch.setattr(build, "link", unexpected)
    again = scale(2.5)
    assert again is not first and again.cubin("sm_90a") == cubin and again.ptx("sm_90a") == first.ptx("sm_90a")
    with pytest.raises(AssertionError, match="compiled again"):
        scale(3.5).ptx("sm_90a")


def test_the_key_holds_all_that_the_code_depends_on():
    stem = build.stem(scale(2.5), "sm_90a")
    assert stem.startswith("scale-sm_90a-") and stem == build.stem(scale(2.5), "sm_90a")
    others = [build.stem(scale(2.0), "sm_90a"), build.stem(scale(2.5), "sm_120a"), build.stem(scale(2.5, 96), "sm_90a")]

    def step(instruction):
        @kernel(threads=32)
        def scale(x: u64, out: u64, n: u32):
            instruction(x, n)
        return scale
    others += [build.stem(step(i), "sm_90a") for i in (ptx.store_u32, ptx.store_u16, ptx.store_u32_release)]
    assert len({stem, *others}) == len(others) + 1


def test_the_entry_is_found_among_the_functions_that_it_calls():
    """A 64-bit division by what is known at launch only is a call, and its code comes first."""
    @kernel(threads=32)
    def divide(out: u64, a: u64, b: u64):
        ptx.store_u32(out, u32(a // b))
    cubin = divide.cubin("sm_90a")
    assert b".text.__cuda_sm20_div_u64\0" in cubin.code and cubin.entry == "divide"


def test_the_key_tells_which_of_two_functions_is_called_twice():
    @device
    def first(x):
        return u32(x + 1)

    @device
    def second(x):
        return u32(x * 3)

    def calls(a, b, c):
        @kernel(threads=32)
        def three(out: u64, n: u32):
            ptx.store_u32(out, c(b(a(n))))
        return build.stem(three, "sm_90a")
    assert calls(first, first, second) != calls(first, second, second)


def test_a_cache_that_cannot_be_written_is_no_error(cache):
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    assert scale(2.5).cubin("sm_90a").registers > 0


def test_threads_may_compile_at_once(cache):
    made, results = [scale(float(i)) for i in range(4)], {}
    threads = [threading.Thread(target=lambda k=k, i=i: results.update({i: k.cubin("sm_120a")}))
               for i, k in enumerate(made)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({c.code for c in results.values()}) == 4


# ---------------------------------------------------------------------------------------------- CUDA source
BLOCK_SCALED = r'''
extern "C" __device__ float mma_sum(unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1,
                                    unsigned a_scale, unsigned b_scale) {
    float d0, d1, d2, d3;
    asm("mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e2m3.e4m3.f32.ue8m0 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10}, {%11}, {0, 0}, {%12}, {0, 0};"
        : "=f"(d0), "=f"(d1), "=f"(d2), "=f"(d3)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f), "r"(a_scale), "r"(b_scale));
    return d0 + d1 + d2 + d3;
}
'''
mma_sum = nvrtc.external("mma_sum", types.float32, *[types.uint32] * 8)


@kernel(threads=32, sources=(BLOCK_SCALED,))
def by_source(a: u64, b: u64, out: u64):
    lane = ptx.lane()
    x, y = ptx.load_x4(a + lane * 16), ptx.load_x4(b + lane * 16)
    ptx.store_f32(out + lane * 4, mma_sum(x[0], x[1], x[2], x[3], y[0], y[1], y[2], y[3]))


@kernel(threads=32)
def by_name(a: u64, b: u64, out: u64):
    lane = ptx.lane()
    x, y = ptx.load_x4(a + lane * 16), ptx.load_x4(b + lane * 16)
    d = ptx.mma_e2m3_e4m3(x, (y[0], y[1]), (0.0,) * 4, y[2], 0, 0, y[3], 0, 0)
    ptx.store_f32(out + lane * 4, d[0] + d[1] + d[2] + d[3])


def test_cuda_source_and_named_instruction_give_the_same_code():
    source, name = by_source.cubin("sm_120a"), by_name.cubin("sm_120a")
    assert [op for op in opcodes(source) if op.startswith("QMMA")] == ["QMMA.SF.16832.F32.E2M3.E4M3.E8"]
    assert opcodes(source) == opcodes(name)
    assert source.spills == source.stack == name.spills == name.stack == 0
    assert source.registers == name.registers


def test_both_ways_compute_the_same():
    rng = np.random.default_rng(3)
    a = rng.integers(0, 64, (32, 16)).astype(np.uint8).view(np.uint32)              # e2m3 codes, one a byte
    b = rng.integers(0, 0x7E, (32, 16)).astype(np.uint8).view(np.uint32)            # e4m3 codes and scale words
    b[:, 2:] = rng.integers(120, 134, (32, 2))
    outs = []
    for made in (by_source, by_name):
        out = np.zeros(32, np.float32)
        emulator.launch(emulator.load(made.ptx("sm_120a")), (1, 1, 1), (32, 1, 1), [a, b, out], unwritten=[out])
        outs.append(out)
    assert np.isfinite(outs[0]).all() and outs[0].any() and (outs[0] == outs[1]).all()


def test_cuda_source_that_does_not_compile_shows_the_log():
    with pytest.raises(nvrtc.SourceError, match='identifier "nonsense" is undefined'):
        nvrtc.ltoir('extern "C" __device__ int f() { return nonsense; }', "sm_90a")
