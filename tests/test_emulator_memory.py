"""Loads, stores, atomics: what they move, and every way in which an access can be wrong."""
import numpy as np
import pytest

from ptx_text import kernel, run
from qwentin.kernels.emulator import Fault, GlobalMemory, PtxError, Unsupported, launch, load

TID = "    mov.u32 %r1, %tid.x;\n    ld.param.u64 %rd1, [p0];\n"
AT = TID + "    mad.wide.u32 %rd2, %r1, {}, %rd1;\n"                      # %rd2 = p0 + {} tid


def caught(body, *args, match, kind=Fault, **options):
    with pytest.raises(kind, match=match) as info:
        run(body, *args, **options)
    return str(info.value)


# ---------------------------------------------------------------------------------------------- what moves
def test_vectors_and_widths():
    x, out = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    run(AT.format(16) + "ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%r2, %r3, %r4, %r5}, [%rd2];"
        "ld.param.u64 %rd3, [p1]; mad.wide.u32 %rd4, %r1, 16, %rd3; st.global.v2.b32 [%rd4], {%r5, %r4};"
        "st.global.v2.b32 [%rd4+8], {%r3, %r2};", x[:128], out[:128])
    np.testing.assert_array_equal(out[:128].reshape(-1, 4), x[:128].reshape(-1, 4)[:, ::-1])
    run(AT.format(32) + "ld.global.v8.b32 {%r2, %r3, %r4, %r5, %r6, %r7, %r8, %r9}, [%rd2];"
        "ld.param.u64 %rd3, [p1]; mad.wide.u32 %rd4, %r1, 32, %rd3; st.global.v4.b32 [%rd4+16], {%r2, %r3, %r4, %r5};"
        "st.global.v4.b32 [%rd4], {%r6, %r7, %r8, %r9};", x, out)
    np.testing.assert_array_equal(out.reshape(-1, 2, 4), x.reshape(-1, 2, 4)[:, ::-1])


def test_bytes_extend_by_their_sign():
    x, out = np.arange(-16, 16, dtype=np.int8), np.zeros(32, np.int32)
    body = AT.format(1) + "ld.global.{} %r2, [%rd2]; ld.param.u64 %rd3, [p1]; mad.wide.u32 %rd4, %r1, 4, %rd3;" \
                          "st.global.u32 [%rd4], %r2;"
    run(body.format("s8"), x, out)
    np.testing.assert_array_equal(out, x)
    run(body.format("u8"), x, out)
    np.testing.assert_array_equal(out, x.view(np.uint8))


def test_scalars_offsets_and_symbols():
    out = np.zeros(4, np.float32)
    table = ".visible .const .align 4 .u32 table[4] = {10, 20, 30, 0x28};"
    run("ld.param.u64 %rd1, [p0]; ld.param.f32 %f1, [p1]; ld.param.u32 %r1, [p2]; cvt.rn.f32.u32 %f2, %r1;"
        "mov.u64 %rd2, table; ld.const.u32 %r2, [%rd2+12]; ld.const.u32 %r3, [table+4]; cvt.rn.f32.u32 %f3, %r2;"
        "cvt.rn.f32.u32 %f4, %r3; st.global.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};",
        out, np.float32(1.5), np.uint32(7), static=table, block=1)
    assert out.tolist() == [1.5, 7, 40, 20]


def test_generic_addresses_find_their_space():
    out = np.zeros(32, np.uint32)
    run(TID + """
    .local .align 4 .b8 mine[8];
    mov.u64 %rd3, cell;           cvta.shared.u64 %rd4, %rd3;   mad.wide.u32 %rd4, %r1, 4, %rd4;
    mov.u64 %rd5, mine;           cvta.local.u64 %rd6, %rd5;
    st.u32 [%rd4], %r1;           mul.lo.u32 %r2, %r1, 100;     st.u32 [%rd6+4], %r2;
    cvta.to.shared.u64 %rd7, %rd4; ld.shared.u32 %r3, [%rd7];   ld.local.u32 %r4, [mine+4];
    add.u32 %r5, %r3, %r4;        mad.wide.u32 %rd8, %r1, 4, %rd1;   st.u32 [%rd8], %r5;""",
        out, static=".shared .align 4 .b8 cell[128];")
    np.testing.assert_array_equal(out, 101 * np.arange(32))


def test_one_array_twice_is_one_buffer():
    x = np.arange(32, dtype=np.uint32)
    run(AT.format(4) + "ld.param.u64 %rd3, [p1]; mad.wide.u32 %rd4, %r1, 4, %rd3; ld.global.u32 %r2, [%rd2];"
        "add.u32 %r2, %r2, 1; st.global.u32 [%rd4], %r2;", x, x)
    np.testing.assert_array_equal(x, np.arange(1, 33))


def test_offset_arguments_and_other_memory():
    """(array, offset) points into an array; a GlobalMemory reaches arrays through pointers kept in arrays."""
    x, out, memory = np.arange(8, dtype=np.uint32), np.zeros(1, np.uint32), GlobalMemory()
    pointers = np.array([memory.add(x, "x")], np.uint64)
    program = load(kernel("ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; ld.global.u64 %rd3, [%rd1];"
                          "ld.global.u32 %r1, [%rd3+8]; ld.global.u32 %r2, [%rd2]; add.u32 %r1, %r1, %r2;"
                          "ld.param.u64 %rd4, [p2]; st.global.u32 [%rd4], %r1;", ("u64",) * 3))
    launch(program, 1, 1, [pointers, (x, 20), out], memory=memory)
    assert out[0] == 2 + 5


# ---------------------------------------------------------------------------------------------- atomics
def atomic(text, x, **options):
    run(TID + text, x, **options)
    return x


def test_atomics_on_one_address():
    x = np.zeros(4, np.uint32)
    atomic("atom.global.add.u32 %r2, [%rd1], 3; red.global.max.u32 [%rd1+4], %r1; red.global.or.b32 [%rd1+8], %r1;"
           "atom.global.inc.u32 %r3, [%rd1+12], 9;", x)
    assert x.tolist() == [96, 31, 31, 32 % 10]
    f = np.zeros(1, np.float32)
    assert atomic("mov.f32 %f1, 0f3E800000; red.global.add.f32 [%rd1], %f1;", f, block=64)[0] == 16


def test_atomic_returns_are_each_handed_out_once():
    x = np.zeros(33, np.uint32)
    run(TID + "atom.global.add.u32 %r2, [%rd1], 1; add.u32 %r2, %r2, 1; mad.wide.u32 %rd2, %r2, 4, %rd1;"
        "st.global.u32 [%rd2], %r2;", x)
    assert x.tolist() == [32] + list(range(1, 33))


def test_compare_and_swap_and_signed_minimum():
    x = np.array([5, 0], np.int32)
    atomic("atom.global.cas.b32 %r2, [%rd1], 5, %r1; cvt.s32.u32 %r3, %r1; neg.s32 %r3, %r3; "
           "red.global.min.s32 [%rd1+4], %r3;", x)
    assert x.tolist() == [0, -31]                                       # the first thread, 0, won the swap


def test_vector_and_half_reductions():
    x = np.zeros(4, np.float32)
    atomic("cvt.rn.f32.u32 %f1, %r1; red.global.v4.f32.add [%rd1], {%f1, 0f3F800000, 0f00000000, %f1};", x)
    assert x.tolist() == [496, 32, 0, 496]
    h = np.zeros(2, np.float16)
    atomic("red.global.add.noftz.f16x2 [%rd1], 0x3C004000;", h)
    assert h.tolist() == [64, 32]


def test_shared_atomics():
    out = np.zeros(1, np.uint32)
    run(TID + "setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.u32 [sum], 0; bar.sync 0; red.shared.add.u32 [sum], %r1;"
        "bar.sync 0; ld.shared.u32 %r2, [sum]; @%p1 st.global.u32 [%rd1], %r2;", out, block=256,
        static=".shared .align 4 .u32 sum;")
    assert out[0] == 255 * 128


# ---------------------------------------------------------------------------------------------- what can be wrong
def test_out_of_bounds_names_array_offset_and_thread():
    body = AT.format(4) + "ld.global.u32 %r2, [%rd2+4];"
    message = caught(body, np.zeros(32, np.uint32), match="out of bounds")
    assert "offset 128 of argument 0, which has 128 bytes" in message and "thread (31, 0, 0)" in message
    assert "`ld.global.u32 %r2, [%rd2+4]`" in message
    caught(AT.format(4) + "st.global.u32 [%rd2+-4], %r1;", np.zeros(32, np.uint32), match="out of bounds: no buffer")
    caught("mov.u64 %rd1, 64; ld.global.u32 %r1, [%rd1];", match="out of bounds", params=())


def test_a_vector_may_not_hang_over_the_end():
    caught(AT.format(16) + "ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd2];", np.zeros(127, np.uint32),
           match="out of bounds")


def test_the_gap_between_buffers_is_nobodys():
    caught(TID + "st.global.u32 [%rd1+256], %r1;", np.zeros(32, np.uint32), np.zeros(32, np.uint32), match="argument 0",
           block=1)


def test_misaligned():
    message = caught(AT.format(4) + "ld.global.v2.u32 {%r2, %r3}, [%rd2];", np.zeros(33, np.uint32), match="misaligned")
    assert "8 bytes" in message and "thread (1, 0, 0)" in message
    caught(TID + "st.shared.u32 [cell+2], %r1;", np.zeros(1, np.uint32), match="misaligned",
           static=".shared .align 4 .b8 cell[64];", block=1)


def test_shared_bounds_count_static_and_dynamic_memory():
    body = TID + "mov.u32 %r2, cell; st.shared.u32 [%r2+64], %r1;"
    caught(body, np.zeros(1, np.uint32), match="shared access of 4 bytes at offset 64 is outside the block's 64 bytes",
           static=".shared .align 4 .b8 cell[64];", block=1)
    body = TID + "mov.u32 %r2, room; st.shared.u32 [%r2+252], %r1; st.shared.u32 [%r2+256], %r1;"
    message = caught(body, np.zeros(1, np.uint32), match="outside the block's 256 bytes", block=1, shared_bytes=256,
                     static=".extern .shared .align 16 .b8 room[];")
    assert "[%r2+256]" in message


def test_local_bounds_and_unwritten():
    head = TID + ".local .align 4 .b8 mine[8]; "
    caught(head + "st.local.u32 [mine+8], %r1;", np.zeros(1, np.uint32), match="local access of 4 bytes at offset 8")
    caught(head + "st.local.u32 [mine], %r1; ld.local.u32 %r2, [mine+4];", np.zeros(1, np.uint32),
           match="local memory that nothing wrote")


def test_unwritten_shared_memory():
    caught(TID + "ld.shared.u32 %r2, [cell];", np.zeros(1, np.uint32), match="shared memory that nothing wrote",
           static=".shared .align 4 .b8 cell[64];")


def test_unwritten_output():
    out, body = np.zeros(32, np.uint32), AT.format(4) + "st.global.u16 [%rd2], %rs1; ld.global.u32 %r2, [%rd2];"
    message = caught(body, out, match="nothing wrote", unwritten=[out])
    assert "argument 0 at offset 0" in message
    run(AT.format(4) + "st.global.u32 [%rd2], %r1; ld.global.u16 %rs1, [%rd2+2]; red.global.add.u32 [%rd2], 1;", out,
        unwritten=[out])
    np.testing.assert_array_equal(out, np.arange(1, 33))
    caught(AT.format(4) + "red.global.add.u32 [%rd2], 1;", out, unwritten=[out],
           match="atomic on bytes of argument 0 that nothing wrote")


def test_read_only_arrays():
    x = np.zeros(32, np.uint32)
    x.flags.writeable = False
    caught(AT.format(4) + "st.global.u32 [%rd2], %r1;", x, match="store to argument 0, which is read-only")


def test_the_noncoherent_path_does_not_see_writes():
    caught(AT.format(4) + "st.global.u32 [%rd2], %r1; ld.global.nc.u32 %r2, [%rd2];", np.zeros(32, np.uint32),
           match="read with .nc and was written by this kernel")


@pytest.mark.parametrize("args, grid, block, message", [
    ([np.zeros(4, np.uint32)], 1, 32, "1 arguments for the 2 parameters"),
    ([np.zeros(4, np.uint32), np.uint64(1)], 1, 32, "takes 4 bytes, got uint64"),
    ([np.zeros(4, np.uint32), 3], 1, 32, "is a int, wanted a numpy array or scalar"),
    ([np.zeros((4, 4), np.uint32)[:, :2], np.uint32(1)], 1, 32, "not C-contiguous"),
    ([np.zeros(4, np.uint32), np.uint32(1)], 0, 32, "wanted at least one block"),
    ([np.zeros(4, np.uint32), np.uint32(1)], 1, 2048, "1 to 1024 threads")])
def test_launches_that_make_no_sense(args, grid, block, message):
    program = load(kernel("", ("u64", "u32")))
    with pytest.raises(PtxError, match=message):
        launch(program, grid, block, args)


def test_a_slice_of_an_array_that_came_before_lies_inside_it():
    x = np.zeros(64, np.uint32)
    body = "ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; sub.u64 %rd3, %rd2, %rd1; cvt.u32.u64 %r1, %rd3;" \
           "ld.global.u32 %r2, [%rd1+16]; ld.global.u32 %r2, [%rd2+{}]; st.global.u32 [%rd2], %r1;"
    run(body.format(16), x, x[5:9], block=1, unwritten=[])
    assert x[5] == 20
    fresh = x[5:9]
    caught(body.format(0), x, fresh, match="argument 0 at offset 20, which nothing wrote", block=1, unwritten=[fresh])


def test_arrays_that_share_some_memory_are_refused():
    x = np.zeros(64, np.uint32)
    with pytest.raises(PtxError, match="share some memory"):
        launch(load(kernel("", ("u64", "u64"))), 1, 32, [x[:40], x[20:]])


def test_dynamic_shared_memory_is_aligned_as_declared_and_no_better():
    """A kernel that counts on more, as swizzled tiles do, must see to it itself."""
    out, body = np.zeros(1, np.uint32), "mov.u32 %r1, cell; mov.u32 %r2, room; sub.u32 %r1, %r2, %r1;" \
                                        "ld.param.u64 %rd1, [p0]; st.global.u32 [%rd1], %r1;"
    for align, want in ((1, 16), (128, 128)):
        run(body, out, block=1, shared_bytes=64,
            static=f".shared .align 4 .b8 cell[4];\n.extern .shared .align {align} .b8 room[];")
        assert out[0] == want


def test_shared_memory_that_the_chip_does_not_have():
    program = load(kernel("", (), ".shared .align 4 .b8 cell[1024];"))
    launch(program, 1, 32, [], shared_bytes=98 << 10)
    with pytest.raises(PtxError, match="wants 102400 bytes of shared memory a block, sm_120a has 101376"):
        launch(program, 1, 32, [], shared_bytes=99 << 10)


def test_the_block_size_that_the_text_allows():
    program = load(kernel("").replace(")\n{", ")\n.maxntid 64, 1, 1\n{", 1))
    launch(program, 1, 64, [np.zeros(1, np.uint32)])
    with pytest.raises(PtxError, match="maxntid 64"):
        launch(program, 1, 96, [np.zeros(1, np.uint32)])


def test_forms_that_are_not_known():
    for text in ("ld.global.wobble.u32 %r1, [%rd1];", "red.global.add.f16x3 [%rd1], %r1;",
                 "atom.global.min.f32 %f1, [%rd1], %f2;"):
        with pytest.raises(Unsupported):
            load(kernel(text))
