"""Sleep: an idle engine lets its weights, KV cache and states go, and takes them back when it is needed.

    doze    known prefixes go to --cache-dir, or without one to host memory; then the tower is dropped
    rouse   the tower is built again from the checkpoint; the prefixes come back, so that the next turn is warm

Tokenizer, template, queue and counters stay, so an engine that sleeps still answers everything but a generation, and a
generation wakes it. Proven by tests/test_sleep.py.
"""
import ctypes
import gc
import logging
from concurrent.futures import Future
from dataclasses import dataclass, replace
from time import monotonic
from typing import Callable

import numpy as np

from .errors import Busy, EngineStopped, WakeFailed
from .kvpool import pages_for
from .prefix import PrefixCache
from .towers import load_tower

log = logging.getLogger("qwentin.engine")


@dataclass(frozen=True)
class Parked:
    """A known prefix in host memory: ids i32 [length], what the tower exports for them, and Entry's `first`."""
    ids: np.ndarray
    arrays: dict[str, np.ndarray]
    first: int = 0

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + sum(a.nbytes for a in self.arrays.values())


def give_back_memory() -> None:
    """What nothing holds any more goes to the system now; the numpy tower tells glibc to keep it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Sleeper:
    """Puts `engine` to sleep after `idle_s` seconds without work (0: never by itself); parks at most `budget` bytes."""

    def __init__(self, engine, idle_s: float, budget: int):
        self.engine, self.idle_s, self.budget = engine, idle_s, budget
        self.asleep = False
        self.parked: list[Parked] = []          # dearest first
        self.freed: dict[str, int] = {}         # bytes by part, while asleep
        self.sleeps = 0
        self.wake_s = 0.0                       # seconds that the last wake took

    # ------------------------------------------------------------------ for other threads
    def sleep(self) -> None:
        """Free the model's memory until the next request. Raises Busy while requests run or wait."""
        if self.engine.accepted:
            raise Busy(f"{self.engine.accepted} requests run or wait; the server can sleep when they are done.")
        self.call(self.doze)

    def wake_up(self) -> None:
        """Take it back now. Raises WakeFailed."""
        self.call(self.rouse)

    def call(self, note: Callable) -> None:
        """note(), as the engine's thread runs it between two steps. Raises what it raises, or EngineStopped."""
        engine, done = self.engine, Future()

        def run():
            try:
                done.set_result(note())
            except Exception as error:
                done.set_exception(error)
        with engine.wake:
            if engine.closing is not None or not engine.thread.is_alive():
                raise EngineStopped("the server is shutting down.")
            engine.inbox.append(run)
            engine.wake.notify()
        done.result()

    def report(self) -> dict:
        """For /health."""
        return {"asleep": self.asleep, "sleeps": self.sleeps, "wake_seconds": round(self.wake_s, 3),
                "freed": self.freed, "parked_prefixes": len(self.parked),
                "parked_bytes": sum(parked.nbytes for parked in list(self.parked))}

    # ------------------------------------------------------------------ the engine's thread

    @property
    def patience(self) -> float | None:
        """Seconds that the engine's thread waits for work before it should doze; None: for ever."""
        return None if self.asleep or not self.idle_s else self.idle_s

    def doze(self) -> None:
        """Let the memory go. Nothing may run."""
        engine = self.engine
        if self.asleep or engine.jobs:
            return
        try:
            engine.do_chores()
            self.park(engine.scheduler.cache)
        except Exception:                       # of no room, say: the prefixes are lost, the server is not
            log.exception("prefixes could not be parked")
            self.parked.clear()
        engine.served["evictions"] += engine.scheduler.cache.evictions
        self.freed = dict(engine.placed.memory)
        engine.install(replace(engine.placed, tower=None, memory=dict.fromkeys(self.freed, 0)))
        give_back_memory()
        self.asleep = True
        self.sleeps += 1
        log.info("asleep: %.1f MiB freed, %d prefixes parked in %.1f MiB", sum(self.freed.values()) / 2**20,
                 len(self.parked), self.report()["parked_bytes"] / 2**20)

    def park(self, cache: PrefixCache) -> None:
        """Prefixes to the disk if the engine has a store, else to host memory, the dearest first."""
        tower, room = self.engine.tower, self.budget
        if self.engine.store:
            self.engine.store.keep(cache, tower)
            return
        for entry in sorted(cache.entries, key=lambda e: -e.worth):
            arrays = tower.export_state(entry.slot, entry.table.pages, entry.length)
            parked = Parked(cache.ids_of(entry), {name: np.array(a) for name, a in arrays.items()}, entry.first)
            room -= parked.nbytes
            if room < 0:
                break
            self.parked.append(parked)

    def rouse(self) -> None:
        """Take the memory back. Raises WakeFailed; then the engine sleeps on, and the next request tries again."""
        if not self.asleep:
            return
        begun = monotonic()
        try:
            self.engine.install(load_tower(self.engine.config, self.engine.tokenizer.size)[0])
            self.engine.tower.attach()
        except Exception as error:
            log.exception("the model could not be loaded again")
            raise WakeFailed(f"The model could not be loaded again: {error}") from None
        self.asleep, self.freed = False, {}
        self.restore(self.engine.scheduler.cache)
        self.parked.clear()
        self.wake_s = monotonic() - begun
        log.info("awake after %.1f s with %d prefixes", self.wake_s, len(self.engine.scheduler.cache.entries))

    def restore(self, cache: PrefixCache) -> None:
        """Parked prefixes back into `cache`, the dearest first, as far as there is room without evicting."""
        for parked in self.parked:
            if len(cache.entries) >= cache.capacity or pages_for(len(parked.ids)) > len(cache.pool.free):
                continue
            table, slot = cache.make_place(len(parked.ids))
            if self.engine.tower.import_state(slot, table.pages, parked.arrays):
                cache.insert(parked.ids, table, slot, first=parked.first)
            else:
                cache.give_back(table, slot)
