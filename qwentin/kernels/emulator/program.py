"""A loaded kernel: its blocks, the code generated for them, and what the analysis of its text says about it."""
from . import asyncregs, blocks as flow
from . import emit_arithmetic, emit_async, emit_convert, emit_matrix, emit_memory, emit_warp  # noqa: F401  (emitters)
from .compile import Compiler
from .dtypes import width_of
from .lower import Lowering
from .operands import Imm
from .parse import parse

SHARED_OPS = ("ld", "st", "atom", "red")
OTHER_SPACES = {"global", "param", "local", "const"}


class Program:
    """Executable PTX, ready to be launched any number of times; keeps no state of a launch."""

    def __init__(self, text, entry=None):
        self.module = parse(text)
        function = self.module.entry(entry)
        self.name, self.params, self.limits = function.name, function.params, function.limits
        lowering = Lowering(self.module, function)
        self.blocks = flow.build(lowering.flat)
        self.local_bytes = lowering.local_bytes
        compiler = Compiler(lowering, asyncregs.check(self.blocks))
        self.sources = [compiler.block(i, b) for i, b in enumerate(self.blocks)]
        self.instructions, self.namespace = compiler.instructions, compiler.namespace()
        self.register_types = lowering.register_types
        self.functions = [[None, None] for _ in self.blocks]
        code = [ins for b in self.blocks for ins in b.code + [b.last] * (b.last is not None)]
        self.granule_shift = granule_shift(code)
        self.partial_sync = any(is_partial(ins) for ins in code)
        self.warpgroups = any(ins.base in ("wgmma", "setmaxnreg") for ins in code)   # act as one
        self.polls = {i for i, b in enumerate(self.blocks) if any(is_poll(ins) for ins in b.code)}

    def function(self, number, masked):
        """The Python function of a block, compiled when it is first run."""
        made = self.functions[number][masked]
        if made is None:
            scope = {}
            exec(compile(self.sources[number][masked], f"<{self.name} block {number}>", "exec"), self.namespace, scope)
            made = self.functions[number][masked] = scope[f"block_{number}"]
        return made


def granule_shift(code):
    """log2 of the narrowest shared-memory access of a kernel (generic accesses may be shared)."""
    narrowest = 16
    for ins in code:
        if ins.base in SHARED_OPS and not OTHER_SPACES & ins.mods:
            narrowest = min(narrowest, width_of(ins.type))
        elif ins.base == "cp" and "bulk" not in ins.mods and len(ins.args) > 2:
            narrowest = min(narrowest, ins.args[2].value)
        elif ins.base == "mbarrier":
            narrowest = min(narrowest, 8)
        elif ins.mods & {"b6x16_p32", "b4x16_p64"}:
            narrowest = min(narrowest, 4)
    return narrowest.bit_length() - 1


def is_partial(ins):
    """Whether an instruction synchronises less than a block or a warp."""
    if ins.base == "mbarrier":
        return True
    if flow.is_barrier(ins):
        number, count = flow.barrier_operands(ins)
        return count is not None or "arrive" in ins.mods or not isinstance(number, Imm)
    return ins.base in ("bar", "barrier") and not (isinstance(ins.args[0], Imm) and ins.args[0].value & 0xFFFFFFFF
                                                   == 0xFFFFFFFF)


def is_poll(ins):
    """Whether an instruction can wait for another block: then all blocks must run together."""
    waits = ins.base == "ld" and {"acquire", "relaxed", "volatile"} & ins.mods
    return "global" in ins.mods and bool(waits or ins.base == "atom" and {"cas", "exch"} & ins.mods)
