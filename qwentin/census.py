"""What an engine is doing, in numbers: for /health, /metrics and /slots. Never a word of anybody's prompt.

Called by any thread while the engine's own goes on: a figure may be one step old. Proven by tests/test_census.py.
"""
from time import monotonic

from .prefix import Entry
from .sequence import Clock, Sequence


def status(engine) -> dict:
    """Counts of requests, pages and tokens, the device, and bytes by part."""
    s = engine.scheduler
    busy = {page for sequence in list(s.running) for page in (sequence.table.pages if sequence.table else ())}
    died = engine.thread.ident is not None and not engine.thread.is_alive() and engine.closing is None
    unread = sum(max(q.prompt_tokens - (q.table.length if q.table else 0), 0) for q in [*s.running, *s.waiting])
    word = "failed" if died else "asleep" if engine.sleeper.asleep else "ok"
    return {"status": word, **engine.placed.report(), **engine.sleeper.report(), "running": len(s.running),
            "waiting": engine.accepted - len(engine.jobs) + len(s.waiting),
            "kv_pages": s.pool.total, "kv_pages_free": s.pool.total - len(busy),     # those of the cache can be had
            "kv_pages_cached": s.pool.total - len(s.pool.free) - len(busy), "prefixes": len(s.cache.entries),
            "state_slots": s.most, "state_slots_free": s.most - len(s.running),
            "prefill_tokens_left": unread, "prefill_tokens_per_second": round(s.pace.rate or 0, 1),
            "prefill_seconds_left": round(s.pace.left_s(unread) or 0, 3),
            **engine.speculation.counts(),
            **engine.served, "evictions": engine.served["evictions"] + s.cache.evictions}


def slots(engine) -> dict:
    """Choices that run or wait, and the ends of the conversations that a next turn would find warm."""
    s, jobs = engine.scheduler, dict(engine.jobs)
    clocks = {name: job.clock for name, job in jobs.items()}
    entries = list(s.cache.entries)
    leaves = [e for e in entries if not e.node.children]
    return {"running": [choice(q, clocks.get(q.request.id)) for q in list(s.running)],
            "waiting": [choice(q, clocks.get(q.request.id)) for q in list(s.waiting)],
            "warm": sorted((conversation(e) for e in leaves), key=lambda c: -c["tokens"]),
            "max_model_len": engine.max_model_len, "max_seqs": s.most, "asleep": engine.sleeper.asleep}


def choice(sequence: Sequence, clock: Clock | None) -> dict:
    computed = sequence.table.length if sequence.table else 0
    state = "waiting" if sequence.table is None else "decode" if sequence.generated else "prefill"
    return {"id": sequence.request.id, "choice": sequence.index, "state": state,
            "prompt_tokens": sequence.prompt_tokens, "cached_tokens": sequence.cached, "computed_tokens": computed,
            "completion_tokens": sequence.generated, "max_tokens": sequence.limit,
            "age_s": None if clock is None else round(monotonic() - clock.arrived, 3)}


def conversation(leaf: Entry) -> dict:
    """A path of the prefix tree, from its end: how long it is, how much of it others share, in how many snapshots."""
    states, shared, node = 1, 0, leaf.node.parent
    while node is not None:
        states += node.entry is not None
        if len(node.children) > 1 and not shared and node.parent is not None:
            shared = depth(node)
        node = node.parent
    return {"tokens": leaf.length, "shared_tokens": shared, "states": states, "used": leaf.used}


def depth(node) -> int:
    """Ids on the way to a node."""
    ids = 0
    while node is not None:
        ids += len(node.edge)
        node = node.parent
    return ids
