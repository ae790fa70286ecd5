"""Small PTX kernels for the emulator's tests, written out: nothing of ours stands between the test and the text."""
import numpy as np

from qwentin.kernels.emulator import launch, load

REGISTERS = """
    .reg .pred %p<64>;
    .reg .b8 %c<16>;
    .reg .b16 %rs<64>;
    .reg .b32 %r<256>;
    .reg .b64 %rd<128>;
    .reg .f32 %f<256>;
    .reg .f64 %fd<32>;
"""
KINDS = {"u1": "u8", "u2": "u16", "u4": "u32", "u8": "u64", "i1": "s8", "i2": "s16", "i4": "s32", "i8": "s64",
         "f2": "b16", "f4": "f32", "f8": "f64"}
NAMES = {"u1": "rs", "i1": "rs", "u2": "rs", "i2": "rs", "f2": "rs", "u4": "r", "i4": "r", "u8": "rd", "i8": "rd",
         "f4": "f", "f8": "fd"}


def kernel(body, params=("u64",), static="", head="", entry="kernel"):
    """A whole PTX text around a body. Parameters are p0, p1, ...; the usual registers are declared."""
    listed = ",\n    ".join(f".param .{kind} p{i}" for i, kind in enumerate(params))
    return f"""
.version 8.8
.target sm_120a
.address_size 64
{static}
{head}
.visible .entry {entry}(
    {listed}
)
{{{REGISTERS}{body}
    ret;
}}
"""


def run(body, *args, params=None, grid=1, block=32, static="", **options):
    """Load and launch a body; params are u64 for arrays and the scalars' own types otherwise."""
    params = params or tuple("u64" if isinstance(a, np.ndarray) else KINDS[a.dtype.str[1:]] for a in args)
    launch(load(kernel(body, params, static)), grid, block, list(args), **options)


def each(code, inputs, output, threads=None):
    """Run `code` in one thread for each element: $0, $1, ... are registers that hold the inputs, $d gets the result.

    inputs: arrays of one length; output: a dtype. -> array of results."""
    inputs = [np.ascontiguousarray(x) for x in inputs]
    n = threads or len(inputs[0])
    output = np.dtype(output)
    body, text = "    mov.u32 %r255, %tid.x; mov.u32 %r254, %ctaid.x; mad.lo.u32 %r255, %r254, 32, %r255;\n", code
    for i, x in enumerate(inputs):
        kind, register = KINDS[x.dtype.str[1:]], f"%{NAMES[x.dtype.str[1:]]}{40 - i if x.itemsize < 8 else 20 - i}"
        body += (f"    ld.param.u64 %rd100, [p{i}];\n    mad.wide.u32 %rd100, %r255, {x.itemsize}, %rd100;\n"
                 f"    ld.global.{kind} {register}, [%rd100];\n")
        text = text.replace(f"${i}", register)
    result = f"%{NAMES[output.str[1:]]}1"
    body += (f"    {text.replace('$d', result)}\n    ld.param.u64 %rd101, [p{len(inputs)}];\n"
             f"    mad.wide.u32 %rd101, %r255, {output.itemsize}, %rd101;\n"
             f"    st.global.{KINDS[output.str[1:]]} [%rd101], {result};")
    out = np.zeros(-(-n // 32) * 32, output)
    padded = [np.resize(x, out.size) for x in inputs]
    run(body, *padded, out, grid=-(-n // 32))
    return out[:n]
