"""Basic blocks -> Python source over arrays of shape [threads].

Every block becomes two functions (S, R, M) -> predicate: one for "every live thread is here", with plain assignments,
and one under a mask M, with numpy.where. S is the running Group, R the list of registers. Arrays in R are never
changed in place, so `mov` may share them. What an instruction does is said by an emitter, one function for each
family, registered under its opcode in emit_*.py.
"""
import numpy as np

from . import arithmetic, formats
from .blocks import BARRIER, BRANCH, barrier_operands
from .dtypes import SHORT, TYPES, dtype_of, name_of
from .errors import Unsupported
from .operands import Imm, Local, Not, Real, Reg, Sink, Special, Symbol, Vector

EMITTERS = {}
# Hints, and what has no meaning for one launch on an idle device: griddepcontrol (a dependent launch starts when the
# one before it is complete), prefetches and cache policies, nanosleep.
HINTS = frozenset("nanosleep prefetch prefetchu griddepcontrol pmevent discard applypriority".split())
BARRIER_FORMS = frozenset("sync arrive red cta aligned popc and or u32 pred".split())


def emits(*opcodes, allow=""):
    """Register a function (compiler, instruction) as the emitter of these opcodes.

    allow: the modifiers it takes into account, type names aside. Any other is an error, never ignored."""
    def keep(function):
        EMITTERS.update({opcode: (function, frozenset(allow.split()) | TYPES.keys()) for opcode in opcodes})
        return function
    return keep


def unsupported(ins, why=""):
    return Unsupported(f"`{ins.text}`{' (' + ins.place + ')' if ins.place else ''}{': ' + why if why else ''}")


class Compiler:
    """Writes the source of all blocks; `instructions[i]` is what the number i in the source stands for."""

    def __init__(self, lowering, warnings):
        self.register, self.types = lowering.register, lowering.register_types
        self.warnings = warnings                                         # id of an instruction -> what is wrong with it
        self.constants, self.instructions, self.lines = {}, [], []
        self.ins, self.at = None, 0

    def block(self, number, block):
        """(source of the full function, source of the masked function) of one block."""
        self.lines = []
        for ins in block.code:
            self.instruction(ins)
        result = "None"
        if block.last is not None:
            self.mark(block.last)
            if block.kind == BRANCH:
                result = self.guard(block.last)
            elif block.kind == BARRIER:
                result = self.barrier(block.last)
        head = f"def block_{number}(S, R, M):\n"
        return [head + "".join(f"    {line[i]}\n" for line in self.lines) + f"    return {result}" for i in (0, 1)]

    def mark(self, ins):
        self.ins, self.at = ins, len(self.instructions)
        self.instructions.append(ins)

    def instruction(self, ins):
        self.mark(ins)
        if id(ins) in self.warnings:
            self.line(f"S.fault_if_any({self.at}, {self.warnings[id(ins)]!r}, @M)")
        if ins.base in HINTS:
            return
        if ins.base not in EMITTERS:
            raise unsupported(ins, "unknown instruction")
        emitter, allowed = EMITTERS[ins.base]
        if unknown := [m for m in ins.op[1:] if m not in allowed]:
            raise unsupported(ins, f"unknown modifier .{unknown[0]}")
        try:
            emitter(self, ins)
        except (KeyError, IndexError, ValueError, AttributeError, TypeError, StopIteration) as e:
            raise unsupported(ins, f"a form that is not known ({type(e).__name__}: {e})") from e

    def barrier(self, ins):
        """(id, thread count, predicate of a reduction), each an array, a number or None."""
        if not ins.mods <= BARRIER_FORMS:
            raise unsupported(ins, "a barrier that is not known")
        number, count = barrier_operands(ins)
        parts = [str(x.value) if isinstance(x, Imm) else "None" if x is None else self.read(x, "u32")
                 for x in (number, count)]
        reduced = self.read(ins.args[-1], "pred") if "red" in ins.mods else "None"
        return f"({', '.join(parts)}, {reduced})"

    # ---- pieces of source
    def constant(self, value):
        """The name of a numpy scalar."""
        name = f"c{SHORT[value.dtype].replace('np.', '')}_{value.tobytes().hex()}"
        self.constants[name] = value
        return name

    def guard(self, ins):
        register = f"R[{ins.guard.index}]"
        return f"~{register}" if ins.negated else register

    def read(self, operand, kind):
        """An expression for an operand, seen as `kind`."""
        t = dtype_of(kind)
        match operand:
            case Reg():
                return self.read_register(operand, t)
            case Imm(value):
                if t.kind == "f":
                    return self.constant(t.type(value))
                if t == np.bool_:
                    return self.constant(np.bool_(value))
                bits = np.array([value & (1 << 8 * t.itemsize) - 1], f"u{t.itemsize}")
                return self.constant(bits.view(t)[0])
            case Real(value):
                return self.constant(value.astype(t) if t.kind == "f" else value.view(f"u{value.itemsize}").astype(t))
            case Not(inner):
                return f"~{self.read(inner, kind)}"
            case Special(name):
                return f"S.special({name!r}).astype({name_of(t)})"
            case Symbol(name):
                return f"S.symbol({name!r}, {name_of(t)})"
            case Local(offset):
                return self.constant(t.type(offset))
        raise ValueError(f"operand {operand}")

    def read_register(self, operand, t):
        stored, name = self.types[operand.index], f"R[{operand.index}]"
        if stored == t:
            return name
        if stored.itemsize == t.itemsize:
            return f"{name}.view({name_of(t)})"
        if stored.itemsize > t.itemsize and stored != np.bool_:
            raw = np.dtype(f"u{t.itemsize}")
            return f"{name}.astype({name_of(raw)})" + (f".view({name_of(t)})" if raw != t else "")
        raise ValueError(f"a {stored} register read as {t}")

    def full(self, operand, kind):
        """Like read, but an array even where the operand is a constant."""
        text = self.read(operand, kind)
        return text if isinstance(operand, (Reg, Special, Not)) else f"S.full({text})"

    def each(self, operand, kind):
        """A list of expressions for a vector operand (or for a scalar one)."""
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return "[" + ", ".join(self.read(x, kind) for x in items) + "]"

    def write(self, operand, expression, kind):
        """Assign an expression of type `kind` to a register, under the instruction's guard."""
        if isinstance(operand, Sink):
            return
        t, stored = dtype_of(kind), self.types[operand.index]
        if t != stored and t.itemsize == stored.itemsize:
            expression = f"({expression}).view({name_of(stored)})"
        elif t != stored:                                                # a wider register: extended by the type's sign
            wide = np.dtype(("i" if t.kind == "i" else "u") + str(stored.itemsize))
            expression = f"({expression}).astype({name_of(wide)})" + (f".view({name_of(stored)})" if wide != stored
                                                                      else "")
        target = f"R[{operand.index}]"
        if self.ins.guard is None:
            self.lines.append((f"{target} = {expression}", f"{target} = np.where(M, {expression}, {target})"))
        else:
            guard = self.guard(self.ins)
            self.lines.append((f"{target} = np.where({guard}, {expression}, {target})",
                               f"{target} = np.where(M & {guard}, {expression}, {target})"))

    def line(self, template):
        """A statement; @M stands for the mask of the threads that execute it (None: all of them)."""
        if self.ins.guard is None:
            full = masked = "M"
        else:
            full, masked = f"S.both(M, {self.guard(self.ins)})", f"(M & {self.guard(self.ins)})"
        self.lines.append((template.replace("@M", full), template.replace("@M", masked)))

    def results(self, call, operand, kind):
        """Assign what a call returns, one array for each item of the destination."""
        self.line(f"t = {call}")
        for i, item in enumerate(operand.items if isinstance(operand, Vector) else (operand,)):
            self.write(item, f"t[{i}]", kind)

    def namespace(self):
        """What the generated source may name."""
        return {**vars(arithmetic), **vars(formats), "np": np, **self.constants}
