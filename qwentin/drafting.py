"""Drafting: what speculation remembers of one choice between rounds. Sequence holds it; nobody else sees it.

    accepted    rows of the tree verified last that the text ran through: the tower commits them with the next step
    head        which rows the draft head's cache lacks, and the hiddens that they are made from
    lookup      index of the ids so far
    ladder      how large trees may be at present (watchdog.py)
    tally       counts for the answer's x_qwentin

Who calls: sequence.py, scheduler.py, drafter.py, speculation.py. Proven by tests/test_drafter.py.
"""
import numpy as np

from .kvpool import PAGE
from .lookup import PromptLookup
from .request import Speculated
from .tree import DraftTree
from .watchdog import Ladder

COUNTS = ("rounds", "plain", "guesses", "accepted", "lookup")
MOST_EVENTS = 100


class HeadRows:
    """Which rows of a sequence the draft head's cache lacks, and the main model's hiddens that they are made from.

    0 ........ first ........ seeded ........ end          first: a page's beginning; the head reads nothing before it
      not made        made        to be made from `hidden`
    """

    def __init__(self, length: int = 0, last: np.ndarray | None = None, first: int = 0):
        """Rows first .. length - 1 are there; with `last`, the hidden of the last, that one is to be made anew."""
        self.end, self.seeded, self.first = length, max(first, length - (last is not None)), first
        self.parts = [] if last is None else [last]

    @property
    def hidden(self) -> np.ndarray | None:
        """f32 [k, D] of positions end - k .. end - 1."""
        if len(self.parts) > 1:
            self.parts = [np.concatenate(self.parts)]
        return self.parts[0] if self.parts else None

    @hidden.setter
    def hidden(self, rows: np.ndarray | None) -> None:
        self.parts = [] if rows is None else [rows]

    def skip(self, count: int) -> None:
        """The next positions go by without rows: the head reads what comes after the page that they end in."""
        self.end += count
        self.first = self.seeded = -(-self.end // PAGE) * PAGE
        self.hidden = None

    def push(self, hidden: np.ndarray) -> None:
        """The hiddens of the next positions, f32 [t, D]."""
        self.parts.append(hidden)                   # put together when they are asked for, not row by row
        self.end += len(hidden)

    def window(self, most: int) -> int:
        """Where the head begins to read, a page's beginning, if it reads `most` rows and what a page has more; 0: all."""
        return max(self.first, (self.end - most) // PAGE * PAGE) if most else self.first

    def take(self, until: int) -> np.ndarray:
        """Hiddens of the positions seeded .. until - 1, which count as seeded from now on."""
        first = self.end - len(self.hidden)
        self.seeded = max(self.seeded, first)       # what came from elsewhere without its hiddens stays as it is
        found = self.hidden[self.seeded - first:until - first]
        self.seeded = until
        self.hidden = self.hidden[min(until, self.end - 1) - first:].copy()
        return found

    def lacks(self, until: int) -> bool:
        """Whether there are hiddens of rows before `until` that are not in the head's cache."""
        return self.hidden is not None and self.seeded < until

    def feed(self, count: int, seeded: int, last: np.ndarray) -> None:
        """`count` positions went by; the first `seeded` rows are there. last: the last one's hidden, f32 [1, D]."""
        self.end += count
        self.seeded, self.hidden = max(self.seeded, self.end - count + seeded), last.copy()

    @property
    def last(self) -> np.ndarray | None:
        """The hidden of the last position, f32 [1, D]."""
        return None if self.hidden is None else self.hidden[-1:].copy()


class Tally:
    """Counts of one choice, or of an engine."""

    def __init__(self):
        self.rounds = self.plain = self.guesses = self.accepted = self.lookup = self.largest = 0
        self.offered: list[int] = []            # by depth: rounds that came this far and had a guess there
        self.taken: list[int] = []              # of these, rounds in which one was right
        self.events: list[str] = []
        self.happened = 0                       # events, those that were not kept too

    def count(self, tree: DraftTree, path: list[int]) -> None:
        """A round verified `tree`; the text ran through `path`."""
        deepest, came = max(tree.depths), len(path) - 1
        self.rounds += 1
        self.guesses += len(tree) - 1
        self.accepted += came
        self.lookup += sum(tree.origins[row] is not None and tree.origins[row][0][0] == "lookup" for row in path[1:])
        self.largest = max(self.largest, len(tree) - 1)
        for counts in (self.offered, self.taken):
            counts += [0] * (deepest - len(counts))
        below = bool(tree.children[path[-1]])           # a guess was made there, in vain
        for depth in range(came + below):
            self.offered[depth] += 1
            self.taken[depth] += depth < came

    def add(self, other: "Tally") -> None:
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = max(self.largest, other.largest)
        for mine, theirs in ((self.offered, other.offered), (self.taken, other.taken)):
            mine += [0] * (len(theirs) - len(mine))
            for depth, count in enumerate(theirs):
                mine[depth] += count
        self.happened += max(other.happened, len(other.events))
        self.events = (self.events + other.events)[-MOST_EVENTS:]

    def frozen(self) -> Speculated:
        return Speculated(**{name: getattr(self, name) for name in COUNTS}, largest=self.largest,
                          offered=tuple(self.offered), taken=tuple(self.taken), events=tuple(self.events))


class Drafting:
    def __init__(self):
        self.accepted: list[int] = []
        self.head = HeadRows()
        self.lookup = PromptLookup()
        self.ladder: Ladder | None = None       # None until the first round
        self.tally = Tally()
        self.off = ""                           # why nothing is drafted any more

    def forget(self) -> None:
        """The rows that the tower had are gone: everything is computed again."""
        self.accepted, self.head = [], HeadRows()
