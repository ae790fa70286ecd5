"""Registers that wgmma works on while the threads go on: found wrong before anything runs.

wgmma.mma_async reads its A fragments and updates its accumulators until a wgmma.wait_group retires its group; until
then nobody else may touch them. And it sees what other instructions put into them only after a wgmma.fence, one of
which must also come before the first wgmma. This is a dataflow analysis over the basic blocks, so nothing is paid for
it while the kernel runs; what it finds becomes a fault at the instruction, if that is ever executed.

`mov` between registers is a renaming (ptxas keeps both in one place): the copy is in flight, or unfenced, as its
source is. A `mov` of a constant is not held against anybody: compilers put those anywhere.
"""
from dataclasses import dataclass, field

from .operands import Address, Not, Pair, Reg, Vector

OLDEST = 16                           # ages are told apart up to here: no kernel keeps more groups in flight


@dataclass
class State:
    """flying: register -> (age: how many groups were committed since, "accumulator" or "A"); dirty: unfenced."""
    flying: dict = field(default_factory=dict)
    dirty: frozenset = frozenset()
    fenced: bool = False

    def join(self, other):
        """What may hold where two paths meet."""
        if other is None:
            return State(dict(self.flying), self.dirty, self.fenced)
        flying = {r: min(s for s in (self.flying.get(r), other.flying.get(r)) if s)
                  for r in self.flying.keys() | other.flying.keys()}
        return State(flying, self.dirty | other.dirty, self.fenced and other.fenced)


def registers(operand):
    """The registers in an operand."""
    match operand:
        case Reg(index):
            return [index]
        case Vector(items):
            return [r for item in items for r in registers(item)]
        case Pair(first, second):
            return registers(first) + registers(second)
        case Address(base, _):
            return registers(base)
        case Not(inner):
            return registers(inner)
    return []


def destinations(ins):
    """The registers an instruction writes: its first operand, unless that is an address (or a barrier's)."""
    if not ins.args or isinstance(ins.args[0], Address) or ins.base in ("bar", "barrier"):
        return []
    return registers(ins.args[0])


def step(state, ins):
    """Advance a state over one instruction -> what is wrong with it, or None."""
    if ins.base == "wgmma":
        return wgmma(state, ins)
    if ins.base == "mov" and len(ins.args) == 2 and isinstance(ins.args[0], Reg):
        to, source = ins.args[0].index, ins.args[1]
        wrong = to in state.flying and not (isinstance(source, Reg) and source.index in state.flying)
        state.flying.pop(to, None)
        state.dirty -= {to}
        if isinstance(source, Reg):
            if source.index in state.flying:
                state.flying[to] = state.flying[source.index]
            if source.index in state.dirty:
                state.dirty |= {to}
        return "overwrites a register that a wgmma in flight uses: wait for its group first" if wrong else None
    written = destinations(ins)
    message = None
    if state.flying:
        used = {r for a in ins.args for r in registers(a)}
        if any(state.flying.get(r, (0, ""))[1] == "accumulator" for r in used):
            message = "uses the accumulator of a wgmma in flight: wgmma.wait_group for its group must come first"
        elif any(r in state.flying for r in written):
            message = "overwrites a register that a wgmma in flight uses: wait for its group first"
    state.dirty |= frozenset(written)
    return message


def wgmma(state, ins):
    if ins.op[1] == "fence":
        state.dirty, state.fenced = frozenset(), True
    elif ins.op[1] == "commit_group":
        state.flying = {r: (min(age + 1, OLDEST), role) for r, (age, role) in state.flying.items()}
    elif ins.op[1] == "wait_group":
        state.flying = {r: s for r, s in state.flying.items() if s[0] <= ins.args[0].value}
    else:
        accumulators, fragments = registers(ins.args[0]), []
        if isinstance(ins.args[1], Vector):
            fragments = registers(ins.args[1])
        message = None
        if not state.fenced:
            message = "the first wgmma needs a wgmma.fence before it"
        elif state.dirty.intersection(accumulators + fragments):
            message = "its registers were written with no wgmma.fence in between"
        elif any(state.flying.get(r, (0, ""))[1] == "accumulator" for r in fragments):
            message = "takes the accumulator of a wgmma in flight as A"
        state.flying.update({r: (0, "A") for r in fragments})
        state.flying.update({r: (0, "accumulator") for r in accumulators})
        return message
    return None


def check(blocks):
    """{id of an instruction: what is wrong with it}"""
    if not any(ins.base == "wgmma" for b in blocks for ins in b.code):
        return {}
    entry, found, todo = {0: State()}, {}, [0]
    while todo:
        number = todo.pop()
        state = entry[number].join(None)
        for ins in blocks[number].code:
            message = step(state, ins)
            if message:
                found[id(ins)] = message
        for successor in blocks[number].successors():
            merged = state.join(entry.get(successor))
            if merged != entry.get(successor):
                entry[successor] = merged
                todo.append(successor)
    return found
