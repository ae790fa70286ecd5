"""mbarriers: phases completed by arrivals and by the bytes of asynchronous copies.

Phase p of an mbarrier is complete when its expected arrivals have come and no announced byte is missing; the next
phase then begins at once. A wait for parity P holds while the present phase has the other parity, that is, when the
last phase of parity P is complete. Waiters learn what all arrivers of the completed phases knew, and see the data of
the copies that reported to them; before that, the data counts as in flight.
"""
import numpy as np

from .dtypes import i4, i8, u8
from .order import MBARRIERS
from .shared import MBARRIER, NEVER, READ, WRITE
from .spaces import SHARED_BASE

BYTES = 8


class Mbarriers:
    """All mbarriers of a group; an address has one slot, in every block alike."""

    def __init__(self, group):
        self.threads, self.order, self.shared, self.fault = group.threads, group.order, group.shared, group.fault
        shape = group.threads.blocks, MBARRIERS
        self.slots = {}
        self.expected, self.pending, self.missing, self.phase = (np.zeros(shape, i8) for _ in range(4))
        self.arriving, self.known = (np.zeros(shape + (self.order.columns,), i4) for _ in range(2))
        self.attached = {}                                               # (block, slot) -> copies that report to it
        self.stalled = np.zeros(self.threads.count, bool)                # a test said no, and nothing changed since
        self.tested = np.zeros(self.threads.count, int)                  # by which instruction
        self.events = 0                                                  # how often anything changed

    def members(self, address, mask, at, how=READ):
        """[(block, slot, threads)] of the active threads, grouped by the mbarrier they name."""
        thread = self.threads.chosen(mask)
        if not thread.size:
            return []
        address = address[thread].astype(u8) & u8(0xFFFFFFFF)            # shared or generic: the offset is the same
        if (wrong := address & u8(BYTES - 1)).any():
            self.fault(at, "misaligned mbarrier", thread[np.flatnonzero(wrong)[0]])
        offset = self.shared.offsets(address, BYTES, thread, at)
        if how == READ:
            self.check(offset, thread, at)
        found = []
        for a in np.unique(address).tolist():
            slot = self.slots.setdefault(a, len(self.slots))
            if slot >= MBARRIERS:
                self.fault(at, f"more than {MBARRIERS} mbarriers in a block", thread[0])
            here = thread[address == u8(a)]
            found += [(int(b), slot, here[self.threads.block[here] == b]) for b in np.unique(self.threads.block[here])]
        return found

    def check(self, offset, thread, at):
        """Initialised, and known to be so."""
        g, each = self.shared.granules(offset, BYTES, thread)
        if (bad := self.shared.state[g] != MBARRIER).any():
            self.shared.blame(bad, g, each, at, "an mbarrier that was not initialised")
        late = self.shared.w_time[g] >= self.order.block_until[each]
        self.shared.check_writer(g[late], each[late], READ, at, "mbarrier used before its initialisation is known: ")

    # ---- instructions
    def init(self, address, count, mask, at):
        count = np.broadcast_to(count, (self.threads.count,))
        for block, slot, members in self.members(address, mask, at, WRITE):
            if len(members) > 1:
                self.fault(at, "several threads initialise one mbarrier", members[1])
            thread = members[:1]
            self.shared.touch(self.shared.offsets(address[thread] & np.array(0xFFFFFFFF, address.dtype), BYTES, thread,
                                                  at), BYTES, thread, at, WRITE, MBARRIER)
            self.expected[block, slot] = self.pending[block, slot] = int(count[thread[0]])
            self.missing[block, slot] = self.phase[block, slot] = 0
            self.arriving[block, slot] = 0

    def invalidate(self, address, mask, at):
        for block, slot, members in self.members(address, mask, at):
            offset = self.shared.offsets(address[members] & np.array(0xFFFFFFFF, address.dtype), BYTES, members, at)
            g, _ = self.shared.granules(offset, BYTES, members)
            self.shared.state[g] = NEVER

    def arrive(self, address, count, expect, release, drop, mask, at):
        """Arrivals (count each) after announcing `expect` bytes each -> the phase they arrived in."""
        count, expect = (np.broadcast_to(x, (self.threads.count,)).astype(i8) for x in (count, expect))
        token = np.zeros(self.threads.count, u8)
        for block, slot, members in self.members(address, mask, at):
            token[members] = self.phase[block, slot]
            self.missing[block, slot] += expect[members].sum()
            arrivals = count[members].sum()
            if arrivals > self.pending[block, slot]:
                self.fault(at, f"{arrivals} arrivals at an mbarrier whose phase awaits {self.pending[block, slot]}",
                           members[0])
            self.pending[block, slot] -= arrivals
            if drop:
                self.expected[block, slot] -= arrivals
            if release and arrivals:
                knows = self.order.knowledge(members)
                self.arriving[block, slot] = np.maximum(self.arriving[block, slot], knows)
            self.order.tick()
            self.advance(block, slot)
        return token

    def test(self, address, want, by_parity, mask, at):
        """test_wait, try_wait -> bool. want: a parity, or the token of an arrival."""
        want, out = np.broadcast_to(want, (self.threads.count,)), np.zeros(self.threads.count, bool)
        for block, slot, members in self.members(address, mask, at):
            phase = int(self.phase[block, slot])
            done = (phase & 1) != want[members] if by_parity else phase > want[members].astype(i8)
            out[members] = done
            if done.any():
                self.order.learn(members[done], self.known[block, slot])
            self.stalled[members[~done]], self.tested[members[~done]] = True, at
        return out

    # ---- what asynchronous copies do
    def attach(self, block, slot, offset, data):
        """A copy whose bytes appear when the present phase completes."""
        self.attached.setdefault((block, slot), []).append((offset, data))

    def complete_bytes(self, block, slot, count):
        self.missing[block, slot] -= count
        self.advance(block, slot)

    def advance(self, block, slot):
        """Complete the present phase if nothing is missing."""
        self.events += 1
        if self.pending[block, slot] or self.missing[block, slot]:
            return
        first, column = block * self.threads.per, self.threads.per + slot
        for offset, data in self.attached.pop((block, slot), ()):
            self.shared.land(offset, data, column, np.full(len(offset), first))
        self.arriving[block, slot, column] = self.order.tick()
        self.known[block, slot] = np.maximum(self.known[block, slot], self.arriving[block, slot])
        self.arriving[block, slot] = 0
        self.phase[block, slot] += 1
        self.pending[block, slot] = self.expected[block, slot]

    def describe(self, thread):
        """What the mbarriers of a stuck thread's block still wait for."""
        block = int(self.threads.block[thread])
        return "; ".join(f"the mbarrier at shared offset {a - SHARED_BASE} (phase {self.phase[block, s]}) lacks "
                         f"{self.pending[block, s]} arrivals and {self.missing[block, s]} bytes"
                         for a, s in self.slots.items())
