"""Emitters: loads, stores, atomics, fences."""
from .compile import emits, unsupported
from .dtypes import TYPES, dtype_of, name_of, unsigned, width_of, word
from .operands import KernelParam, Param, Reg, Vector

SPACES = ("global", "shared", "local", "param", "const")
# Where data is kept in caches does not change what it is.
CACHE = ("ca cg cs cv wb wt L1::no_allocate L1::evict_first L1::evict_last L1::evict_normal L1::evict_unchanged "
         "L2::64B L2::128B L2::256B L2::cache_hint L2::evict_first L2::evict_last L2::evict_normal L2::evict_unchanged")
PLACES = "global shared shared::cta local param param::entry const v2 v4 v8"
SYNC = "relaxed acquire release acq_rel volatile mmio weak cta cluster gpu sys"
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


def space_of(ins):
    return next((s.split("::")[0] for s in ins.op[1:] if s.split("::")[0] in SPACES), "generic")


def lanes_of(ins):
    """Items of the vector an instruction moves."""
    return next((int(m[1:]) for m in ins.op if m in ("v2", "v4", "v8")), 1)


def address_of(c, operand):
    """An expression for an address, as wide as its register."""
    base, offset = operand.base, operand.offset
    kind = c.types[base.index] if isinstance(base, Reg) else dtype_of("u64")
    text = c.full(base, kind)
    if not offset:
        return text
    return f"({text} + {c.constant(kind.type(offset & (1 << 8 * kind.itemsize) - 1))})"


def sync_of(ins, plain, strong):
    """How an access synchronises: (its kind, what of acquire / release / write it does)."""
    if not ins.mods & {"relaxed", "acquire", "release", "acq_rel", "volatile", "mmio"}:
        return plain, ()
    words = {"acquire": ("acquire",), "release": ("release",), "acq_rel": ("acquire", "release")}
    said = next((words[m] for m in ins.op if m in words), ())
    return strong, said if ins.mods & {"gpu", "sys", "cluster"} else ()


@emits("ld", "ldu", allow=f"{CACHE} {PLACES} {SYNC} nc")
def load(c, ins):
    kind, destination, source = ins.type, ins.args[0], ins.args[1]
    if isinstance(source.base, (KernelParam, Param)):
        return load_param(c, destination, source, kind)
    space, size, t = space_of(ins), width_of(kind), dtype_of(kind)
    how, sync = sync_of(ins, "nc read" if "nc" in ins.mods else "read", "strong read")
    address = address_of(c, source)
    c.line(f"t = S.access.load({space!r}, {address}, {size}, {lanes_of(ins)}, {how!r}, @M, {c.at})")
    seen = f".view({name_of(t)})" if t.kind == "i" else ""               # signed: extended to a wider register
    for i, item in enumerate(destination.items if isinstance(destination, Vector) else (destination,)):
        c.write(item, f"t[{i}]{seen}", t if seen else word(size))
    if how == "strong read":
        c.line(f"S.access.strong({space!r}, {address}, {how!r}, {sync!r}, @M)")


def load_param(c, destination, source, kind):
    """Kernel parameters are constants; those of inlined calls are registers."""
    for i, item in enumerate(destination.items if isinstance(destination, Vector) else (destination,)):
        offset = source.offset + i * width_of(kind)
        if isinstance(source.base, KernelParam):
            c.write(item, f"S.param({source.base.name!r}, {offset}, {name_of(kind)})", kind)
        else:
            c.write(item, c.read(c.register((source.base.key, offset), kind), kind), kind)


@emits("st", allow=f"{CACHE} {PLACES} {SYNC}")
def store(c, ins):
    kind, target, value = ins.type, ins.args[0], ins.args[1]
    if isinstance(target.base, Param):
        for i, item in enumerate(value.items if isinstance(value, Vector) else (value,)):
            c.write(c.register((target.base.key, target.offset + i * width_of(kind)), kind), c.full(item, kind), kind)
        return
    space, size = space_of(ins), width_of(kind)
    how, sync = sync_of(ins, "write", "strong write")
    address = address_of(c, target)
    if how == "strong write":
        c.line(f"S.access.strong({space!r}, {address}, {how!r}, {sync + ('write',)!r}, @M)")
    c.line(f"S.access.store({space!r}, {address}, {c.each(value, word(size))}, {size}, {how!r}, @M, {c.at})")


@emits("atom", "red", allow=f"{PLACES} {SYNC} noftz L2::cache_hint cas exch inc dec " + " ".join(OPERATIONS))
def atomic(c, ins):
    kind, space = next(m for m in reversed(ins.op) if m in TYPES), space_of(ins)
    operation, = [m for m in ins.op[1:] if m in OPERATIONS]
    returns = ins.base == "atom"
    target, *values = ins.args[1 if returns else 0:]
    if "L2::cache_hint" in ins.mods:
        values.pop()
    if kind in ("f32", "f64") and operation not in ("add", "exch"):
        raise unsupported(ins)
    if kind in HALVES:
        if operation != "add":
            raise unsupported(ins)
        operation, kind = f"add.{kind}", unsigned(kind)
    _, sync = sync_of(ins, "", "")
    sync = {"write"} | set(sync) | ({"acquire"} if returns else set())
    lists = "[" + ", ".join("[S.full(x) for x in " + c.each(v, kind) + "]" for v in values) + "]"
    call = (f"S.access.atomic({space!r}, {address_of(c, target)}, {operation!r}, {lists}, {name_of(kind)}, "
            f"{tuple(sorted(sync))!r}, @M, {c.at})")
    if returns:
        return c.results(call, ins.args[0], kind)
    c.line(call)


@emits("membar", "fence", allow="gl sys cta gpu cluster sc acq_rel acquire release proxy async async.global "
       "async.shared::cta global shared::cta shared::cluster mbarrier_init alias generic sync_restrict::shared::cta")
def fence(c, ins):
    """A proxy fence lets asynchronous operations see ordinary writes; a device-wide one publishes (races.py)."""
    if {"proxy", "async"} <= ins.mods and "global" not in ins.mods:
        return c.line("S.shared.proxy_fence(@M)")
    if ins.mods & {"gl", "gpu", "sys", "cluster"} and "proxy" not in ins.mods and "mbarrier_init" not in ins.mods:
        c.line("S.access.fence(@M)")


@emits("isspacep", allow="global shared shared::cta local")
def is_space(c, ins):
    windows = {"shared": "0x7E00", "local": "0x7D00"}
    high, space = f"({c.full(ins.args[1], 'u64')} >> u8(32))", space_of(ins)
    if space in windows:
        return c.write(ins.args[0], f"({high} == u8({windows[space]}))", "pred")
    c.write(ins.args[0], f"(({high} != u8(0x7E00)) & ({high} != u8(0x7D00)))", "pred")


@emits("createpolicy", allow=f"fractional range global {CACHE}")
def create_policy(c, ins):
    """An opaque token: nothing here depends on caches."""
    c.write(ins.args[0], "S.full(u8(0))", "b64")
