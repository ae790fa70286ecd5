"""Emitters: asynchronous copies and mbarriers."""
from .compile import emits, unsupported
from .emit_memory import CACHE, address_of
from .operands import Address, Sink

BULK = ("bulk bulk_group prefetch read complete_tx::bytes mbarrier::complete_tx::bytes shared::cluster shared::cta "
        "global L2::cache_hint L2")


@emits("cp", allow=f"async commit_group wait_group wait_all mbarrier arrive noinc shared {CACHE} {BULK}")
def copy(c, ins):
    if ins.op[1] != "async":
        raise unsupported(ins)
    if "bulk" in ins.mods:
        return bulk(c, ins)
    if "mbarrier" in ins.mods:
        return c.line(f"S.copies.report({address_of(c, ins.args[0])}, {'noinc' not in ins.mods}, @M, {c.at})")
    if ins.op[2] == "commit_group":
        return c.line("S.copies.commit(@M)")
    if ins.op[2] in ("wait_group", "wait_all"):
        return c.line(f"S.copies.wait({ins.args[0].value if ins.op[2] == 'wait_group' else -1}, @M, {c.at})")
    arguments = ins.args[:-1] if "L2::cache_hint" in ins.mods else ins.args
    size = arguments[2].value
    if size not in (4, 8, 16) or "cg" in ins.mods and size != 16:
        raise unsupported(ins, f"a copy of {size} bytes")
    valid = c.full(arguments[3], "u32") if len(arguments) > 3 else "None"
    c.line(f"S.copies.copy({address_of(c, arguments[0])}, {address_of(c, arguments[1])}, {size}, {valid}, @M, {c.at})")


def bulk(c, ins):
    """cp.async.bulk: loads that report to an mbarrier, stores in groups, prefetches (a hint)."""
    if "prefetch" in ins.mods:
        return
    if ins.op[3] == "commit_group":
        return c.line("S.copies.bulk_commit(@M)")
    if ins.op[3] == "wait_group":
        return c.line(f"S.copies.bulk_wait({ins.args[0].value}, @M)")
    target, source, size = address_of(c, ins.args[0]), address_of(c, ins.args[1]), c.read(ins.args[2], "u32")
    if ins.op[3] in ("shared::cluster", "shared::cta") and ins.op[4] == "global":
        barrier = address_of(c, ins.args[3])
        return c.line(f"S.copies.bulk_load({target}, {source}, {size}, {barrier}, @M, {c.at})")
    if ins.op[3:5] == ("global", "shared::cta") and "bulk_group" in ins.mods:
        return c.line(f"S.copies.bulk_store({target}, {source}, {size}, @M, {c.at})")
    raise unsupported(ins, "not a bulk copy that is known")


@emits("mbarrier", allow="init inval arrive arrive_drop expect_tx test_wait try_wait parity shared shared::cta "
       "release acquire relaxed cta cluster")
def mbarrier(c, ins):
    if ins.op[1] in ("test_wait", "try_wait"):
        by_parity = "parity" in ins.mods
        want = c.full(ins.args[2], "u32" if by_parity else "b64")
        return c.results(f"[S.mbarriers.test({address_of(c, ins.args[1])}, {want}, {by_parity}, @M, {c.at})]",
                         ins.args[0], "pred")
    if isinstance(ins.args[0], Address):
        state, (target, *values) = Sink(), ins.args
    else:
        state, (target, *values) = ins.args[0], ins.args[1:]
    address, value = address_of(c, target), c.read(values[0], "u32") if values else "1"
    op = ins.op[1]
    if op == "init":
        return c.line(f"S.mbarriers.init({address}, {value}, @M, {c.at})")
    if op == "inval":
        return c.line(f"S.mbarriers.invalidate({address}, @M, {c.at})")
    if op == "expect_tx":
        return c.line(f"S.mbarriers.arrive({address}, 0, {value}, False, False, @M, {c.at})")
    announced = value if "expect_tx" in ins.mods else "0"
    count = "1" if "expect_tx" in ins.mods else value
    release, drop = "relaxed" not in ins.mods, op == "arrive_drop"
    c.results(f"[S.mbarriers.arrive({address}, {count}, {announced}, {release}, {drop}, @M, {c.at})]", state, "b64")
