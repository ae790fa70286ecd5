"""Emitters: what the lanes of a warp do together, calls out of the PTX, traps."""
from .compile import emits, unsupported
from .dtypes import name_of
from .operands import Pair


@emits("shfl", allow="sync up down bfly idx")
def shuffle(c, ins):
    destination = ins.args[0]
    value, valid = (destination.first, destination.second) if isinstance(destination, Pair) else (destination, None)
    a, by, control, members = (c.read(x, "u32") for x in ins.args[1:5])
    c.line(f"t = S.warps.shuffle({ins.op[2]!r}, {a}, {by}, {control}, {members}, @M, {c.at})")
    c.write(value, "t[0]", "u32")
    if valid is not None:
        c.write(valid, "t[1]", "pred")


@emits("vote", allow="sync ballot any all uni")
def vote(c, ins):
    predicate, members = c.full(ins.args[1], "pred"), c.read(ins.args[2], "u32")
    kind = "b32" if ins.op[2] == "ballot" else "pred"
    c.results(f"[S.warps.vote({ins.op[2]!r}, {predicate}, {members}, @M, {c.at})]", ins.args[0], kind)


@emits("activemask")
def active_mask(c, ins):
    c.results("[S.warps.ballot(None, @M)]", ins.args[0], "b32")


@emits("elect", allow="sync")
def elect(c, ins):
    members = c.read(ins.args[1], "u32")
    c.line(f"S.warps.converged({members}, @M, {c.at}); t = S.warps.first_lane(@M)")
    c.write(ins.args[0].first, "t", "u32")
    c.write(ins.args[0].second, "S.lane_is(t)", "pred")


@emits("redux", allow="sync add min max and or xor")
def reduce(c, ins):
    if ins.type not in ("u32", "s32", "b32"):
        raise unsupported(ins)
    value, members = c.full(ins.args[1], ins.type), c.read(ins.args[2], "u32")
    c.results(f"[S.warps.reduce({ins.op[2]!r}, {value}, {members}, @M, {c.at})]", ins.args[0], ins.type)


@emits("match", allow="sync any all")
def match(c, ins):
    value, members, op = c.full(ins.args[1], ins.type), c.read(ins.args[2], "u32"), ins.op[1]
    c.line(f"t = S.warps.match({op!r}, {value}, {members}, @M, {c.at})")
    destination = ins.args[0]
    if isinstance(destination, Pair):
        c.write(destination.first, "t[0]", "b32")
        return c.write(destination.second, "t[1]", "pred")
    c.write(destination, "t[0]", "b32")


@emits("bar", "barrier", allow="warp sync")
def warp_barrier(c, ins):
    """bar.warp.sync; barriers of a block end a block of code and are the scheduler's."""
    c.line(f"S.warps.barrier({c.read(ins.args[0], 'u32')}, @M, {c.at})")


@emits("external")
def external(c, ins):
    c.line(f"S.external({ins.args[0].name!r}, @M, {c.at})")


@emits("trap", "brkpt")
def trap(c, ins):
    c.line(f"S.fault_if_any({c.at}, 'trap', @M)")


@emits("mapa", "getctarank", allow="shared::cluster")
def cluster_address(c, ins):
    """A cluster is one block: its shared memory is everybody's, and its rank 0."""
    source = c.full(ins.args[1], ins.type)
    c.write(ins.args[0], source if ins.base == "mapa" else f"S.full({name_of('u32')}(0))",
            ins.type if ins.base == "mapa" else "u32")


@emits("setmaxnreg", allow="inc dec sync aligned")
def allot(c, ins):
    c.line(f"S.allotment.change({ins.op[1]!r}, {ins.args[0].value}, @M, {c.at})")
