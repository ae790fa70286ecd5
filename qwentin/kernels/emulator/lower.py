"""A kernel's text -> one flat list of instructions and labels: names resolved, calls inlined.

Every scope in braces (inline asm makes many) has names of its own. A call to a .func that has a body is replaced by
the body; what passes through .param space passes through registers.
"""
import re

import numpy as np

from .dtypes import STORED, TYPES, dtype_of, f4, f8, u4, u8
from .errors import Unsupported
from .operands import (Address, Imm, Instruction, KernelParam, Local, Not, Pair, Param, Real, Reg, Sink, Special,
                       Symbol, Target, Vector)
from .parse import add_variable, split_list

IDENTIFIER = r"[\w$%]+"


class Scopes:
    """Which names are visible, innermost scope last; `ids` tell equal names of different scopes apart."""

    def __init__(self, names, first_id):
        self.names, self.ids = [dict(names)], [first_id]

    def push(self, scope_id):
        self.names.append({})
        self.ids.append(scope_id)

    def pop(self):
        self.names.pop()
        self.ids.pop()

    def find(self, name):
        return next((names[name] for names in reversed(self.names) if name in names), None)


class Lowering:
    """Result: `flat` (Instructions and ("label", key) pairs), `register_types`, `local_bytes`."""

    def __init__(self, module, entry):
        self.module, self.flat, self.place = module, [], ""
        self.register_types, self.register_ids, self.local_bytes, self.serial = [], {}, 0, 0
        self.body(entry, {name: KernelParam(name) for name, _ in entry.params}, None, (entry.name,))

    def fresh(self):
        self.serial += 1
        return self.serial

    def register(self, key, kind):
        """The register of a key, made at first sight."""
        if key not in self.register_ids:
            self.register_ids[key] = len(self.register_types)
            kind = dtype_of(kind)
            self.register_types.append(np.dtype(STORED.get(kind, kind)))
        return Reg(self.register_ids[key])

    def body(self, function, names, end_label, calls):
        """Lower one function; `ret` in an inlined one jumps to `end_label`."""
        scopes = Scopes(names, self.fresh())
        text, at = function.body, 0
        space, label = re.compile(r"\s*"), re.compile(rf"({IDENTIFIER})\s*:(?!:)")
        while (at := space.match(text, at).end()) < len(text):
            if text[at] in "{}":
                scopes.push(self.fresh()) if text[at] == "{" else scopes.pop()
                at += 1
            elif m := label.match(text, at):
                self.flat.append(("label", (scopes.ids[-1], m.group(1))))
                at = m.end()
            else:
                end = text.find(";", at)
                end = len(text) if end < 0 else end
                statement, at = " ".join(text[at:end].split()), end + 1
                if statement.startswith("."):
                    self.directive(statement, scopes)
                elif statement:
                    self.instruction(statement, scopes, end_label, calls)
        if end_label is not None:
            self.flat.append(("label", end_label))

    def directive(self, text, scopes):
        word, _, rest = text.partition(" ")
        if word == ".reg":
            self.declare_registers(text, rest, scopes)
        elif word == ".loc":
            file, line = rest.split()[:2]
            self.place = self.module.place(int(file), int(line))
        elif word == ".local":
            m = re.match(rf"\.align\s+(\d+)\s+\.b8\s+({IDENTIFIER})\[(\d+)\]", rest)
            at = -(-self.local_bytes // int(m.group(1))) * int(m.group(1))
            scopes.names[-1][m.group(2)] = Local(at)
            self.local_bytes = at + int(m.group(3))
        elif word == ".param":
            name = text.split()[-1].split("[")[0]
            scopes.names[-1][name] = Param((scopes.ids[-1], name))
        elif word == ".shared":
            add_variable(self.module, text)
        elif word not in (".pragma", ".branchtargets", ".callprototype"):
            raise Unsupported(f"directive `{text}`")

    def declare_registers(self, text, rest, scopes):
        kind, _, names = rest.partition(" ")
        if kind[1:] not in TYPES:
            raise Unsupported(f"register type in `{text}`")
        for name in split_list(names):
            prefix = re.match(rf"({IDENTIFIER})<\d+>", name)
            scopes.names[-1][prefix.group(1) + "<" if prefix else name] = ("declared", kind[1:], scopes.ids[-1])

    def instruction(self, text, scopes, end_label, calls):
        m = re.match(rf"(?:@(!?)({IDENTIFIER})\s+)?([\w.:]+)\s*(.*)$", text)
        if not m:
            raise Unsupported(f"`{text}`")
        negated, guard, opcode, rest = m.groups()
        guard = self.operand(guard, scopes) if guard else None
        op = tuple(opcode.split("."))
        if op[0] == "call":
            return self.call(rest, scopes, calls, text, guard)
        if op[0] == "ret" and end_label is not None:
            op, args = ("bra",), [Target(end_label, ())]
        elif op[0] == "bra":
            args = [Target(rest.strip(), tuple(scopes.ids))]
        else:
            args = [self.operand(a, scopes) for a in split_list(rest)]
        self.flat.append(Instruction(op, args, text, self.place, guard, bool(negated)))

    def call(self, rest, scopes, calls, text, guard):
        m = re.match(rf"(?:\(([^)]*)\)\s*,\s*)?({IDENTIFIER})\s*(?:,\s*\(([^)]*)\))?", rest)
        returns, name, given = split_list(m.group(1) or ""), m.group(2), split_list(m.group(3) or "")
        function = self.module.functions.get(name)
        if function is None or function.body is None:                    # runs only on the error path, or is a fault
            self.flat.append(Instruction(("external",), [Symbol(name)], text, self.place, guard))
            for r in returns:
                value = self.register((scopes.find(r).key, 0), "b32")
                self.flat.append(Instruction(("mov", "b32"), [value, Imm(0)], text, self.place))
            return
        if name in calls or guard:
            raise Unsupported(f"recursive or predicated call `{text}`")
        names = {n: scopes.find(a) for (n, _), a in zip(function.params, given)}
        names.update({n: scopes.find(a) for n, a in zip(function.returns, returns)})
        self.body(function, names, ("end of call", self.fresh()), calls + (name,))

    def operand(self, text, scopes):
        """One operand, whatever its form."""
        text = text.strip()
        if text.startswith("{"):
            return Vector(tuple(self.operand(x, scopes) for x in split_list(text[1:-1])))
        if text.startswith("["):
            return self.address(text, scopes)
        if "|" in text:
            return Pair(*[self.operand(x, scopes) for x in text.split("|")])
        if text.startswith("!"):
            return Not(self.operand(text[1:], scopes))
        if text == "_":
            return Sink()
        return constant(text) or self.named(text, scopes)

    def address(self, text, scopes):
        m = re.match(r"\[\s*([\w$%.]+)\s*(?:([+-])\s*(-?\w+))?\s*\]$", text)
        if not m:
            raise Unsupported(f"address {text}")
        offset = int(m.group(3) or "0", 0) * (-1 if m.group(2) == "-" else 1)
        return Address(self.operand(m.group(1), scopes), offset)

    def named(self, text, scopes):
        found = scopes.find(text)
        if found is None and (m := re.fullmatch(r"(.*?)(\d+)", text)):
            found = scopes.find(m.group(1) + "<")
        if isinstance(found, tuple):
            return self.register((found[2], text), found[1])
        if found is not None:
            return found
        if text in self.module.shared or text in self.module.dynamic or text in self.module.data:
            return Symbol(text)
        if text.startswith("%") or text == "WARP_SZ":
            return Special(text)
        raise Unsupported(f"unknown name {text}")


def constant(text):
    """An integer or floating-point literal, or None."""
    if m := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        return Real(np.array([int(m.group(1), 16)], u4).view(f4)[0])
    if m := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
        return Real(np.array([int(m.group(1), 16)], u8).view(f8)[0])
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        digits = text.rstrip("U")
        return Imm(int(digits, 8) if re.fullmatch(r"-?0[0-7]+", digits) else int(digits, 0))
    if re.fullmatch(r"-?\d+\.\d*", text):
        return Real(f8(text))
    return None
