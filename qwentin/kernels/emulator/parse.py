"""PTX text -> a Module: its functions (bodies still text), its variables, its source files.

Line info stays in the bodies as `.loc FILE LINE COLUMN;` statements, so that every instruction knows its Python line.
"""
import re
from dataclasses import dataclass, field

import numpy as np

from .dtypes import TYPES, dtype_of, i8, u1, width_of
from .errors import PtxError, Unsupported
from .spaces import SHARED_BASE


@dataclass
class Function:
    """A .entry or .func. params: (name, bytes) pairs; body: None where it is only declared."""
    name: str
    params: list
    returns: list
    body: str
    is_entry: bool
    limits: dict                      # .maxntid / .reqntid: the block sizes that the text allows


@dataclass
class Module:
    """shared: name -> address of a static variable; dynamic: names of the extern array; data: name -> initial bytes."""
    functions: dict = field(default_factory=dict)
    shared: dict = field(default_factory=dict)
    dynamic: dict = field(default_factory=dict)
    data: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)
    shared_bytes: int = 0
    target: str = ""

    def entry(self, name=None):
        """The kernel: the only one, or the one called `name`."""
        found = [f for f in self.functions.values() if f.is_entry and f.body is not None and name in (None, f.name)]
        if len(found) != 1:
            raise PtxError(f"the PTX has {len(found)} kernels{f' named {name}' if name else ''}, wanted exactly one")
        return found[0]

    def place(self, file, line):
        """"file:line" of a .loc directive."""
        return f"{self.files.get(file, f'file {file}')}:{line}" if line else ""


def parse(text):
    """One PTX text, or several that call one another, as one Module."""
    module = Module()
    for part in [text] if isinstance(text, str) else text:
        for number, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', part, re.M):
            module.files[int(number)] = name
        if target := re.search(r"^\s*\.target\s+(\w+)", part, re.M):
            module.target = module.target or target.group(1)
        for head, body in top_level(cleaned(part)):
            if ".func" in head or ".entry" in head:
                add_function(module, head, body)
            elif head:
                add_variable(module, head)
    return module


def cleaned(text):
    """The text without comments and module directives, every .loc a statement."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"^\s*\.section\s[^{]*\{[^}]*\}", "", text, flags=re.M)
    text = re.sub(r"^\s*\.(version|target|address_size|file)\b[^\n]*$", "", text, flags=re.M)
    return re.sub(r"^\s*\.loc\s+(\d+)\s+(\d+)[^\n]*$", r".loc \1 \2;", text, flags=re.M)


def top_level(text):
    """(head, body) of every declaration; body is None for what ends in a semicolon."""
    piece, at = re.compile(r"\s*([^;{]*)([;{])", re.S), 0
    while m := piece.match(text, at):
        head, at = m.group(1).strip(), m.end()
        if m.group(2) == ";":
            yield head, None
        elif "=" in head:                                                # an initialiser in braces
            end = text.index(";", at)
            yield head + "{" + text[at:end], None
            at = end + 1
        else:
            end, depth = at, 1
            while depth:
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                end += 1
            yield head, text[at:end - 1]
            at = end


def split_list(text):
    """A comma-separated list; brackets keep their commas."""
    parts, depth, current = [], 0, ""
    for ch in text:
        depth += (ch in "{[(") - (ch in "}])")
        if ch == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += ch
    return parts + [current.strip()] if current.strip() else parts


def parameter(text):
    """(name, bytes) of one `.param .align 8 .b8 name[16]`."""
    name, _, count = text.split()[-1].partition("[")
    kind = re.search(r"\.([busf]\d+)\b", text).group(1)
    return name, width_of(kind) * int(count.rstrip("]") or 1 if count else 1)


def add_function(module, head, body):
    m = re.search(r"\.(entry|func)\s*(?:\(([^)]*)\))?\s*([\w$]+)\s*(?:\((.*?)\))?", head, re.S)
    kind, returns, name, params = m.groups()
    limits = {key: tuple(int(n) for n in re.findall(r"\d+", sizes))
              for key, sizes in re.findall(r"\.(maxntid|reqntid)\s+([\d,\s]+)", head)}
    if body is not None or name not in module.functions:
        module.functions[name] = Function(
            name, [parameter(p) for p in split_list(params or "")],
            [parameter(p)[0] for p in split_list(returns or "")], body, kind == "entry", limits)


def add_variable(module, declaration):
    """A .shared, .global or .const variable."""
    m = re.match(r"((?:\.\w+\s+(?:\d+\s+)?)*)\.(\w+)\s+([\w$]+)\s*(\[(\d*)\])?\s*(?:=\s*(.*))?$", declaration, re.S)
    if not m or m.group(2) not in TYPES:
        raise Unsupported(f"declaration `{declaration[:80]}`")
    qualifiers, kind, name, bracket, count, initial = m.groups()
    align = re.search(r"\.align\s+(\d+)", qualifiers)
    align = int(align.group(1)) if align else width_of(kind)
    size = width_of(kind) * (int(count) if count else 0 if bracket else 1)
    if name in module.shared:                                            # of a function inlined before
        return
    if ".shared" in qualifiers and size:
        at = -(-module.shared_bytes // align) * align
        module.shared[name], module.shared_bytes = SHARED_BASE + at, at + size
    elif ".shared" in qualifiers:
        module.dynamic[name] = align
    elif ".global" in qualifiers or ".const" in qualifiers:
        module.data[name] = initial_bytes(kind, size, initial)
    elif ".extern" not in qualifiers:
        raise Unsupported(f"declaration `{declaration[:80]}`")


def initial_bytes(kind, size, initial):
    """What a global variable holds when the module is loaded."""
    data = np.zeros(max(size, 1), u1)
    if initial:
        if re.search(r"[a-zA-Z_$]{2,}", re.sub(r"0[xX][0-9a-fA-F]+", "", initial)):
            raise Unsupported(f"initialiser `{initial[:60]}`")
        values = [int(v, 0) for v in re.findall(r"-?\b(?:0[xX][0-9a-fA-F]+|\d+)", initial)]
        raw = np.array(values, object).astype(i8).astype(dtype_of(kind)).view(u1)
        data[:raw.size] = raw
    return data
