"""From text to blocks: scopes, line info, calls, variables, and the order of blocks."""
import numpy as np
import pytest

from ptx_text import kernel, run
from qwentin.kernels.emulator import Fault, Program, PtxError, Unsupported, launch, load


def store(register="%r1"):
    return f"ld.param.u64 %rd1, [p0]; st.global.u32 [%rd1], {register};"


def value(body, **options):
    out = np.zeros(1, np.uint32)
    launch(load(kernel(body + store(), ("u64",), **options)), 1, 1, [out])
    return out[0]


def test_scopes_have_names_of_their_own():
    """Inline asm declares the same names again and again, and its labels are its own."""
    count = "{ .reg .u32 t; .reg .pred q; mov.u32 t, %r1; LOOP: add.u32 t, t, 1; setp.lt.u32 q, t, %r2; @q bra LOOP; " \
            "mov.u32 %r1, t; }"
    assert value("mov.u32 %r1, 0; mov.u32 %r2, 5;" + count + "mov.u32 %r2, 9;" + count) == 9
    with pytest.raises(Unsupported, match="unknown name t"):
        load(kernel("{ .reg .u32 t; } mov.u32 t, 1;"))


def test_comments_and_constants():
    assert value("/* mov.u32 %r1, 1; */ mov.u32 %r1, 0x10; //\n add.u32 %r1, %r1, 010; add.u32 %r1, %r1, 3U;") == 27
    assert value("mov.f32 %f1, 0f40490FDB; cvt.rni.u32.f32 %r1, %f1;") == 3
    assert value("mov.f64 %fd1, 0d4010000000000000; cvt.rni.u32.f64 %r1, %fd1;") == 4
    assert value("mov.u32 %r1, -2;") == 2 ** 32 - 2


FUNCTION = """
.visible .func (.param .b32 result) triple (.param .b32 x, .param .align 8 .b8 pair[8])
{
    .reg .b32 %r<9>;
    .reg .pred %p<2>;
    ld.param.u32 %r1, [x];
    ld.param.u32 %r2, [pair+4];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra ZERO;
    mad.lo.u32 %r3, %r1, 3, %r2;
    st.param.b32 [result], %r3;
    ret;
ZERO:
    st.param.b32 [result], 1000;
    ret;
}
"""
CALL = """{ .param .b32 a; .param .align 8 .b8 b[8]; .param .b32 c;
    st.param.b32 [a], %r1; st.param.v2.b32 [b], {%r5, %r6};
    call.uni (c), triple, (a, b); ld.param.b32 %r1, [c]; }"""


def test_calls_are_inlined():
    body = "mov.u32 %r1, {}; mov.u32 %r5, 7; mov.u32 %r6, 2;" + CALL.replace("{", "{{").replace("}", "}}") \
        .replace("{{%r5, %r6}}", "{{%r5, %r6}}")
    assert value(body.format(5), head=FUNCTION) == 17
    assert value(body.format(0), head=FUNCTION) == 1000
    assert value(body.format(5) + CALL, head=FUNCTION) == 53


def test_texts_that_call_one_another():
    """What numba compiled, and a device function from another compiler."""
    declared = ".extern .func (.param .b32 result) triple (.param .b32 x, .param .align 8 .b8 pair[8]);"
    out = np.zeros(1, np.uint32)
    body = "mov.u32 %r1, 5; mov.u32 %r5, 7; mov.u32 %r6, 2;" + CALL + store()
    program = load([kernel(body, ("u64",), head=declared), ".version 8.8\n.target sm_90\n" + FUNCTION])
    launch(program, 1, 1, [out])
    assert out[0] == 17


def test_recursion_is_not_known():
    text = ".func f () { call.uni f; ret; }"
    with pytest.raises(Unsupported, match="recursive"):
        load(kernel("call.uni f;", ("u64",), head=text))


def test_which_kernel():
    two = kernel("mov.u32 %r1, 1;" + store(), entry="one") + kernel("mov.u32 %r1, 2;" + store(), entry="two")
    out = np.zeros(1, np.uint32)
    launch(load(two, "two"), 1, 1, [out])
    assert out[0] == 2
    for name, message in ((None, "has 2 kernels, wanted exactly one"), ("three", "has 0 kernels named three")):
        with pytest.raises(PtxError, match=message):
            load(two, name)


LINES = """
    .loc 1 7 3
    mov.u32 %r1, %tid.x;
    .loc 1 9 3, function_name $L__info_string0, inlined_at 1 7 3
    {CODE}
    .file 1 "some/where/kernel.py"
    .section .debug_str {{ $L__info_string0: .b8 97, 98, 0; }}
"""


def test_faults_and_refusals_name_the_python_line():
    text = kernel(LINES.format(CODE="ld.global.u32 %r2, [%rd1];")).replace('    .file 1 "some/where/kernel.py"', "") + \
        '\n\t.file\t1 "some/where/kernel.py"\n'
    with pytest.raises(Fault, match="some/where/kernel.py:9") as caught:
        launch(load(text), 1, 1, [np.zeros(1, np.uint32)])
    assert caught.value.place == "some/where/kernel.py:9" and caught.value.instruction == "ld.global.u32 %r2, [%rd1]"
    with pytest.raises(Unsupported, match=r"`frobnicate.u32 %r2` \(some/where/kernel.py:9\): unknown instruction"):
        load(text.replace("ld.global.u32 %r2, [%rd1]", "frobnicate.u32 %r2"))


def test_static_variables_lie_apart_and_aligned():
    static = ".shared .align 4 .b8 a[6];\n.shared .align 16 .b8 b[16];\n.extern .shared .align 128 .b8 room[];"
    program = load(kernel("", (), static))
    module = program.module
    assert module.shared["b"] % 16 == 0 and module.shared["b"] >= module.shared["a"] + 6
    assert value("mov.u32 %r1, room; mov.u32 %r2, b; sub.u32 %r1, %r1, %r2;", static=static) > 0


@pytest.mark.parametrize("text, message", [
    (".tex .u64 t;", "declaration"), (".global .u64 p[1] = {generic(q)};", "initialiser")])
def test_declarations_that_are_not_known(text, message):
    with pytest.raises(Unsupported, match=message):
        load(kernel("", static=text))


@pytest.mark.parametrize("text, message", [
    ("brx.idx %r1, list;", "unknown name|brx"), ("bra NOWHERE;", "unknown label NOWHERE"),
    ("ld.global.u32 %r1, [%rd1+%rd2];", r"address|unknown"), ("mov.u32 %r1, nothing;", "unknown name nothing"),
    ("barrier.cluster.arrive.aligned;", "a barrier that is not known"),
    (".wobble 3;", "directive"), (".reg .b128 %big;", "register type")])
def test_statements_that_are_not_known(text, message):
    with pytest.raises(Unsupported, match=message):
        load(kernel(text))


# ------------------------------------------------------------------------------------------------ order of blocks
def order(body):
    """For each block in execution order, the number that its first `mov.u32 %r9, N` gives."""
    program = Program(kernel(body))
    return [b.code[0].args[1].value for b in program.blocks if b.code and b.code[0].base == "mov"]


def test_a_join_comes_after_both_sides_and_a_loop_before_what_follows():
    diamond = """mov.u32 %r9, 0; @%p1 bra COLD; mov.u32 %r9, 1; bra JOIN;
    JOIN: mov.u32 %r9, 3; bra END;
    COLD: mov.u32 %r9, 2; bra JOIN;
    END: mov.u32 %r9, 4;"""
    assert order(diamond) == [0, 1, 2, 3, 4]
    loop = """mov.u32 %r9, 0; HEAD: mov.u32 %r9, 1; @%p1 bra BODY; mov.u32 %r9, 9; bra END;
    BODY: mov.u32 %r9, 2; @%p2 bra SLOW; BACK: mov.u32 %r9, 4; bra HEAD;
    SLOW: mov.u32 %r9, 3; bra BACK;
    END: mov.u32 %r9, 10;"""
    assert order(loop) == [0, 1, 2, 3, 4, 9, 10]


def test_nested_loops_and_unreachable_code():
    nested = """mov.u32 %r9, 0; OUTER: mov.u32 %r9, 1; INNER: mov.u32 %r9, 2; @%p1 bra INNER; mov.u32 %r9, 3;
    @%p2 bra OUTER; mov.u32 %r9, 4; bra END; mov.u32 %r9, 99; END: mov.u32 %r9, 5;"""
    assert order(nested) == [0, 1, 2, 3, 4, 5]


def test_a_body_may_run_without_arguments():
    run("mov.u32 %r1, 1;", params=())
