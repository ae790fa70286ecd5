"""How large a draft tree should be: what a round costs, how often guesses are right, and what a second is worth.

    Costs         seconds of plain steps, verify steps and draft steps by their rows, as measured, lately
    Acceptance    how often a guess of each kind was right, against what was expected of it
    Plan          both together: is a further guess, a further draft step, the whole tree worth its time?

Tokens per second over many rounds is E[tokens] / E[seconds]. The tree that maximises it maximises E[tokens] - rate * seconds
in each round, where rate is the best that can be had (Dinkelbach 1967): so a row is worth verifying if it is reached with a
chance above rate * its seconds, and one more draft step if what it should add is. rate is what the last rounds gave, and at
least that of plain decoding, so a tree that does not pay is given up.

Nothing here can change what is generated, only how fast. Who calls: speculation.py and drafter.py. Proven by
tests/test_treeplan.py.
"""
from dataclasses import dataclass, field
from time import perf_counter

from .watchdog import Ladder

FORGET = 0.97           # weight of what was known before an observation
OUTLIER = 3.0           # a step this many times slower than expected says something about the machine, not about the step
CERTAIN = 0.995         # no guess is worth more
PRIOR = 4.0             # guesses that an expectation counts for before any was seen


def clock_of(tower):
    """What the seconds of a tower's steps are counted by: its own clock, if it has one."""
    return getattr(tower, "clock", perf_counter)


class Line:
    """y = a + b x fitted to what was seen lately; neither is negative."""

    def __init__(self):
        self.first = self.slope = 0.0                   # at x = 1, and for each x more
        self.sums = [0.0] * 5                           # of weights: 1, x, y, xx, xy
        self.seen = 0

    def expect(self, first: float, slope: float) -> None:
        """What is believed before anything is seen: two observations' worth."""
        self.sums = [0.0] * 5
        for x in (1, 16):
            self.add(x, first + slope * (x - 1))
        self.seen = 0

    def __call__(self, x: float) -> float:
        return self.first + self.slope * (x - 1)

    def add(self, x: float, y: float) -> None:
        self.seen += 1
        if self.seen > 3:
            y = min(y, OUTLIER * self(x))
        self.sums = [FORGET * s + v for s, v in zip(self.sums, (1.0, x, y, x * x, x * y))]
        w, sx, sy, sxx, sxy = self.sums
        spread = sxx / w - (sx / w) ** 2
        if spread > 0.25:                               # all x alike say nothing about the slope
            self.slope = max(0.0, (sxy / w - sx * sy / w ** 2) / spread)
        self.slope = min(self.slope, sy / sx)           # a row more costs no more than one alone
        self.first = sy / w - self.slope * (sx / w - 1)


class Costs:
    """Seconds of steps of one tower: plain by sequences, verify and draft by rows."""

    def __init__(self):
        self.plain, self.verify, self.draft = Line(), Line(), Line()

    @property
    def known(self) -> bool:
        """Whether a plain step was measured; what trees cost is guessed from it until they are measured too."""
        return self.plain.seen >= 2

    def add_plain(self, sequences: int, seconds: float) -> None:
        self.plain.add(sequences, seconds)
        if not self.verify.seen:
            self.verify.expect(1.3 * self.plain.first, 0.08 * self.plain.first)
        if not self.draft.seen:
            self.draft.expect(0.12 * self.plain.first, 0.02 * self.plain.first)


class Acceptance:
    """Odds of guesses by kind: any hashable name, such as ("head", depth, rank)."""

    def __init__(self):
        self.seen: dict[object, tuple[float, float, float]] = {}       # weights: guesses, right ones, expected right ones

    def chance(self, kind, expected: float) -> float:
        """`expected`, corrected by how guesses of this kind turned out."""
        _, right, wanted = self.seen.get(kind, (0.0, 0.0, 0.0))
        return min(CERTAIN, expected * (right + PRIOR / 2) / (wanted + PRIOR / 2))

    def rate(self, kind, otherwise: float) -> float:
        """How often guesses of this kind are right; `otherwise` before any was seen."""
        guesses, right, _ = self.seen.get(kind, (0.0, 0.0, 0.0))
        return (right + PRIOR * otherwise) / (guesses + PRIOR)

    def observe(self, kind, expected: float, right: bool) -> None:
        found = self.seen.get(kind, (0.0, 0.0, 0.0))
        self.seen[kind] = tuple(FORGET * s + v for s, v in zip(found, (1.0, float(right), expected)))


@dataclass
class Plan:
    """The choices of one engine. `depth` and `guesses` are the most that a tree may have, `width` guesses below one row."""
    depth: int
    guesses: int
    width: int = 4
    costs: Costs = field(default_factory=Costs)
    acceptance: Acceptance = field(default_factory=Acceptance)
    tokens: float = 0.0         # of the last rounds, fading
    seconds: float = 0.0

    def observe_round(self, tokens: int, seconds: float) -> None:
        self.tokens, self.seconds = 0.9 * self.tokens + tokens, 0.9 * self.seconds + seconds

    def rate(self, sequences: int) -> float:
        """Tokens that a second is worth."""
        plain = self.costs.plain(sequences)
        return max(sequences / plain if plain else 0.0, self.tokens / self.seconds if self.seconds else 0.0)

    def least(self, sequences: int) -> float:
        """The reach below which a row is not worth verifying."""
        return min(0.9, self.rate(sequences) * self.costs.verify.slope)

    def follows(self, depth: int, sequences: int) -> float:
        """The reach below which a row is not worth a place in a draft step for guesses at `depth`."""
        costs, odds = self.costs, self.acceptance.rate(("head", depth, 0), 0.7)
        return min(0.9, self.rate(sequences) * (costs.verify.slope + costs.draft.slope) / max(odds, 0.01))

    def deepen(self, reach: float, depth: int, rows: int, sequences: int) -> bool:
        """Whether a draft step of `rows` rows, for guesses at `depth` whose parents have `reach` in all, pays."""
        gain = reach * self.acceptance.rate(("head", depth, 0), 0.7)
        return gain > self.rate(sequences) * (self.costs.draft(rows) / sequences + self.costs.verify.slope)

    def chain(self, depth: int) -> int:
        """How many draft steps of one sequence pay, at most `depth`, decided beforehand by the head's usual odds."""
        reach, found = 1.0, 1
        while found < depth:
            reach *= self.acceptance.rate(("head", min(found, 8), 0), 0.7)
            if not self.deepen(reach, min(found + 1, 8), 1, 1):
                break
            found += 1
        return found

    def begin(self, sequences: int) -> bool:
        """Whether drafting should be tried at all, by the head's usual odds."""
        if not self.costs.known:
            return False
        rate, costs, reach, gain = self.rate(sequences), self.costs, 1.0, 0.0
        spent = costs.verify(sequences) - costs.plain(sequences)
        for depth in range(1, self.depth + 1):
            reach *= self.acceptance.rate(("head", depth, 0), 0.7)
            gain += reach * sequences
            spent += costs.draft(sequences) + costs.verify.slope * sequences
            if gain > rate * spent:
                return True
        return False

    def pays(self, expected: float, rows: int, sequences: int) -> bool:
        """Whether verifying trees of `rows` rows and `expected` tokens in all beats a plain step of these sequences."""
        extra = self.costs.verify(rows) - self.costs.plain(sequences)
        return expected - sequences > self.rate(sequences) * extra

    def ladder(self) -> Ladder:
        """For a new choice."""
        return Ladder(self.depth, self.guesses)


class Fixed(Plan):
    """Always the largest tree, whatever it costs; with a width of 1, chains of `depth`. For measuring and for tests."""

    def least(self, sequences: int) -> float:
        return 0.0

    def follows(self, depth: int, sequences: int) -> float:
        return 0.0

    def deepen(self, reach: float, depth: int, rows: int, sequences: int) -> bool:
        return True

    def begin(self, sequences: int) -> bool:
        return True

    def pays(self, expected: float, rows: int, sequences: int) -> bool:
        return True

    def ladder(self) -> Ladder:
        return Still(self.depth, self.guesses)


class Still(Ladder):
    """Of one rung."""

    def observe(self, worth: float) -> None:
        pass

    def rest(self) -> None:
        pass
