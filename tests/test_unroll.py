"""unroll: what the rewritten function says, that it means the same, and that lines keep their numbers."""
import linecache

import pytest

from qwentin.kernels.unroll import UnrollError, compile_time, source_of, static_range, unroll

SIX = 6


def body(function):
    """The rewritten text below the def line, dedented."""
    return "\n".join(line[4:] for line in source_of(unroll(function)).splitlines()[1:])


def test_static_loop_is_written_out():
    def f(a, x):
        for i in static_range(1, 7, 2):
            x = x + a[i]
        return x
    assert body(f) == "x = x + a[1]\nx = x + a[3]\nx = x + a[5]\nreturn x"
    assert unroll(f)(list(range(10)), 0) == 9


def test_nested_loops_see_both_variables():
    def f(a):
        s = 0
        for i in static_range(2):
            for j in static_range(i + 1):
                s = s + a[i * 3 + j]
        return s
    assert body(f) == "s = u32(0)\ns = s + a[0]\ns = s + a[3]\ns = s + a[4]\nreturn s"


def test_tuple_of_a_static_loop():
    def f(g):
        return tuple(g(i, tuple(g(i * j, i) for j in static_range(2))) for i in static_range(2))
    assert body(f) == "return (g(0, (g(0, 0), g(0, 0))), g(1, (g(0, 1), g(1, 1))))"


def test_compile_time_functions_are_called():
    @compile_time
    def mask(i):
        return 15 << 4 * i

    def f(a, x):
        return tuple(a[mask(i) % 7] & mask(i) for i in static_range(2)) if mask(1) > 100 else x
    assert body(f) == "return (a[1] & u32(15), a[2] & u32(240))"

    def unknown(x):
        return x & mask(x)
    with pytest.raises(UnrollError, match=r"mask\(x\) is not known when the kernel is compiled"):
        unroll(unknown)


def test_branches_on_closure_and_module_numbers():
    split, mode = 2, "fp6"

    def f(x):
        if split > 1 and mode == "fp6":
            x = x + 1 if SIX == 6 else x
        elif x:
            x = 7
        return x
    assert body(f) == "x = x + u32(1)\nreturn x"


def test_unknown_terms_stay_and_known_ones_go():
    yes, no = True, False

    def f(x):
        if (yes and x) or no:
            return 1
        if no and x:
            return 2
        if x or yes:
            return 3
    assert body(f) == "if x:\n    return u32(1)\nreturn u32(3)"


def test_a_local_name_hides_a_known_one():
    n = 3

    def f(x):
        m = n
        SIX = x
        return SIX + m
    assert body(f) == "m = u32(3)\nSIX = x\nreturn SIX + m"


def test_numbers_in_arithmetic_get_a_type_and_others_stay():
    def f(p, shape, x, t):
        q = p + 16 * x
        y = (x * 0.5, 1.0)
        shape((8, 32), 4, 0.25)
        return t[3], t[x + 1], min(x, 7), q + 2 ** 33, y, x > 5
    assert body(f) == ("q = p + u32(16) * x\ny = (x * f32(0.5), f32(1.0))\nshape((8, 32), 4, f32(0.25))\n"
                       "return (t[3], t[x + u32(1)], min(x, u32(7)), q + u64(8589934592), y, x > u32(5))")


def test_neutral_numbers_vanish_and_tuples_repeat():
    def f(x):
        for k in static_range(2):
            x = x + k * 4
        return (0.0, x) * 2
    assert body(f) == "x = x\nx = x + u32(4)\nreturn (f32(0.0), x, f32(0.0), x)"


def test_range_counts_in_u32():
    def f(x, n):
        for k in range(n):
            for j in range(2, n, 3):
                x += j * k
        return x
    text = body(f)
    assert text.startswith("k = u32(0)\nk_end = n\nwhile k < k_end:\n    j = u32(2)\n    j_end = n\n    while j < j_end:")
    assert "j = u32(j + u32(3))" in text
    namespace = unroll(f)
    namespace.__globals__["u32"] = int
    assert namespace(0, 9) == f(0, 9)


@pytest.mark.parametrize("text", ["if k == 2: continue", "k = k + 1"])
def test_loops_that_a_while_would_change_stay(text, tmp_path):
    path = tmp_path / "loops.py"
    path.write_text(f"def f(x, n):\n    for k in range(n):\n        {text}\n        x += k\n    return x\n")
    namespace = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    assert "for k in range(n):" in source_of(unroll(namespace["f"]))


def test_lines_keep_their_numbers():
    def f(x):
        for i in static_range(2):
            x = x + i
        raise KeyError(x)
    made = unroll(f)
    assert made.__code__.co_filename == __file__
    with pytest.raises(KeyError) as caught:
        made.__globals__["u32"] = int
        made(1)
    assert caught.traceback[-1].lineno == f.__code__.co_firstlineno + 2        # counted from 0: the raise


def test_the_text_is_kept_for_debuggers():
    def f(x):
        for i in static_range(2):
            x = x + i
        return x
    name = f"<unrolled {__name__}.{f.__qualname__}>"
    source = source_of(unroll(f))
    assert "".join(linecache.getlines(name)) == source


def test_refusals_name_file_and_line():
    def unknown(n):
        for _ in static_range(n):
            pass

    def broken(x):
        for i in static_range(3):
            if x > i:
                break

    def filtered(a):
        return tuple(a[i] for i in static_range(4) if i > 2)
    for function, words in ((unknown, "static_range(n) is not known"), (broken, "no else, break or continue"),
                            (filtered, "one plain static_range loop")):
        with pytest.raises(UnrollError) as caught:
            unroll(function)
        assert words in str(caught.value)
        assert f"{__file__}:{function.__code__.co_firstlineno + 1}" in str(caught.value)


def test_static_range_alone_does_nothing_silently():
    with pytest.raises(UnrollError, match="never runs"):
        static_range(3)
    with pytest.raises(UnrollError, match="no source file"):
        unroll(eval("lambda x: x"))
