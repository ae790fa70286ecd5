"""wgmma: shared-memory layouts with every swizzle, A in registers, and the rules of its asynchrony.

Operands are put into shared memory by the PTX ISA's description of the layouts (and CUTLASS's canonical forms), one
element at a time, by formulas of this file.
"""
import ml_dtypes
import numpy as np
import pytest

from ptx_text import kernel, run
from qwentin.kernels.emulator import Fault, Unsupported, launch, load

rng = np.random.default_rng(17)
TYPES = {"e4m3": (ml_dtypes.float8_e4m3fn, 1, 32), "e5m2": (ml_dtypes.float8_e5m2, 1, 32),
         "f16": (np.float16, 2, 16), "bf16": (ml_dtypes.bfloat16, 2, 16)}
WIDTH = {0: 16, 1: 128, 2: 64, 3: 32}                                   # bytes of a row of an atom, by swizzle mode
A_AT, B_AT = 0, 32768                                                    # offsets within the tile, 1024-byte aligned


def swizzled(address, mode):
    """Swizzle<bits, 4, 3>: bits 4.. of an address are xored with its bits 7.."""
    bits = {0: 0, 1: 3, 2: 2, 3: 1}[mode]
    return address ^ (address >> 7 & (1 << bits) - 1) << 4


def k_major(row, column_byte, mode, rows):
    """Atoms of 8 rows x WIDTH bytes, down the rows first; without swizzle two columns of atoms make one k step."""
    if mode == 0:
        return (row // 8) * 128 + (column_byte // 16) * rows * 16 + (row % 8) * 16 + column_byte % 16
    return swizzled((row // 8) * 8 * WIDTH[mode] + (row % 8) * WIDTH[mode] + column_byte, mode)


def mn_major(row, k, mode, rows):
    """Halves with the row index running fastest: atoms of 8 k x WIDTH bytes of rows."""
    across = WIDTH[mode] // 2
    atom = 8 * WIDTH[mode]
    if mode == 0:                                                        # rows' atoms stride by SBO, k's by LBO
        return (row // 8) * atom + (k // 8) * (rows // 8) * atom + (k % 8) * 16 + 2 * (row % 8)
    return swizzled((row // across) * atom * 2 + (k // 8) * atom + (k % 8) * WIDTH[mode] + 2 * (row % across), mode)


def image(matrix, mode, transposed):
    """(bytes, leading offset, stride offset) of a matrix [rows, k] laid out for a descriptor."""
    rows, k = matrix.shape
    size = matrix.itemsize
    raw = np.zeros(32768, np.uint8)
    for r in range(rows):
        for c in range(k):
            at = mn_major(r, c, mode, rows) if transposed else k_major(r, c * size, mode, rows)
            raw[at:at + size] = np.frombuffer(matrix[r, c].tobytes(), np.uint8)
    if transposed:
        atom = 8 * WIDTH[mode]
        return raw, *(((rows // 8) * atom, atom) if mode == 0 else (2 * atom, atom))
    return raw, *((rows * 16, 128) if mode == 0 else (16, 8 * WIDTH[mode]))


def descriptor(offset, leading, stride, mode):
    """What the kernel adds the tile's address / 16 to."""
    return offset >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62


def place_d(thread, register):
    """(row, column) of an accumulator register, by the ISA's figure for the m64nN fragment."""
    lane, warp = thread % 32, thread // 32
    return 16 * warp + lane // 4 + 8 * (register % 4 // 2), 8 * (register // 4) + 2 * (lane % 4) + register % 2


TILE = ".extern .shared .align 1024 .b8 tile[];"
COPY_IN = """
    mov.u32 %r200, %tid.x; ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd1, %r200, 16, %rd1;
    mov.u32 %r201, tile; add.u32 %r201, %r201, 1023; and.b32 %r201, %r201, 0xfffffc00;
    mad.lo.u32 %r202, %r200, 16, %r201; mov.u32 %r203, 0;
COPY: ld.global.v4.u32 {%r210, %r211, %r212, %r213}, [%rd1]; st.shared.v4.u32 [%r202], {%r210, %r211, %r212, %r213};
    add.u64 %rd1, %rd1, 2048; add.u32 %r202, %r202, 2048; add.u32 %r203, %r203, 2048;
    setp.lt.u32 %p1, %r203, 65536; @%p1 bra COPY;
"""
FENCE = "fence.proxy.async.shared::cta;\n bar.sync 0;\n"
ADDRESS = "shr.u32 %r204, %r201, 4; cvt.u64.u32 %rd10, %r204; ld.param.u64 %rd11, [p2]; add.u64 %rd11, %rd11, %rd10;" \
          "ld.param.u64 %rd12, [p3]; add.u64 %rd12, %rd12, %rd10;\n"


def body(n, text, copy=COPY_IN + FENCE, before="wgmma.fence.sync.aligned;", finish=None, out=True):
    """Copy the tile in, start accumulators (%f0 .., in the text {d}) at 1, multiply, wait, store."""
    d = "{" + ", ".join(f"%f{i}" for i in range(n // 2)) + "}"
    finish = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" if finish is None else finish
    start = "\n".join(f"mov.f32 %f{i}, 0f3F800000;" for i in range(n // 2))
    stores = "\n".join(f"st.global.f32 [%rd3+{4 * i}], %f{i};" for i in range(n // 2)) if out else ""
    return (copy + ADDRESS + start + "\n" + before + text.replace("{d}", d) + finish +
            f"ld.param.u64 %rd3, [p1]; mad.wide.u32 %rd3, %r200, {2 * n}, %rd3;\n" + stores)


PARAMS = ("u64", "u64", "u64", "u64")


def multiply(a, b, n, kinds, modes, transposed=(0, 0), tail=None, **options):
    """D [64, n] of wgmma on operands laid out in shared memory."""
    (raw_a, *offsets_a), (raw_b, *offsets_b) = image(a, modes[0], transposed[0]), image(b, modes[1], transposed[1])
    out = np.zeros((128, n // 2), np.float32)
    k = TYPES[kinds[0]][2]
    tail = tail or ("p, 1, 1" + (f", {transposed[0]}, {transposed[1]}" if k == 16 else ""))
    text = (f"{{ .reg .pred p; setp.ne.u32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kinds[0]}.{kinds[1]} "
            f"{{d}}, %rd11, %rd12, {tail}; }}")
    tile = np.concatenate([raw_a, raw_b])
    args = [tile, out, np.uint64(descriptor(A_AT, *offsets_a, modes[0])),
            np.uint64(descriptor(B_AT, *offsets_b, modes[1]))]
    run(body(n, text), *args, params=PARAMS, block=128, static=TILE, shared_bytes=65536 + 1024, **options)
    d = np.zeros((64, n))
    for thread in range(128):
        for register in range(n // 2):
            d[place_d(thread, register)] = out[thread, register]
    return d


def matrices(kinds, n):
    k = TYPES[kinds[0]][2]
    a, b = ((rng.standard_normal(s) * 2).astype(TYPES[t][0]) for s, t in (((64, k), kinds[0]), ((n, k), kinds[1])))
    return a, b, a.astype(float) @ b.astype(float).T


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=2.0 ** -23, atol=1e-12 * np.abs(want).max())


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("mode", WIDTH)
def test_k_major(kind, mode):
    a, b, want = matrices((kind, kind), 24)
    close(multiply(a, b, 24, (kind, kind), (mode, mode)), want + 1)


@pytest.mark.parametrize("modes", [(1, 3), (0, 2), (3, 0)])
def test_operands_may_differ_in_swizzle_and_type(modes):
    a, b, want = matrices(("e5m2", "e4m3"), 8)
    close(multiply(a, b, 8, ("e5m2", "e4m3"), modes), want + 1)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("mode", WIDTH)
@pytest.mark.parametrize("transposed", [(1, 0), (0, 1), (1, 1)])
def test_mn_major(kind, mode, transposed):
    a, b, want = matrices((kind, kind), 64)
    close(multiply(a, b, 64, (kind, kind), (mode, mode), transposed), want + 1)


def test_scale_d_and_signs():
    a, b, want = matrices(("f16", "f16"), 8)
    close(multiply(a, b, 8, ("f16", "f16"), (1, 1), tail="!p, 1, 1, 0, 0".replace("!p", "0")), want)
    close(multiply(a, b, 8, ("f16", "f16"), (1, 1), tail="p, -1, 1, 0, 0"), 1 - want)


def test_a_step_along_k_inside_a_swizzled_atom():
    """A 128-byte atom holds four k steps of bytes; the descriptor's start moves 32 bytes a step."""
    k = 128
    a, b = (rng.standard_normal((r, k)).astype(TYPES["e4m3"][0]) for r in (64, 8))
    (raw_a, *oa), (raw_b, *ob) = image(a, 1, 0), image(b, 1, 0)
    out = np.zeros((128, 4), np.float32)
    text = 4 * ("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {d}, %rd11, %rd12, 1, 1, 1;"
                "add.u64 %rd11, %rd11, 2; add.u64 %rd12, %rd12, 2;")
    run(body(8, text), np.concatenate([raw_a, raw_b]), out, np.uint64(descriptor(A_AT, *oa, 1)),
        np.uint64(descriptor(B_AT, *ob, 1)), params=PARAMS, block=128, static=TILE, shared_bytes=65536 + 1024)
    want = a.astype(float) @ b.astype(float).T + 1
    got = np.array([[out[t, i] for i in range(4)] for t in range(128)])
    for t in range(128):
        for i in range(4):
            assert abs(got[t, i] - want[place_d(t, i)]) <= 2.0 ** -20 * np.abs(want).max()


@pytest.mark.parametrize("kind, transposed", [("e4m3", 0), ("f16", 0), ("f16", 1), ("bf16", 1)])
def test_a_from_registers(kind, transposed):
    """The fragment of mma.sync, warp w holding rows 16 w .. 16 w + 15 (the ISA's figure for A in registers)."""
    dtype, size, k = TYPES[kind]
    a, b, want = matrices((kind, kind), 64)
    per = 4 // size
    words = np.zeros((128, 4), np.uint32)
    for t in range(128):
        lane, warp = t % 32, t // 32
        for j in range(4):
            row, first = 16 * warp + lane // 4 + 8 * (j % 2), per * (lane % 4) + (k // 2) * (j // 2)
            words[t, j] = np.frombuffer(a[row, first:first + per].tobytes(), np.uint32)[0]
    raw_b, *ob = image(b, 1, transposed)
    tile = np.concatenate([np.zeros(32768, np.uint8), raw_b])
    tile[:2048] = words.view(np.uint8).ravel()
    out = np.zeros((128, 32), np.float32)
    major = f", {transposed}" if k == 16 else ""
    text = (f"wgmma.mma_async.sync.aligned.m64n64k{k}.f32.{kind}.{kind} {{d}}, {{%r1, %r2, %r3, %r4}}, %rd12, "
            f"1, 1, 1{major};")
    fetch = ("mad.lo.u32 %r205, %r200, 16, %r201; ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [%r205];"
             "wgmma.fence.sync.aligned;\n")
    run(body(64, text, before=fetch), tile, out, np.uint64(0), np.uint64(descriptor(B_AT, *ob, 1)), params=PARAMS,
        block=128, static=TILE, shared_bytes=65536 + 1024)
    d = np.zeros((64, 64))
    for t in range(128):
        for i in range(32):
            d[place_d(t, i)] = out[t, i]
    close(d, want + 1)


# ------------------------------------------------------------------------------------------- what can be wrong
TEXT = "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {d}, %rd11, %rd12, 1, 1, 1;"
LAYOUT = np.uint64(descriptor(A_AT, 16, 1024, 1)), np.uint64(descriptor(B_AT, 16, 1024, 1))


def wrong(message, text=TEXT, schedule=None, descriptors=LAYOUT, block=128, **parts):
    tile, out = np.zeros(65536, np.uint8), np.zeros((block, 4), np.float32)
    with pytest.raises(Fault, match=message) as caught:
        run(body(8, text, **parts), tile, out, *descriptors, params=PARAMS, block=block, static=TILE,
            shared_bytes=65536 + 1024, schedule=schedule)
    return caught.value


@pytest.mark.parametrize("schedule", [None, 1, 2])
def test_the_kernel_these_faults_are_planted_in_is_right(schedule):
    tile, out = np.zeros(65536, np.uint8), np.zeros((128, 4), np.float32)
    run(body(8, TEXT), tile, out, *LAYOUT, params=PARAMS, block=128, static=TILE, shared_bytes=66560, schedule=schedule)
    assert (out == 1).all()


def test_missing_proxy_fence():
    fault = wrong("no fence.proxy.async in between", copy=COPY_IN + "bar.sync 0;\n")
    assert fault.instruction.startswith("wgmma.mma_async")


def test_a_proxy_fence_after_the_barrier_by_the_reader_is_enough():
    tile, out = np.zeros(65536, np.uint8), np.zeros((128, 4), np.float32)
    run(body(8, TEXT, copy=COPY_IN + "bar.sync 0; fence.proxy.async;\n"), tile, out, *LAYOUT, params=PARAMS, block=128,
        static=TILE, shared_bytes=66560)
    assert (out == 1).all()


def test_missing_barrier_before_wgmma():
    wrong("wgmma: race: read here, written by thread", copy=COPY_IN + "fence.proxy.async;\n")


def test_missing_wgmma_fence():
    wrong("the first wgmma needs a wgmma.fence", before="")
    assert "no wgmma.fence in between" in str(wrong(
        "written with no wgmma.fence", text=TEXT + "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
        "add.f32 %f0, %f0, %f1;" + TEXT))


def test_accumulators_read_before_the_wait():
    fault = wrong("uses the accumulator of a wgmma in flight", finish="wgmma.commit_group.sync.aligned;")
    assert fault.instruction.startswith("st.global.f32")
    wrong("uses the accumulator of a wgmma in flight",
          finish="wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;")
    wrong("uses the accumulator", finish="wgmma.wait_group.sync.aligned 0;")              # never committed


def test_accumulators_may_be_renamed_while_in_flight():
    """numba's tied operands put `mov`s between the wgmmas of a chain; a read of the copy is still a read."""
    rename = "mov.f32 %f100, %f0; mov.f32 %f0, %f100;"
    tile, out = np.zeros(65536, np.uint8), np.zeros((128, 4), np.float32)
    run(body(8, TEXT + rename + TEXT), tile, out, *LAYOUT, params=PARAMS, block=128, static=TILE, shared_bytes=66560)
    wrong("uses the accumulator of a wgmma in flight", text=TEXT + "mov.f32 %f100, %f0; add.f32 %f101, %f100, %f100;")


def test_registers_overwritten_in_flight():
    text = TEXT.replace("%rd11", "{%r1, %r2, %r3, %r4}")
    zero = "mov.u32 %r1, 0; mov.u32 %r2, 0; mov.u32 %r3, 0; mov.u32 %r4, 0; wgmma.fence.sync.aligned;"
    wrong("overwrites a register that a wgmma in flight uses", text=text + "add.u32 %r1, %r200, 1;", before=zero)


def test_a_stage_overwritten_while_wgmma_reads_it():
    late = "wgmma.commit_group.sync.aligned; st.shared.u32 [%r201], %r200; wgmma.wait_group.sync.aligned 0;"
    wrong("overwritten while an asynchronous operation may still read it", finish=late)


def test_a_stage_overwritten_after_the_wait_of_another_warp():
    late = ("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
            "setp.eq.u32 %p2, %r200, 127; @%p2 st.shared.u32 [%r201], %r200;")
    wrong("race: written here, read by another thread", finish=late)


def test_descriptors_are_checked():
    wrong("outside shared memory", descriptors=(np.uint64(descriptor(0, 16, 1024, 1) + 0x1100), LAYOUT[1]))
    wrong("base offset", descriptors=(LAYOUT[0] | np.uint64(1 << 49), LAYOUT[1]))
    text = "cvt.u64.u32 %rd13, %r200; and.b64 %rd13, %rd13, 64; add.u64 %rd11, %rd11, %rd13;" + TEXT
    wrong("differs within the warpgroup", text=text)


def test_half_a_warpgroup_is_not_enough():
    guard = "setp.lt.u32 %p3, %r200, 64; @!%p3 bra SKIP;"
    wrong("needs all 128 lanes of its warpgroup", text=guard + TEXT + "SKIP:")
    wrong("warpgroup", block=96)


@pytest.mark.parametrize("text", ["wgmma.mma_async.sync.aligned.m64n8k32.f32.e2m3.e4m3 {d}, %rd11, %rd12, 1, 1, 1;",
                                  "wgmma.mma_async.sync.aligned.m64n8k16.f32.e4m3.e4m3 {d}, %rd11, %rd12, 1, 1, 1;",
                                  "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {d}, %rd11, %rd12, 1, 1, 1;"])
def test_forms_that_are_not_known(text):
    with pytest.raises(Unsupported):
        launch(load(kernel(body(8, text), PARAMS, TILE)), 1, 128, [])


# ------------------------------------------------------------------------------------------- a whole pipeline
def pipeline(rounds, wait="mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r24], %r22; @!%p5 bra FULL;",
             release="mbarrier.arrive.shared::cta.b64 _, [%r24+16];", pending=0):
    """Two warpgroups of consumers and one warp of producers: bulk copies into a ring of two stages, wgmma out of it.

    A stage holds A [128, 32] and B [8, 32], e4m3, laid out without swizzle (4096 + 256 bytes)."""
    return f"""
    mov.u32 %r1, %tid.x; mov.u32 %r2, tile; mov.u32 %r3, bar; ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];
    setp.eq.u32 %p1, %r1, 256; setp.ge.u32 %p2, %r1, 256; mov.u32 %r20, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r3], 1;      @%p1 mbarrier.init.shared::cta.b64 [%r3+8], 1;
    @%p1 mbarrier.init.shared::cta.b64 [%r3+16], 256; @%p1 mbarrier.init.shared::cta.b64 [%r3+24], 256; bar.sync 0;
    @!%p2 bra CONSUME; @!%p1 bra OUT;
PRODUCE: and.b32 %r21, %r20, 1; shr.u32 %r22, %r20, 1; and.b32 %r22, %r22, 1; xor.b32 %r23, %r22, 1;
    mad.lo.u32 %r24, %r21, 8, %r3; mad.lo.u32 %r25, %r21, 4352, %r2;
EMPTY: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r24+16], %r23; @!%p5 bra EMPTY;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r24], 4352;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r25], [%rd1], 4352, [%r24];
    add.u64 %rd1, %rd1, 4352; add.u32 %r20, %r20, 1; setp.lt.u32 %p6, %r20, {rounds}; @%p6 bra PRODUCE; bra OUT;
CONSUME: shr.u32 %r30, %r1, 7; mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
    mov.u64 %rd20, {descriptor(0, 2048, 128, 0)}; mov.u64 %rd21, {descriptor(0, 128, 128, 0)};
AGAIN: and.b32 %r21, %r20, 1; shr.u32 %r22, %r20, 1; and.b32 %r22, %r22, 1; mad.lo.u32 %r24, %r21, 8, %r3;
    mad.lo.u32 %r25, %r21, 4352, %r2; mad.lo.u32 %r26, %r30, 1024, %r25; shr.u32 %r26, %r26, 4;
    cvt.u64.u32 %rd11, %r26; add.u64 %rd11, %rd11, %rd20;
    add.u32 %r27, %r25, 4096; shr.u32 %r27, %r27, 4; cvt.u64.u32 %rd12, %r27; add.u64 %rd12, %rd12, %rd21;
FULL: {wait}
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {{%f0, %f1, %f2, %f3}}, %rd11, %rd12, 1, 1, 1;
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned {pending};
    {release}
    add.u32 %r20, %r20, 1; setp.lt.u32 %p6, %r20, {rounds}; @%p6 bra AGAIN;
    wgmma.wait_group.sync.aligned 0;
    mad.wide.u32 %rd5, %r1, 16, %rd2; st.global.v4.f32 [%rd5], {{%f0, %f1, %f2, %f3}};
OUT:"""


def stages(rounds):
    """(bytes of all stages, float64 product) of random A [128, 32 rounds], B [8, 32 rounds]."""
    a, b = (rng.standard_normal((r, 32 * rounds)).astype(TYPES["e4m3"][0]) for r in (128, 8))
    out = []
    for s in range(rounds):
        for m in (a, b):
            part = m[:, 32 * s:32 * s + 32].view(np.uint8)
            raw = np.zeros(part.size, np.uint8)
            for (r, c), byte in np.ndenumerate(part):
                raw[k_major(r, c, 0, len(m))] = byte
            out.append(raw)
    return np.concatenate(out), a.astype(float) @ b.astype(float).T


RING = ".shared .align 128 .b8 tile[8704];\n.shared .align 8 .b8 bar[32];"


@pytest.mark.parametrize("schedule", [None, 1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_a_pipeline_of_bulk_copies_and_wgmma(rounds, schedule):
    data, want = stages(rounds)
    out = np.full((256, 4), np.nan, np.float32)
    run(pipeline(rounds), data, out, block=288, static=RING, schedule=schedule, unwritten=[out])
    got = np.zeros((128, 8))
    for t in range(256):
        for i in range(4):
            row, column = place_d(t % 128, i)
            got[64 * (t // 128) + row, column] = out[t, i]
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("fault, parts", [
    ("has not seen complete|in flight|that nothing wrote", dict(wait="")),
    ("overwritten while an asynchronous operation may still read it", dict(pending=1)),
    ("deadlock: waits for an mbarrier phase", dict(release="")),
    ("deadlock: waits for an mbarrier phase", dict(release="@%p2 mbarrier.arrive.shared::cta.b64 _, [%r24+16];"))])
def test_faults_planted_in_the_pipeline(fault, parts):
    data, _ = stages(5)
    for schedule in (None, 1, 2):
        with pytest.raises(Fault, match=fault):
            run(pipeline(5, **parts), data, np.zeros((256, 4), np.float32), block=288, static=RING, schedule=schedule)
