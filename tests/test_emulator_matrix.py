"""mma, ldmatrix, stmatrix against the PTX ISA's fragment tables, written out element by element.

The tables below are the ISA's own formulas ("Matrix fragments for mma.m16n8k..", with groupID = laneid >> 2 and
threadID_in_group = laneid % 4), in its way of counting elements a0, a1, ... through a lane's registers; they share
nothing with the emulator's reshapes.
"""
import ml_dtypes
import numpy as np
import pytest

from ptx_text import run
from qwentin.kernels.emulator import Fault, Unsupported

rng = np.random.default_rng(11)
LANES = range(32)
HALF = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
BYTE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m3": ml_dtypes.float6_e2m3fn,
        "e3m2": ml_dtypes.float6_e3m2fn, "e2m1": ml_dtypes.float4_e2m1fn}
BITS = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}


def place_a(k, lane, i):
    """(row, column) of A's element a_i."""
    group, thread = lane >> 2, lane % 4
    if k == 8:                                                           # m16n8k8, tf32
        return group + 8 * (i in (1, 3)), thread + 4 * (i >= 2)
    if k == 16:                                                          # m16n8k16, halves
        row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
        return row, thread * 2 + (i & 1) + (8 if i >= 4 else 0)
    if k == 32:                                                          # m16n8k32, bytes
        row = group if 0 <= i < 4 or 8 <= i < 12 else group + 8
        return row, thread * 4 + (i & 3) + (16 if i >= 8 else 0)
    row = group if 0 <= i < 8 or 16 <= i < 24 else group + 8             # m16n8k64, nibbles
    return row, thread * 8 + (i & 7) + (32 if i >= 16 else 0)


def place_b(k, lane, i):
    """(row, column) of B's element b_i."""
    group, thread = lane >> 2, lane % 4
    if k == 8:
        return thread + 4 * i, group
    if k == 16:
        return thread * 2 + (i & 1) + (8 if i >= 2 else 0), group
    if k == 32:
        return thread * 4 + (i & 3) + (16 if i >= 4 else 0), group
    return thread * 8 + (i & 7) + (32 if i >= 8 else 0), group


def place_c(lane, i):
    """(row, column) of C's and D's element c_i."""
    return (lane >> 2) + (8 if i >= 2 else 0), (lane % 4) * 2 + (i & 1)


def registers(codes, place, k, per_word, bits, shift=0):
    """[32, n] u32: each lane's registers, filled from a matrix of codes by a place formula."""
    n = (4 if codes.shape[0] == 16 and place is place_a else 2)
    out = np.zeros((32, n), np.uint32)
    for lane in LANES:
        for i in range(n * per_word):
            row, column = place(k, lane, i)
            out[lane, i // per_word] |= np.uint32(int(codes[row, column]) << shift << bits * (i % per_word))
    return out


def result(d):
    """The 16 x 8 matrix of a [32, 4] array of D registers."""
    out = np.zeros((16, 8), d.dtype)
    for lane in LANES:
        for i in range(4):
            out[place_c(lane, i)] = d[lane, i]
    return out


LOAD = """
    mov.u32 %r200, %laneid;
    ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd1, %r200, 16, %rd1; ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
    ld.param.u64 %rd2, [p1]; mad.wide.u32 %rd2, %r200, 8, %rd2; ld.global.v2.b32 {%r5, %r6}, [%rd2];
    ld.param.u64 %rd3, [p2]; mad.wide.u32 %rd3, %r200, 16, %rd3; ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd3];
    ld.param.u64 %rd4, [p3]; mad.wide.u32 %rd4, %r200, 16, %rd4;
"""
STORE = "\n    st.global.v4.f32 [%rd4], {%f5, %f6, %f7, %f8};"
OPERANDS = "{%f5, %f6, %f7, %f8}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f1, %f2, %f3, %f4}"


def multiply(text, a, b, c, extra="", load=""):
    """Run one mma on register arrays a [32, 4], b [32, 2] and a matrix c [16, 8] -> D."""
    out = np.zeros((32, 4), np.float32)
    lanes_c = np.array([[c[place_c(lane, i)] for i in range(4)] for lane in LANES], np.float32)
    arrays = [a, b, lanes_c, out]
    run(LOAD + load + f"    {text} {OPERANDS}{extra};" + STORE, *arrays)
    return result(out)


def codes_of(kind, shape):
    """Random codes without NaN or infinity, and their values."""
    codes = rng.integers(0, 1 << BITS[kind], shape, dtype=np.uint8)
    bad = ~np.isfinite(codes.view(BYTE[kind]).astype(np.float32))
    codes[bad] = 1
    return codes, codes.view(BYTE[kind]).astype(np.float64)


def close(got, want, terms):
    """Equal up to the one rounding to float32; float64 sums of `terms` products err far less."""
    np.testing.assert_allclose(got, want, rtol=2.0 ** -24 * 1.01, atol=terms * 2.0 ** -52 * np.abs(want).max())


@pytest.mark.parametrize("kind", HALF)
def test_halves(kind):
    A, B, c = (rng.standard_normal(s).astype(HALF[kind]) for s in ((16, 16), (16, 8), (16, 8)))
    a = registers(A.view(np.uint16), place_a, 16, 2, 16)
    b = registers(B.view(np.uint16), place_b, 16, 2, 16)
    got = multiply(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32", a, b, c.astype(np.float32))
    close(got, A.astype(float) @ B.astype(float) + c.astype(float), 16)


def test_half_accumulators():
    A, B, c = (rng.standard_normal(s).astype(np.float16) for s in ((16, 16), (16, 8), (16, 8)))
    a, b = registers(A.view(np.uint16), place_a, 16, 2, 16), registers(B.view(np.uint16), place_b, 16, 2, 16)
    cc = np.array([[c[place_c(lane, i)] for i in range(4)] for lane in LANES], np.float16)
    out = np.zeros((32, 4), np.float16)
    run("""
    mov.u32 %r200, %laneid;
    ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd1, %r200, 16, %rd1; ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
    ld.param.u64 %rd2, [p1]; mad.wide.u32 %rd2, %r200, 8, %rd2; ld.global.v2.b32 {%r5, %r6}, [%rd2];
    ld.param.u64 %rd3, [p2]; mad.wide.u32 %rd3, %r200, 8, %rd3; ld.global.v2.b32 {%r7, %r8}, [%rd3];
    mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r9, %r10}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%r7, %r8};
    ld.param.u64 %rd4, [p3]; mad.wide.u32 %rd4, %r200, 8, %rd4; st.global.v2.b32 [%rd4], {%r9, %r10};""", a, b, cc, out)
    want = (A.astype(float) @ B.astype(float) + c.astype(float)).astype(np.float16)
    np.testing.assert_array_equal(result(out), want)


def test_tf32():
    A, B = (rng.standard_normal(s).astype(np.float32) for s in ((16, 8), (8, 8)))
    a = registers(A.view(np.uint32), place_a, 8, 1, 32)
    b = registers(B.view(np.uint32), place_b, 8, 1, 32)
    short = lambda x: (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(float)
    got = multiply("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", a, b, np.zeros((16, 8)))
    close(got, short(A) @ short(B), 8)


@pytest.mark.parametrize("at, bt", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
def test_bytes(at, bt):
    (acodes, A), (bcodes, B) = codes_of(at, (16, 32)), codes_of(bt, (32, 8))
    got = multiply(f"mma.sync.aligned.m16n8k32.row.col.f32.{at}.{bt}.f32", registers(acodes, place_a, 32, 4, 8),
                   registers(bcodes, place_b, 32, 4, 8), np.ones((16, 8)))
    close(got, A @ B + 1, 32)


def shift_of(kind):
    """Where a code sits in its byte: fp4 in bits 2..5, the others from bit 0."""
    return 2 if kind == "e2m1" else 0


@pytest.mark.parametrize("at", BYTE)
@pytest.mark.parametrize("bt", BYTE)
def test_unscaled_small_formats(at, bt):
    (acodes, A), (bcodes, B) = codes_of(at, (16, 32)), codes_of(bt, (32, 8))
    got = multiply(f"mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f32.{at}.{bt}.f32",
                   registers(acodes, place_a, 32, 4, 8, shift_of(at)),
                   registers(bcodes, place_b, 32, 4, 8, shift_of(bt)), np.zeros((16, 8)))
    close(got, A @ B, 32)


@pytest.mark.parametrize("wrong", [
    lambda a, b: (a[:, [0, 2, 1, 3]], b),                                # row half and k half of A confused
    lambda a, b: (a, b[:, ::-1]),                                        # k halves of B
    lambda a, b: (np.roll(a, 1, 0), b), lambda a, b: (a, np.roll(b, 4, 0)),      # lanes
    lambda a, b: (a.byteswap(), b)])                                     # elements of a register
def test_a_wrong_fragment_map_shows(wrong):
    (acodes, A), (bcodes, B) = codes_of("e4m3", (16, 32)), codes_of("e4m3", (32, 8))
    right = registers(acodes, place_a, 32, 4, 8), registers(bcodes, place_b, 32, 4, 8)
    a, b = (np.ascontiguousarray(x) for x in wrong(*right))
    got = multiply("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", a, b, np.zeros((16, 8)))
    assert (got != (A @ B).astype(np.float32)).mean() > 0.5


# --------------------------------------------------------------------------------------------- block scaling
LOAD_SCALES = """
    ld.param.u64 %rd5, [p4]; mad.wide.u32 %rd5, %r200, 4, %rd5; ld.global.b32 %r10, [%rd5];
    ld.param.u64 %rd6, [p5]; mad.wide.u32 %rd6, %r200, 4, %rd6; ld.global.b32 %r11, [%rd6];
"""


def scaled(text, a, b, words_a, words_b, select_a, select_b):
    out = np.zeros((32, 4), np.float32)
    selectors = f"{{%r10}}, {{{select_a[0]}, {select_a[1]}}}, {{%r11}}, {{{select_b[0]}, {select_b[1]}}}"
    run(LOAD + LOAD_SCALES + f"    {text} {OPERANDS}, {selectors};" + STORE,
        a, b, np.zeros((32, 4), np.float32), out, words_a, words_b)
    return result(out)


def scale_words(exponents):
    """Four ue8m0 bytes a lane, of [32, 4] exponents."""
    return (np.asarray(exponents) + 127).astype(np.uint8).view(np.uint32).ravel()


def lane_of_row(row, thread_id):
    """Which lane holds the scale of A's row: in the quad of rows m and m + 8, the pair {2 t, 2 t + 1}; its first
    lane has row m and its second row m + 8."""
    return 4 * (row % 8) + 2 * thread_id + row // 8


def lane_of_column(column, thread_id):
    return 4 * column + thread_id


MXF8F6F4 = "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.{}.{}.f32.ue8m0"


@pytest.mark.parametrize("at, bt", [("e2m3", "e4m3"), ("e3m2", "e5m2"), ("e2m1", "e2m1"), ("e4m3", "e2m3")])
@pytest.mark.parametrize("select_a, select_b", [((0, 0), (0, 0)), ((3, 1), (2, 3)), ((1, 0), (0, 2)), ((2, 1), (3, 1))])
def test_one_scale_a_row(at, bt, select_a, select_b):
    (acodes, A), (bcodes, B) = codes_of(at, (16, 32)), codes_of(bt, (32, 8))
    ea, eb = rng.integers(-20, 20, (32, 4)), rng.integers(-20, 20, (32, 4))
    got = scaled(MXF8F6F4.format(at, bt), registers(acodes, place_a, 32, 4, 8, shift_of(at)),
                 registers(bcodes, place_b, 32, 4, 8, shift_of(bt)), scale_words(ea), scale_words(eb),
                 select_a, select_b)
    sa = np.array([2.0 ** ea[lane_of_row(m, select_a[1]), select_a[0]] for m in range(16)])
    sb = np.array([2.0 ** eb[lane_of_column(n, select_b[1]), select_b[0]] for n in range(8)])
    close(got, (A @ B) * sa[:, None] * sb[None, :], 32)


def test_every_scale_byte_counts_for_exactly_its_row_or_column():
    """All scales are 1 but one byte of one lane, which is 2: which outputs double says which it scales."""
    ones_a, ones_b = np.full((32, 4), 0x38383838, np.uint32), np.full((32, 2), 0x38383838, np.uint32)     # e4m3 1.0
    neutral = np.zeros((32, 4), int)
    for operand in "ab":
        for lane in LANES:
            for byte in (0, 2):
                e = neutral.copy()
                e[lane, byte] = 1
                words = scale_words(e), scale_words(neutral)
                for thread in range(2 if operand == "a" else 4):
                    select = ((byte, thread), (0, 0)) if operand == "a" else ((0, 0), (byte, thread))
                    got = scaled(MXF8F6F4.format("e4m3", "e4m3"), ones_a, ones_b,
                                 *(words if operand == "a" else words[::-1]), *select)
                    want = np.full((16, 8), 32.0)
                    quad, place = lane // 4, lane % 4
                    if operand == "a" and place // 2 == thread:
                        want[quad + 8 * (place % 2)] *= 2
                    if operand == "b" and place == thread:
                        want[:, quad] *= 2
                    np.testing.assert_array_equal(got, want)


def test_extreme_scales_and_nan():
    """2^127 times 2^-127 is 1, the NaN code poisons its row alone, and all 64 e2m3 codes pass exactly."""
    acodes = np.resize(np.arange(64, dtype=np.uint8), (16, 32))
    A = acodes.view(BYTE["e2m3"]).astype(float)
    bcodes, B = codes_of("e4m3", (32, 8))
    ea, eb = np.full((32, 4), 127), np.full((32, 4), -127)
    words_a = scale_words(ea).view(np.uint8).reshape(32, 4)
    words_a[lane_of_row(9, 0), 0] = 255
    got = scaled(MXF8F6F4.format("e2m3", "e4m3"), registers(acodes, place_a, 32, 4, 8),
                 registers(bcodes, place_b, 32, 4, 8), words_a.view(np.uint32).ravel(), scale_words(eb), (0, 0), (0, 0))
    want = A @ B
    want[9] = np.nan
    close(got[np.arange(16) != 9], want[np.arange(16) != 9], 32)
    assert np.isnan(got[9]).all()


@pytest.mark.parametrize("kind, chunks, scale", [("mxf4", 2, "ue8m0"), ("mxf4nvf4", 2, "ue8m0"),
                                                 ("mxf4nvf4", 4, "ue8m0"), ("mxf4nvf4", 4, "ue4m3")])
@pytest.mark.parametrize("half", [0, 1])
def test_fp4_with_several_scales_a_row(kind, chunks, scale, half):
    (acodes, A), (bcodes, B) = codes_of("e2m1", (16, 64)), codes_of("e2m1", (64, 8))
    byte = 2 * half if chunks == 2 else 0
    select_a, select_b = (byte, half), (byte, 3 * half)
    if scale == "ue8m0":
        ea, eb = rng.integers(-9, 9, (32, 4)), rng.integers(-9, 9, (32, 4))
        words, values = (scale_words(ea), scale_words(eb)), (2.0 ** ea, 2.0 ** eb)
    else:
        raw = [rng.integers(0, 0x7F, (32, 4), dtype=np.uint8) for _ in range(2)]
        words = [r.view(np.uint32).ravel() for r in raw]
        values = [r.view(BYTE["e4m3"]).astype(float) for r in raw]
    text = f"mma.sync.aligned.kind::{kind}.block_scale.scale_vec::{chunks}X.m16n8k64.row.col.f32.e2m1.e2m1.f32.{scale}"
    got = scaled(text, registers(acodes, place_a, 64, 8, 4), registers(bcodes, place_b, 64, 8, 4), *words,
                 select_a, select_b)
    want = np.zeros((16, 8))
    for m in range(16):
        for n in range(8):
            for k in range(64):
                chunk = byte + k * chunks // 64
                want[m, n] += (A[m, k] * values[0][lane_of_row(m, select_a[1]), chunk]
                               * B[k, n] * values[1][lane_of_column(n, select_b[1]), chunk])
    close(got, want, 64)


@pytest.mark.parametrize("select_a, select_b, message", [
    ((0, 2), (0, 0), "thread-id-a 2"), ((0, 0), (4, 0), "byte-id-b 4"), ((0, 0), (0, 4), "thread-id-b 4")])
def test_selectors_out_of_range(select_a, select_b, message):
    zero = [np.zeros((32, n), np.uint32) for n in (4, 2, 1, 1)]
    with pytest.raises(Fault, match=message):
        scaled(MXF8F6F4.format("e4m3", "e4m3"), *zero, select_a, select_b)


@pytest.mark.parametrize("text", [
    "mma.sync.aligned.m16n8k32.row.col.f32.e2m3.e2m3.f32",                                    # needs kind::f8f6f4
    "mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32", "mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32",
    "mma.sync.aligned.m16n8k16.row.col.f32.s8.s8.f32"])
def test_combinations_that_the_isa_lacks(text):
    with pytest.raises(Unsupported):
        multiply(text, np.zeros((32, 4), np.uint32), np.zeros((32, 2), np.uint32), np.zeros((16, 8)))


def test_an_aligned_instruction_needs_the_whole_warp():
    zero = np.zeros((32, 4), np.uint32), np.zeros((32, 2), np.uint32), np.zeros((16, 8))
    guard = "    setp.lt.u32 %p1, %r200, 31;\n    @!%p1 bra SKIP;\n"
    with pytest.raises(Fault, match="needs all 32 lanes of its warp") as caught:
        multiply("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", *zero, load=guard,
                 extra=";\nSKIP: mov.u32 %r9, 0")
    assert caught.value.instruction.startswith("mma.sync")


# --------------------------------------------------------------------------------------------- ldmatrix, stmatrix
FILL = """
    mov.u32 %r200, %tid.x; ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd1, %r200, 16, %rd1;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1]; mov.u32 %r210, tile; mad.lo.u32 %r210, %r200, 16, %r210;
    st.shared.v4.b32 [%r210], {%r1, %r2, %r3, %r4}; bar.warp.sync 0xffffffff;
    ld.param.u64 %rd2, [p1]; mad.wide.u32 %rd2, %r200, 16, %rd2;
"""
TILE = ".shared .align 16 .b8 tile[512];"


def loaded(text, rows):
    """ldmatrix.x4 of 32 rows of 16 bytes, whose addresses the lanes give in order -> registers [32, 4]."""
    out = np.zeros((32, 4), np.uint32)
    run(FILL + f"{text} {{%r5, %r6, %r7, %r8}}, [%r210]; st.global.v4.b32 [%rd2], {{%r5, %r6, %r7, %r8}};", rows, out,
        static=TILE)
    return out


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(transposed):
    """Register j of lane l holds row l / 4, elements 2 (l % 4) and the next, of matrix j (or its transpose)."""
    rows = rng.integers(0, 2 ** 16, (32, 8), dtype=np.uint16)
    got = loaded(f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16", rows.view(np.uint32))
    for lane in LANES:
        for j in range(4):
            matrix = rows[8 * j:8 * j + 8].T if transposed else rows[8 * j:8 * j + 8]
            low, high = matrix[lane // 4, 2 * (lane % 4)], matrix[lane // 4, 2 * (lane % 4) + 1]
            assert got[lane, j] == int(low) | int(high) << 16


@pytest.mark.parametrize("form, bits", [("b6x16_p32", 6), ("b4x16_p64", 4)])
def test_ldmatrix_unpacks_small_formats(form, bits):
    """16 packed codes at the front of each 16-byte row become 16 bytes; lane l gets row l / 4, codes 4 (l % 4) .."""
    codes = rng.integers(0, 1 << bits, (32, 16), dtype=np.uint8)
    rows = np.zeros((32, 16), np.uint8)
    for r in range(32):
        packed = sum(int(c) << bits * i for i, c in enumerate(codes[r]))
        rows[r] = np.frombuffer((packed | 0xA5 << 120).to_bytes(16, "little"), np.uint8)      # rubbish in the padding
    got = loaded(f"ldmatrix.sync.aligned.m8n16.x4.shared::cta.b8x16.{form}", rows.view(np.uint32))
    for lane in LANES:
        for j in range(4):
            four = codes[8 * j + lane // 4, 4 * (lane % 4):4 * (lane % 4) + 4]
            assert got[lane, j] == int.from_bytes(four.tobytes(), "little")


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_undoes_ldmatrix(transposed):
    rows, out = rng.integers(0, 2 ** 32, (32, 4), dtype=np.uint32), np.zeros((32, 4), np.uint32)
    trans = ".trans" if transposed else ""
    run(FILL + f"""ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r5, %r6, %r7, %r8}}, [%r210];
    bar.warp.sync 0xffffffff; add.u32 %r211, %r210, 512;
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r211], {{%r5, %r6, %r7, %r8}}; bar.warp.sync 0xffffffff;
    ld.shared.v4.b32 {{%r5, %r6, %r7, %r8}}, [%r211]; st.global.v4.b32 [%rd2], {{%r5, %r6, %r7, %r8}};""", rows, out,
        static=TILE.replace("512", "1024"))
    np.testing.assert_array_equal(out, rows)


def test_ldmatrix_checks_its_rows():
    rows, out = np.zeros((32, 4), np.uint32), np.zeros((32, 4), np.uint32)
    for change, message in (("add.u32 %r210, %r210, 8;", "misaligned matrix row"),
                            ("add.u32 %r210, %r210, 512;", "outside the block's 512 bytes")):
        with pytest.raises(Fault, match=message):
            run(FILL + change + "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r210];", rows, out, static=TILE)
    with pytest.raises(Fault, match="nothing wrote"):
        run(FILL + "add.u32 %r210, %r210, 512; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r210];", rows, out,
            static=TILE.replace("512", "1024"))
