"""Emitters: cvt, in every form that compilers and kernels write.

Packed forms take the high element first: `cvt.rn.bf16x2.f32 d, high, low`. fp4 pairs fill one byte, all other small
formats one byte an element.
"""
from .compile import emits, unsupported
from .dtypes import name_of, unsigned

ROUNDING = dict(rni="np.rint", rzi="np.trunc", rmi="np.floor", rpi="np.ceil")
PAIRS = ("f16x2", "bf16x2")
SMALL = dict(e4m3x2="E4M3", e5m2x2="E5M2", e2m3x2="E2M3", e3m2x2="E3M2", e2m1x2="E2M1")


@emits("cvt", allow="rn rna rz rm rp rni rzi rmi rpi ftz sat satfinite relu ue8m0x2 " + " ".join(SMALL))
def convert(c, ins):
    to, source = ins.op[-2], ins.op[-1]
    if to in PAIRS and source == "f32":
        return to_pair(c, ins, to)
    if to in SMALL:
        return to_small(c, ins, to, source)
    if source in SMALL and to == "f16x2":
        return from_small(c, ins, source)
    if "ue8m0x2" in (to, source):
        return scale_pair(c, ins, to, source)
    if "relu" in ins.mods or "satfinite" in ins.mods:
        raise unsupported(ins)
    if to == "tf32":
        return c.write(ins.args[0], f"({c.full(ins.args[1], 'b32')} + u4(0x1000)) & u4(0xFFFFE000)", "b32")
    scalar(c, ins, to, source)


def relu(ins, text):
    return f"np.fmax({text}, f4(0))" if "relu" in ins.mods else text


def to_pair(c, ins, to):
    """Two f32 -> f16x2 or bf16x2."""
    if "rn" not in ins.mods or "satfinite" in ins.mods:
        raise unsupported(ins, "only .rn")
    encode = f"to_{to[:-2]}"
    high, low = (f"{encode}({relu(ins, c.full(x, 'f32'))}).astype(u4)" for x in ins.args[1:])
    c.write(ins.args[0], f"{low} | {high} << u4(16)", "b32")


def to_small(c, ins, to, source):
    """Two f32, or an f16x2, -> two fp8, fp6 or fp4."""
    if not {"rn", "satfinite"} <= ins.mods:
        raise unsupported(ins, "only .rn.satfinite")
    if source == "f32":
        values = [c.full(x, "f32") for x in ins.args[1:]]
    elif source == "f16x2":
        word = c.full(ins.args[1], "b32")
        values = [f"unpack_half({word}, {high})" for high in (True, False)]
    else:
        raise unsupported(ins)
    high, low = (f"to_minifloat({relu(ins, v)}, {SMALL[to]})" for v in values)
    if to == "e2m1x2":
        return c.write(ins.args[0], f"{low} | {high} << u1(4)", "b8")
    c.write(ins.args[0], f"{low}.astype(u2) | {high}.astype(u2) << u2(8)", "b16")


def from_small(c, ins, source):
    """Two fp8, fp6 or fp4 -> f16x2."""
    if "rn" not in ins.mods:
        raise unsupported(ins, "only .rn")
    if source == "e2m1x2":
        word = c.full(ins.args[1], "b8")
        codes = [f"({word} & u1(15))", f"({word} >> u1(4))"]
    else:
        word = c.full(ins.args[1], "b16")
        codes = [f"({word} & u2(255))", f"({word} >> u2(8))"]
    low, high = (f"to_f16({relu(ins, f'OPERAND_BYTE[{source[:4]!r}][{code}]')}).astype(u4)" if source != "e2m1x2"
                 else f"to_f16({relu(ins, f'E2M1[{code}]')}).astype(u4)" for code in codes)
    c.write(ins.args[0], f"{low} | {high} << u4(16)", "b32")


def scale_pair(c, ins, to, source):
    """Two f32, or a bf16x2, -> two ue8m0; two ue8m0 -> a bf16x2."""
    if to == "bf16x2":
        word = c.full(ins.args[1], "b16")
        low, high = (f"to_bf16(UE8M0[{w}].astype(f4)).astype(u4)" for w in (f"{word} & u2(255)", f"{word} >> u2(8)"))
        return c.write(ins.args[0], f"{low} | {high} << u4(16)", "b32")
    if source == "f32":
        values = [c.full(x, "f32") for x in ins.args[1:]]
    elif source == "bf16x2":
        word = c.full(ins.args[1], "b32")
        values = [f"from_bf16(({word} >> u4(16)).astype(u2))", f"from_bf16({word}.astype(u2))"]
    else:
        raise unsupported(ins)
    if not ins.mods & {"rz", "rp"} or "satfinite" not in ins.mods:
        raise unsupported(ins, "only .rz or .rp with .satfinite")
    high, low = (f"to_ue8m0({v}, {'rp' in ins.mods}).astype(u2)" for v in values)
    c.write(ins.args[0], f"{low} | {high} << u2(8)", "b16")


def scalar(c, ins, to, source):
    """One number of one type to another."""
    from_float, to_float = (k[0] == "f" or k == "bf16" for k in (source, to))
    x = c.full(ins.args[1], "b16" if source == "bf16" else source)
    x = f"from_bf16({x})" if source == "bf16" else x
    x = f"flush({x})" if "ftz" in ins.mods and source == "f32" else x
    rounding = next(iter(ins.mods & ROUNDING.keys()), None)
    narrowing = from_float and to_float and (to in ("f16", "bf16") or (to, source) == ("f32", "f64"))
    if ins.mods & {"rz", "rm", "rp"} and (narrowing or not from_float) or "rna" in ins.mods:
        raise unsupported(ins, "this rounding")
    if from_float and not to_float:
        if not rounding:
            raise unsupported(ins, "a rounding is needed")
        return c.write(ins.args[0], f"float_to_int({ROUNDING[rounding]}({x}), {name_of(to)})", to)
    if from_float:
        x = f"{ROUNDING[rounding]}({x})" if rounding else x
        x = f"np.fmin(np.fmax({x}, {name_of(to)}(0)), {name_of(to)}(1))" if "sat" in ins.mods else x
    elif "sat" in ins.mods:
        limits = f"np.iinfo({name_of(to)})"
        x = f"np.clip({x}.astype(i8), {limits}.min, {limits}.max)"
    if to in ("f16", "bf16"):
        wide = x if from_float else f"{x}.astype(f8)"
        to_half = f"to_bf16(odd_f4({wide}.astype(f8)))" if to == "bf16" else f"to_f16({wide})"
        return c.write(ins.args[0], to_half, unsigned(to))
    c.write(ins.args[0], f"{x}.astype({name_of(to)})", to)
