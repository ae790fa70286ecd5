"""Pace: how many prompt rows a step may have.

    nobody decodes     as many as the tower takes at once: the weights are read once for all of them
    others decode      as many as take BOUND seconds at the rate measured: so long their next token waits

Who calls: scheduler.py; engine.py says how long steps took. Proven by tests/test_pace.py.
"""
BOUND = 0.2         # seconds of a step beside streams: their gaps stay under 0.25 with sampling and copies of snapshots
FIRST = 2048        # rows beside streams before anything was measured, at most
ROUND = 128         # rows are counted in tiles
PLAIN = 512         # rows where the tower has no chunks
KEPT = 0.7          # of the rate known before, when a step brings news


class Pace:
    """`most` rows a step; with `fixed`, no fewer beside others either."""

    def __init__(self, most: int, fixed: bool = True):
        self.most, self.fixed = most, fixed
        self.rate: float | None = None          # prompt rows a second

    @classmethod
    def of(cls, asked: int, chunk: int) -> "Pace":
        """By the option (0: not given) and the tower's rows at once (0: no matter)."""
        return cls(asked or chunk or PLAIN, bool(asked) or not chunk)

    def rows(self, others: bool) -> int:
        """Of the next step; others: whether somebody decodes in it."""
        if self.fixed or not others:
            return self.most
        bound = FIRST if self.rate is None else int(self.rate * BOUND)
        return max(min(bound // ROUND * ROUND, self.most), ROUND)

    def left_s(self, rows: int) -> float | None:
        """Seconds that so many rows will take; None if nothing was measured."""
        return rows / self.rate if self.rate else None

    def ran(self, rows: int, seconds: float) -> None:
        """A step with so many prompt rows took so long; one of a few rows says nothing about many."""
        if rows >= ROUND and seconds > 0:
            self.rate = rows / seconds if self.rate is None else KEPT * self.rate + (1 - KEPT) * rows / seconds
