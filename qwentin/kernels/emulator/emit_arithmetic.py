"""Emitters: arithmetic, logic, comparison, selection and moves."""
from .compile import emits, unsupported
from .dtypes import name_of, unsigned, width_of
from .operands import Imm, Pair, Reg, Special, Vector
from .spaces import LOCAL_WINDOW, SHARED_WINDOW

FLOATS = ("f16", "bf16", "f32", "f64")
HALVES = ("f16", "f16x2", "bf16", "bf16x2")
DIRECTED = {"rz", "rm", "rp"}
SYMBOLS = dict(add="+", sub="-", mul="*")
COMPARE = dict(eq="==", ne="!=", lt="<", le="<=", gt=">", ge=">=", lo="<", ls="<=", hi=">", hs=">=")


def flushed(ins, text):
    return f"flush({text})" if "ftz" in ins.mods else text


def raw_of(kind):
    """The bit type of a value."""
    return f"b{8 * width_of(kind)}"


@emits("add", "sub", "mul", "mad", "fma", "min", "max", "neg", "abs", allow="rn rz rm rp ftz sat cc lo hi wide NaN")
def arithmetic(c, ins):
    op, kind, sources = ins.base, ins.type, ins.args[1:]
    if "cc" in ins.mods:
        return with_carry(c, ins)
    if kind in HALVES or kind == "f32x2":
        if ins.mods & (DIRECTED | {"sat", "NaN", "ftz"}):
            raise unsupported(ins, "this rounding of packed or half types")
        raw = raw_of(kind)
        name = f"half({op!r}, {kind!r}, " if kind in HALVES else f"pair_f32({op!r}, "
        return c.write(ins.args[0], name + ", ".join(c.read(a, raw) for a in sources) + ")", raw)
    if "sat" in ins.mods and kind != "f32" or ins.mods & DIRECTED and kind != "f32":
        raise unsupported(ins, "saturation or directed rounding of this type")
    if "wide" in ins.mods:
        wide = kind[0] + str(2 * int(kind[1:]))
        text = f"multiply_wide({c.read(sources[0], kind)}, {c.read(sources[1], kind)}, {name_of(wide)})"
        return c.write(ins.args[0], text + (f" + {c.read(sources[2], wide)}" if op == "mad" else ""), wide)
    text = plain(ins, op, kind, [flushed(ins, c.read(x, kind)) for x in sources])
    if "sat" in ins.mods:
        text = f"np.fmin(np.fmax({text}, f4(0)), f4(1))"
    c.write(ins.args[0], flushed(ins, text), kind)


def plain(ins, op, kind, a):
    """The expression of an arithmetic instruction over operand expressions."""
    way = next(iter(ins.mods & DIRECTED), None)
    if "hi" in ins.mods:
        return f"mul_hi({a[0]}, {a[1]})" + (f" + {a[2]}" if op == "mad" else "")
    if way:
        exact = dict(fma="{} * {} + {}", mad="{} * {} + {}", add="{} + {}", sub="{} - {}", mul="{} * {}")[op]
        return f"directed({exact.format(f'np.asarray({a[0]}).astype(f8)', *a[1:])}, {way!r})"
    if op in ("mad", "fma"):
        return f"fma_{kind}({', '.join(a)})" if kind[0] == "f" else f"{a[0]} * {a[1]} + {a[2]}"
    if op in ("min", "max"):
        function = f"f{op}" if kind[0] == "f" and "NaN" not in ins.mods else f"{op}imum"
        return f"np.{function}({a[0]}, {a[1]})"
    if op in ("neg", "abs"):
        return f"-{a[0]}" if op == "neg" else f"np.abs({a[0]})"
    return f"{a[0]} {SYMBOLS[op]} {a[1]}"


@emits("addc", "subc", "madc", allow="cc lo hi")
def with_carry(c, ins):
    """add.cc, addc, sub.cc, subc, mad.cc, madc: the carry (or borrow) is one bool a thread."""
    op, kind = ins.base, unsigned(ins.type)
    a = [c.full(x, kind) for x in ins.args[1:]]
    if op.startswith("mad"):
        product = f"mul_hi({c.full(ins.args[1], ins.type)}, {c.full(ins.args[2], ins.type)}).view({name_of(kind)})"
        a = [product if "hi" in ins.mods else f"{a[0]} * {a[1]}", a[2]]
    carry_in = "S.carry" if op.endswith("c") else "False"
    c.lines.append((f"t = carry({a[0]}, {a[1]}, {carry_in}, {op.startswith('sub')})",) * 2)
    if "cc" in ins.mods:
        c.lines.append(("S.carry = t[1]", "S.carry = np.where(M, t[1], S.carry)"))
    c.write(ins.args[0], "t[0]", kind)


@emits("div", "rem", allow="rn approx full ftz")
def division(c, ins):
    kind = ins.type
    a, b = (flushed(ins, c.full(x, kind)) for x in ins.args[1:])
    if kind[0] == "f":
        text = f"({a} / {b})"
    else:
        text = f"truncated_div({a}, {b})"
        text = f"({a} - {text} * {b})" if ins.base == "rem" else text
    c.write(ins.args[0], flushed(ins, text), kind)


@emits("and", "or", "xor", "not", "cnot")
def logic(c, ins):
    a = [c.read(x, ins.type) for x in ins.args[1:]]
    if ins.base == "cnot":
        text = f"({a[0]} == 0).astype({name_of(ins.type)})"
    elif ins.base == "not":
        text = f"~{a[0]}"
    else:
        text = f"{a[0]} {dict(zip(('and', 'or', 'xor'), '&|^'))[ins.base]} {a[1]}"
    c.write(ins.args[0], text, ins.type)


@emits("shl", "shr")
def shift(c, ins):
    """numpy, like PTX, gives 0 (or the sign) for shifts by the width or more."""
    amount = ins.args[2]
    text = (c.read(amount, ins.type) if isinstance(amount, Imm)
            else f"{c.read(amount, 'u32')}.astype({name_of(ins.type)})")
    c.write(ins.args[0], f"{c.full(ins.args[1], ins.type)} {'<<' if ins.base == 'shl' else '>>'} {text}", ins.type)


@emits("shf", allow="l r wrap clamp")
def funnel_shift(c, ins):
    low, high, amount = (c.full(x, "u32") for x in ins.args[1:])
    c.write(ins.args[0], f"funnel({low}, {high}, {amount}, {'l' in ins.mods}, {'wrap' in ins.mods})", "u32")


@emits("lop3")
def lop3(c, ins):
    a = ", ".join(c.full(x, "b32") for x in ins.args[1:4])
    c.write(ins.args[0], f"logic3({a}, {ins.args[4].value})", "b32")


@emits("prmt")
def prmt(c, ins):
    c.write(ins.args[0], f"byte_permute({', '.join(c.full(x, 'b32') for x in ins.args[1:])})", "b32")


@emits("bfe", "bfi", "brev", "popc", "clz", "bfind", allow="shiftamt")
def bits(c, ins):
    op, kind, a = ins.base, ins.type, ins.args
    if op == "bfe":
        text = f"bit_field({c.full(a[1], kind)}, {c.read(a[2], 'u32')}, {c.read(a[3], 'u32')})"
    elif op == "bfi":
        text = f"bit_insert({c.full(a[1], kind)}, {c.full(a[2], kind)}, {c.read(a[3], 'u32')}, {c.read(a[4], 'u32')})"
    elif op == "brev":
        text = f"bit_reverse({c.full(a[1], kind)})"
    else:
        function = dict(popc="np.bitwise_count({}).astype(u4)", clz="leading_zeros({})",
                        bfind=f"highest_bit({{}}, {'shiftamt' in ins.mods})")[op]
        return c.write(a[0], function.format(c.full(a[1], kind)), "u32")
    c.write(a[0], text, kind)


@emits("dp4a")
def dot_bytes(c, ins):
    a, b, d = (c.full(x, "u32") for x in ins.args[1:])
    kinds = ", ".join(name_of(k[0] + "8") for k in ins.op[1:])
    c.write(ins.args[0], f"byte_dot({a}, {b}, {d}, ({kinds},))", "u32")


@emits("setp", allow="ftz and or xor num nan equ neu ltu leu gtu geu " + " ".join(COMPARE))
def compare(c, ins):
    op, kind, destination = ins.op[1], ins.type, ins.args[0]
    a, b = (compared(c, ins, x, kind) for x in ins.args[1:3])
    text = comparison(op, kind, a, b)
    negated = f"~{text}"
    if len(ins.args) == 4:
        symbol, other = {"and": "&", "or": "|", "xor": "^"}[ins.op[2]], c.read(ins.args[3], "pred")
        text, negated = f"{text} {symbol} {other}", f"{negated} {symbol} {other}"
    if not isinstance(destination, Pair):
        return c.write(destination, text, "pred")
    c.line(f"t = {negated}")
    c.write(destination.first, text, "pred")
    c.write(destination.second, "t", "pred")


def compared(c, ins, operand, kind):
    """An operand of a comparison; halves are compared as float32."""
    if kind in ("f16", "bf16"):
        word = c.full(operand, "b16")
        return f"from_bf16({word})" if kind == "bf16" else f"{word}.view(f2).astype(f4)"
    if kind in HALVES:
        raise unsupported(ins, "comparison of pairs")
    return flushed(ins, c.full(operand, kind))


def comparison(op, kind, a, b):
    """A comparison as an expression; for floats, `equ` and its like are true and `ne` is false where one is NaN."""
    if op in ("num", "nan"):
        return f"{'~' if op == 'num' else ''}(np.isnan({a}) | np.isnan({b}))"
    if kind in FLOATS and len(op) == 3:
        return f"(({a} {COMPARE[op[:2]]} {b}) | np.isnan({a}) | np.isnan({b}))"
    if kind in FLOATS and op == "ne":
        return f"(({a} != {b}) & ~np.isnan({a}) & ~np.isnan({b}))"
    return f"({a} {COMPARE[op]} {b})"


@emits("selp")
def select(c, ins):
    yes, no = (c.read(x, raw_of(ins.type)) for x in ins.args[1:3])
    c.write(ins.args[0], f"np.where({c.read(ins.args[3], 'pred')}, {yes}, {no})", raw_of(ins.type))


@emits("mov")
def move(c, ins):
    kind, (destination, source) = ins.type, ins.args
    vector = next((x for x in ins.args if isinstance(x, Vector)), None)
    if vector is None:
        return c.write(destination, c.full(source, kind) if isinstance(source, (Reg, Special))
                       else f"S.full({c.read(source, kind)})", kind)
    raw, part = raw_of(kind), f"b{8 * width_of(kind) // len(vector.items)}"
    if vector is destination:
        return c.results(f"S.split({c.full(source, raw)}, {name_of(part)}, {len(vector.items)})", destination, part)
    c.write(destination, f"S.join({c.each(source, part)}, {name_of(raw)})", raw)


@emits("cvta", allow="to global shared shared::cta local const param")
def convert_address(c, ins):
    space = next(s.split("::")[0] for s in ins.op[1:] if s not in ("to", "u64"))
    base = dict(shared=SHARED_WINDOW, local=LOCAL_WINDOW).get(space, 0)
    text = c.full(ins.args[1], "u64")
    c.write(ins.args[0], f"{text} {'-' if 'to' in ins.mods else '+'} u8({base})" if base else text, "u64")


FUNCTIONS = dict(ex2="np.exp2({})", lg2="np.log2({})", rcp="(1.0 / {})", sqrt="np.sqrt({})",
                 rsqrt="(1.0 / np.sqrt({}))", sin="np.sin({})", cos="np.cos({})", tanh="np.tanh({})")


@emits(*FUNCTIONS, allow="approx rn ftz")
def function(c, ins):
    kind, op = ins.type, ins.base
    if kind in HALVES and op in ("ex2", "tanh"):
        raw = raw_of(kind)
        return c.write(ins.args[0], f"half({op!r}, {kind!r}, {c.full(ins.args[1], raw)})", raw)
    if kind not in ("f32", "f64"):
        raise unsupported(ins)
    x = flushed(ins, c.full(ins.args[1], kind))
    c.write(ins.args[0], flushed(ins, f"{FUNCTIONS[op].format(f'{x}.astype(f8)')}.astype({name_of(kind)})"), kind)


@emits("testp", allow="finite infinite number notanumber")
def classify(c, ins):
    tests = dict(finite="np.isfinite({})", infinite="np.isinf({})", number="~np.isnan({})", notanumber="np.isnan({})")
    c.write(ins.args[0], tests[ins.op[1]].format(c.full(ins.args[1], ins.type)), "pred")


@emits("copysign")
def copy_sign(c, ins):
    c.write(ins.args[0], f"np.copysign({c.full(ins.args[2], ins.type)}, {c.full(ins.args[1], ins.type)})", ins.type)
