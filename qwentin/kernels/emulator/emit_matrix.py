"""Emitters: ldmatrix, stmatrix, mma, wgmma."""
import re

from .compile import emits, unsupported
from .emit_memory import address_of
from .operands import Vector

HALF, BYTES = ("f16", "bf16"), ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
SHAPES = " ".join(f"m64n{n}k{k}" for n in range(8, 257, 8) for k in (16, 32))


@emits("ldmatrix", allow="sync aligned m8n8 m8n16 x1 x2 x4 trans shared shared::cta b8x16 b6x16_p32 b4x16_p64")
def load_matrix(c, ins):
    n = next(int(m[1:]) for m in ins.op if m in ("x1", "x2", "x4"))
    form = next((m for m in ins.op if m in ("b6x16_p32", "b4x16_p64")), "b16")
    if ("m8n8" if form == "b16" else "m8n16") not in ins.mods or form != "b16" and "trans" in ins.mods:
        raise unsupported(ins)
    c.results(f"S.matrix.ldmatrix({address_of(c, ins.args[1])}, {n}, {form!r}, {'trans' in ins.mods}, @M, {c.at})",
              ins.args[0], "b32")


@emits("stmatrix", allow="sync aligned m8n8 x1 x2 x4 trans shared shared::cta")
def store_matrix(c, ins):
    c.line(f"S.matrix.stmatrix({address_of(c, ins.args[0])}, {c.each(ins.args[1], 'b32')}, {'trans' in ins.mods}, @M, "
           f"{c.at})")


@emits("mma", allow="sync aligned row col m16n8k8 m16n8k16 m16n8k32 m16n8k64 block_scale kind::f8f6f4 kind::mxf8f6f4 "
       "kind::mxf4 kind::mxf4nvf4 scale_vec::1X scale_vec::2X scale_vec::4X ue8m0 ue4m3 " + " ".join(BYTES))
def mma(c, ins):
    words = [m for m in ins.op[1:] if m not in ("sync", "aligned", "row", "col", "block_scale") and "::" not in m]
    shape, d, a, b, acc = words[:5]
    kind = next((m.split("::")[1] for m in ins.op if m.startswith("kind::")), None)
    if not {"row", "col"} <= ins.mods or d != acc or not known_mma(shape, kind, d, a, b):
        raise unsupported(ins, "not an mma that is known")
    scale = block_scale(c, ins, kind, words[5:])
    if kind in ("mxf4", "mxf4nvf4"):
        a = b = "packed e2m1"
    operands = ", ".join(c.each(x, "b32") for x in ins.args[1:3])
    half = d == "f16"
    c.results(f"S.matrix.mma(({a!r}, {b!r}), {operands}, {c.each(ins.args[3], 'b32' if half else 'f32')}, {half}, "
              f"{scale}, @M, {c.at})", ins.args[0], "b32" if half else "f32")


def known_mma(shape, kind, d, a, b):
    """Whether the ISA has this combination."""
    if d not in ("f32", "f16"):
        return False
    if shape == "m16n8k16":
        return kind is None and a == b and a in HALF and not (d == "f16" and a == "bf16")
    if shape == "m16n8k8":
        return kind is None and a == b == "tf32" and d == "f32"
    if shape == "m16n8k32":
        some = BYTES[:2] if kind is None else BYTES
        return a in some and b in some and kind in (None, "f8f6f4", "mxf8f6f4") and (d == "f32" or kind != "mxf8f6f4")
    return shape == "m16n8k64" and kind in ("mxf4", "mxf4nvf4") and a == b == "e2m1" and d == "f32"


def block_scale(c, ins, kind, words):
    """The scale argument of Matrix.mma, or None."""
    if not (kind or "").startswith("mx"):
        if "block_scale" in ins.mods:
            raise unsupported(ins)
        return None
    chunks = next((int(m[11]) for m in ins.op if m.startswith("scale_vec::")), {"mxf8f6f4": 1, "mxf4": 2}.get(kind))
    allowed = {"mxf8f6f4": [(1, "ue8m0")], "mxf4": [(2, "ue8m0")],
               "mxf4nvf4": [(2, "ue8m0"), (4, "ue8m0"), (4, "ue4m3")]}[kind]
    if "block_scale" not in ins.mods or len(words) != 1 or (chunks, words[0]) not in allowed:
        raise unsupported(ins, "not a block scale that is known")
    first = lambda x: c.read(x.items[0] if isinstance(x, Vector) else x, "b32")
    selector = lambda x: "(" + ", ".join(c.read(item, "b16") for item in x.items) + ")"
    scale_a, select_a, scale_b, select_b = ins.args[4:8]
    return f"({chunks}, {words[0]!r}, {first(scale_a)}, {selector(select_a)}, {first(scale_b)}, {selector(select_b)})"


@emits("wgmma", allow=f"fence sync aligned commit_group wait_group mma_async {SHAPES} " + " ".join(BYTES[:2]))
def wgmma(c, ins):
    if ins.op[1] == "fence":
        return                                                           # registers are checked in asyncregs.py
    if ins.op[1] == "commit_group":
        return c.line("S.wgmma.commit(@M)")
    if ins.op[1] == "wait_group":
        return c.line(f"S.wgmma.wait({ins.args[0].value}, @M, {c.at})")
    shape, (d, a, b) = re.fullmatch(r"m64n(\d+)k(\d+)", ins.op[4]), ins.op[5:8]
    n, k = int(shape.group(1)), int(shape.group(2))
    wanted = dict.fromkeys(HALF, 16) | dict.fromkeys(BYTES[:2], 32)
    if (d not in ("f32", "f16") or (d == "f16" and a == "bf16") or {wanted[a], wanted[b]} != {k} or
            (k == 16 and a != b)):
        raise unsupported(ins, "not a wgmma that is known")
    in_registers = isinstance(ins.args[1], Vector)
    immediate = [x.value for x in ins.args[4:]]
    signs, major = immediate[:2] or [1, 1], immediate[2:] or [0, 0]
    major = [0] + major if in_registers and len(major) == 1 else major
    source = c.each(ins.args[1], "b32") if in_registers else c.full(ins.args[1], "b64")
    kind = "b32" if d == "f16" else "f32"
    descriptor, scale_d = c.full(ins.args[2], "b64"), c.read(ins.args[3], "pred")
    c.results(f"S.wgmma.multiply(({n}, {k}), {(d, a, b)!r}, {c.each(ins.args[0], kind)}, {source}, {descriptor}, "
              f"{scale_d}, {tuple(signs)!r}, {tuple(major)!r}, @M, {c.at})", ins.args[0], kind)
