"""A thought while it grows: whether it has used up its budget, or only repeats itself.

Small and quantised models fall into loops: the same lines again and again until the context is full, and no answer. A
thought is called a loop when each of its last `loop` tokens ended a run of GRAM tokens that had already come SEEN times
before. Text that comes back once or twice, as code under discussion does, is no loop; lines in changing order are one.
Used by guide.py; proven by tests/test_thought.py.
"""
from collections import deque

GRAM = 8                # tokens of a run: shorter ones come back in any text
SEEN = 3                # earlier occurrences that make a run a repeated one
BUDGET, LOOP = "budget", "loop"


class Thought:
    """budget: the most tokens, None for no limit. loop: repeated tokens in a row that make a loop, 0 to look for none."""

    def __init__(self, budget: int | None, loop: int):
        self.budget, self.loop = budget, loop
        self.count = 0
        self.run: deque[int] = deque(maxlen=GRAM)
        self.seen: dict[tuple, int] = {}
        self.repeated = 0               # repeated tokens up to here, in a row

    def push(self, token: int) -> str | None:
        """Take a token of the thought. Why it has to be closed now, if it has."""
        self.count += 1
        if self.loop:
            self.look(token)
            if self.repeated >= self.loop:
                return LOOP
        return BUDGET if self.spent else None

    @property
    def spent(self) -> bool:
        return self.budget is not None and self.count >= self.budget

    def look(self, token: int) -> None:
        self.run.append(token)
        if len(self.run) < GRAM:
            return
        run = tuple(self.run)
        times = self.seen.get(run, 0)
        self.seen[run] = times + 1
        self.repeated = self.repeated + 1 if times >= SEEN else 0
