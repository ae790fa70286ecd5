"""The parts of an instruction after parsing: what its operands are, and where in the source it stands."""
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reg:
    """A register, by its number in the program's register file."""
    index: int


@dataclass(frozen=True)
class Imm:
    """An integer constant; its type is the instruction's."""
    value: int


@dataclass(frozen=True)
class Real:
    """A floating-point constant, numpy float32 or float64."""
    value: object


@dataclass(frozen=True)
class Special:
    """A special register such as %tid.x."""
    name: str


@dataclass(frozen=True)
class Symbol:
    """The address of a module-level variable."""
    name: str


@dataclass(frozen=True)
class Local:
    """An offset into the thread's local memory."""
    offset: int


@dataclass(frozen=True)
class Param:
    """A .param variable of an inlined call: its bytes live in registers, one for each offset."""
    key: tuple


@dataclass(frozen=True)
class KernelParam:
    """A parameter of the kernel, only ever loaded from."""
    name: str


@dataclass(frozen=True)
class Vector:
    """{a, b, ...}"""
    items: tuple


@dataclass(frozen=True)
class Address:
    """[base + offset]"""
    base: object
    offset: int


@dataclass(frozen=True)
class Pair:
    """a|b: two destinations."""
    first: object
    second: object


@dataclass(frozen=True)
class Not:
    """!p"""
    operand: object


@dataclass(frozen=True)
class Sink:
    """_: a destination that nobody reads."""


@dataclass(frozen=True)
class Target:
    """A label, with the ids of the scopes that can see it (outermost first)."""
    name: object
    scopes: tuple


@dataclass
class Instruction:
    """op: the dotted parts of the opcode; guard: the predicate register (or None), `negated` if it is @!p."""
    op: tuple
    args: list
    text: str
    place: str = ""
    guard: Reg = None
    negated: bool = False
    mods: frozenset = field(init=False)

    def __post_init__(self):
        self.mods = frozenset(self.op[1:])

    @property
    def base(self):
        return self.op[0]

    @property
    def type(self):
        return self.op[-1]
