"""Watchdog: speculation that does not pay is made smaller, then left off, and tried again; a round that hangs is reported.

    Ladder   rung 0 full trees | 1 half | 2 a quarter | 3 plain decode            one for each choice, by what it gives
             down   when a rung's trees give less than the time they take: worth below 1, averaged, after MIN_ROUNDS
             up     after CLIMB rounds that are worth more than GOOD; from plain decode after `patience` tokens, as a trial:
                    a trial that fails doubles the patience, one that holds resets it

    Alarm    a thread that looks at the clock while a round runs

worth = tokens of a round / tokens that plain decoding would have given in the same time. Who calls: speculation.py. Proven
by tests/test_watchdog.py.
"""
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from math import inf
from time import monotonic

log = logging.getLogger("qwentin.engine")

KEEP = 0.75             # of the average, with each round
MIN_ROUNDS = 6
CLIMB = 12
GOOD = 1.15
PATIENCE = 24           # plain tokens before a first trial
MOST_PATIENCE = 768


class Ladder:
    """Sizes (depth, guesses) of one choice's trees; `depth` and `guesses` are the full ones."""

    def __init__(self, depth: int, guesses: int):
        parts = [(max(1, depth // n), max(1, guesses // n)) for n in (1, 2, 4)]
        self.rungs = list(dict.fromkeys([*parts, (0, 0)]))
        self.rung = 0
        self.average: float | None = None
        self.rounds = 0                 # at this rung; at the last one, plain tokens
        self.patience = PATIENCE
        self.idle = 0                   # plain tokens in a row at a rung that has trees
        self.trial = False              # a tree is verified even if it does not seem to pay
        self.events: list[str] = []

    @property
    def size(self) -> tuple[int, int]:
        return self.rungs[self.rung]

    @property
    def plain(self) -> bool:
        return self.size == (0, 0)

    def observe(self, worth: float) -> None:
        """A round with a tree gave so much."""
        self.rounds += 1
        self.idle = 0
        self.average = worth if self.average is None else KEEP * self.average + (1 - KEEP) * worth
        if self.rounds >= MIN_ROUNDS and self.average < 1:
            if self.trial:
                self.patience = min(MOST_PATIENCE, 2 * self.patience)
            self.move(len(self.rungs) - 1 if self.trial else self.rung + 1)
        elif self.rounds >= CLIMB and self.average > GOOD:
            self.patience, self.trial = PATIENCE, False
            if self.rung:
                self.move(self.rung - 1)

    def rest(self) -> None:
        """A round without a tree went by, because trees are left off or because none seemed to pay."""
        if self.plain:
            self.rounds += 1
            if self.rounds >= self.patience:
                self.move(self.rung - 1, trial=True)
        else:
            self.idle += 1
            self.trial = self.trial or self.idle >= self.patience

    def move(self, rung: int, trial: bool = False) -> None:
        worth = "" if self.average is None else f", worth {self.average:.2f}"
        self.events.append(f"{'up' if rung < self.rung else 'down'} to {self.rungs[rung][1]} guesses after "
                           f"{self.rounds} rounds{worth}")
        self.rung, self.rounds, self.idle, self.average, self.trial = rung, 0, 0, None, trial


class Alarm:
    """Calls `ring(who, seconds)`, on a thread of its own, if a round takes longer than it may. end() waits for it."""

    def __init__(self, ring: Callable[[list, float], None]):
        self.ring = ring
        self.changed = threading.Condition()
        self.ends: float | None = None  # None: no round is watched
        self.who: list = []
        self.rang = False
        self.limit = 0.0
        self.wakes = 0.0                # when the thread looks again by itself
        self.thread: threading.Thread | None = None

    def begin(self, limit: float, who: list) -> None:
        """A round of `who` begins that should end within `limit` seconds."""
        with self.changed:
            self.limit, self.ends, self.who, self.rang = limit, monotonic() + limit, who, False
            if self.thread is None:
                self.thread = threading.Thread(target=self.watch, name="alarm", daemon=True)
                self.thread.start()
            elif self.ends < self.wakes:
                self.changed.notify()

    def end(self) -> bool:
        """The round is over: did the alarm ring? The thread sleeps on: waking it 100 times a second would cost more."""
        with self.changed:
            self.ends, rang, self.rang = None, self.rang, False
            return rang

    def watch(self) -> None:
        while True:
            with self.changed:
                self.wakes = inf if self.ends is None else self.ends
                left = self.wakes - monotonic()
                if left > 0:
                    self.changed.wait(None if left == inf else left)
                    continue
                self.ends, self.rang = None, True
                try:
                    self.ring(self.who, self.limit)
                except Exception:
                    log.exception("the alarm could not be raised")


def where(thread: threading.Thread) -> str:
    """The stack of a running thread, for the log."""
    frame = sys._current_frames().get(thread.ident)
    return "".join(traceback.format_stack(frame)) if frame else "the thread is gone"
