"""The factory: one PTX instruction becomes one function that a kernel calls.

`instruction` takes the text of a PTX instruction with its operands named in angle brackets, the types of what it
gives and takes, and what it does to the world; numba then sees a function, LLVM an inline `asm` call:

    mma_f16 = instruction("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 <d>, <a>, <b>, <c>;",
                          outputs=dict(d=f32x4), inputs=dict(a=u32x4, b=u32x2, c=f32x4), effect=PURE)
    acc = mma_f16(a, b, acc)              # inside a kernel: tuples in, tuples out

A tuple operand is written `{r0, r1, ...}` (one of its registers: `<a.1>`), a scalar `r0`, an `imm` operand as the
number it was called with. Arguments are converted to the declared types. The families live in ptx_*.py; kernels
import them through `ptx`.
"""
import inspect
import re

from llvmlite import ir
from numba.core.errors import TypingError
from numba.cuda import types
from numba.cuda.extending import _intrinsic      # the public name takes no prefer_literal, which `imm` needs

u16, u32, u64, i32 = types.uint16, types.uint32, types.uint64, types.int32
f32 = types.float32
imm = types.Literal                   # stands for an integer known when the kernel is compiled


def tuple_of(scalar, length):
    """A register tuple: what an instruction with a vector operand takes or gives."""
    return types.UniTuple(scalar, length)


u32x2, u32x4, u32x8 = (tuple_of(u32, n) for n in (2, 4, 8))
u64x2 = tuple_of(u64, 2)
f32x2, f32x4 = (tuple_of(f32, n) for n in (2, 4))

# What an instruction may do besides giving its outputs, weakest first.
PURE = "pure"                         # a function of its inputs: may be merged, moved or dropped
ORDERED = "ordered"                   # keeps its place among its like, touches no memory the compiler knows of
MEMORY = "memory"                     # the compiler may carry no memory access across it

LLVM = {u16: ir.IntType(16), u32: ir.IntType(32), i32: ir.IntType(32), u64: ir.IntType(64), f32: ir.FloatType()}
NAMED = r"<([\w.]+)>"                 # an operand, or one register of it: <a>, <a.0>
REGISTER = {u16: "h", u32: "r", i32: "r", u64: "l", f32: "f"}


def scalars(kind):
    """The scalar types of an operand, in order: one for a scalar, several for a tuple, none for an immediate."""
    if kind is imm:
        return []
    return list(kind) if isinstance(kind, types.BaseTuple) else [kind]


def operand(kind, first):
    """How an operand whose first register has number `first` is written."""
    names = [f"${first + i}" for i in range(len(scalars(kind)))]
    return "{" + ", ".join(names) + "}" if isinstance(kind, types.BaseTuple) else names[0]


def written(text, outputs, inputs, immediates):
    """The instruction's text with every `<name>` replaced by registers, or by the number an immediate holds."""
    places, number = {}, 0
    for name, kind in [*outputs.items(), *inputs.items()]:
        if kind is imm:
            places[name] = str(immediates[name])
            continue
        places[name] = operand(kind, number)
        for i in range(len(scalars(kind))):
            places[f"{name}.{i}"] = f"${number + i}"
        number += len(scalars(kind))
    return re.sub(NAMED, lambda match: places[match.group(1)], text)


def constraints(outputs, inputs, effect, tied):
    """LLVM's constraint string: outputs, then inputs; a tied input names the output whose register it shares."""
    parts = ["=" + REGISTER[s] for kind in outputs.values() for s in scalars(kind)]
    ties = [str(i) for i in range(len(parts))]
    for name, kind in inputs.items():
        parts += ties if name == tied else [REGISTER[s] for s in scalars(kind)]
    return ",".join(parts + (["~{memory}"] if effect == MEMORY else []))


def result_type(outputs):
    """What the call gives: nothing, the one output, or a tuple of the outputs."""
    kinds = list(outputs.values())
    return types.void if not kinds else kinds[0] if len(kinds) == 1 else types.Tuple(kinds)


def instruction(text, outputs=None, inputs=None, *, effect, tied=None):
    """A numba function that emits one PTX instruction.

    text: the instruction, operands as `<name>`. outputs, inputs: name -> numba scalar type, tuple type or `imm`.
    effect: PURE, ORDERED or MEMORY. tied: the input that occupies the registers of the (only) output, as the
    accumulators of wgmma do. The text and types stay readable as `.instruction` of what is returned.
    """
    outputs, inputs = outputs or {}, inputs or {}
    unknown = {name.split(".")[0] for name in re.findall(NAMED, text)} - set(outputs) - set(inputs)
    if unknown:
        raise ValueError(f"{text!r} names {sorted(unknown)}, which are neither outputs nor inputs")
    # what a warp does together must stay one instruction: no copy of it for each way into a block
    attributes = ("convergent",) if ".sync" in text or text.startswith("bar") else ()
    flat = [LLVM[s] for kind in outputs.values() for s in scalars(kind)]
    returns = ir.VoidType() if not flat else flat[0] if len(flat) == 1 else ir.LiteralStructType(flat)

    def definition(typingctx, *given):
        immediates = immediate_values(text, inputs, given)
        wanted = [arg if kind is imm else kind for kind, arg in zip(inputs.values(), given, strict=True)]

        def codegen(context, builder, signature, args):
            values = [v for kind, arg in zip(inputs.values(), args) for v in registers(builder, kind, arg)]
            asm = ir.InlineAsm(ir.FunctionType(returns, [v.type for v in values]),
                               written(text, outputs, inputs, immediates),
                               constraints(outputs, inputs, effect, tied), side_effect=effect != PURE)
            return packed(context, builder, outputs, builder.call(asm, values, attrs=attributes))
        return result_type(outputs)(*wanted), codegen

    Parameter, kind = inspect.Parameter, inspect.Parameter.POSITIONAL_OR_KEYWORD
    definition.__signature__ = inspect.Signature([Parameter(n, kind) for n in ("typingctx", *inputs)])
    made = _intrinsic(target="cuda", prefer_literal=True)(definition)
    made.instruction = (text, tuple(outputs.items()), tuple(inputs.items()), effect, tied)
    return made


def immediate_values(text, inputs, given):
    """name -> number of the `imm` inputs of one call."""
    values = {}
    for (name, kind), arg in zip(inputs.items(), given):
        if kind is imm:
            if not isinstance(arg, types.IntegerLiteral):
                raise TypingError(f"{name} of {text.split()[0]!r} must be a number known at compile time, got {arg}")
            values[name] = arg.literal_value
    return values


def registers(builder, kind, value):
    """The LLVM scalars of one argument."""
    if kind is imm:
        return []
    if isinstance(kind, types.BaseTuple):
        return [builder.extract_value(value, i) for i in range(len(kind))]
    return [value]


def packed(context, builder, outputs, result):
    """The asm call's result as the value of `result_type(outputs)`."""
    flat = [s for kind in outputs.values() for s in scalars(kind)]
    if not flat:
        return context.get_dummy_value()
    parts = [result] if len(flat) == 1 else [builder.extract_value(result, i) for i in range(len(flat))]
    values, at = [], 0
    for kind in outputs.values():
        n = len(scalars(kind))
        values.append(context.make_tuple(builder, kind, parts[at:at + n])
                      if isinstance(kind, types.BaseTuple) else parts[at])
        at += n
    return values[0] if len(values) == 1 else context.make_tuple(builder, result_type(outputs), values)
