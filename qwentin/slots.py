"""StateSlots: which recurrent-state slot belongs to whom. Bookkeeping only; the arrays live in the tower.

A slot holds, for every linear-attention layer, S f32 [Nv, dk, dv] and the last taps-1 inputs of the convolution: the
whole past of one sequence, whatever its length. It cannot be cropped, only copied (a fork, a snapshot) or dropped.
Proven by tests/test_kvpool.py.
"""


class StateSlots:
    """`total` slots. acquire() gives one whose content is undefined: the tower clears or copies into it."""

    def __init__(self, total: int):
        self.total = total
        self.free = list(range(total - 1, -1, -1))
        self.used: set[int] = set()

    def acquire(self) -> int | None:
        """A slot number, or None when all are taken."""
        if not self.free:
            return None
        slot = self.free.pop()
        self.used.add(slot)
        return slot

    def release(self, slot: int) -> None:
        self.used.remove(slot)
        self.free.append(slot)

    def check(self) -> None:
        """AssertionError if a slot is lost or held twice."""
        assert len(self.free) + len(self.used) == self.total, "a slot is lost"
        assert set(self.free).isdisjoint(self.used) and len(set(self.free)) == len(self.free), "a slot is held twice"
