"""setmaxnreg: warpgroups of a block hand registers to each other.

A block begins with as many registers a thread as its threads can all have. A warpgroup that asks for more waits until
others have given enough back; what no other will give is waited for without end, and is a fault here.
"""
import numpy as np

from .spaces import WARPGROUP

FILE = 65536                          # registers of a multiprocessor
UNIT = 8                              # they are allotted to a thread so many at a time


class Allotment:
    """Registers a thread of each warpgroup of a group's blocks."""

    def __init__(self, group):
        self.threads, self.warps, self.fault = group.threads, group.warps, group.fault
        whole = -(-self.threads.per // WARPGROUP)
        self.first = min(FILE // (whole * WARPGROUP) // UNIT * UNIT, 248)
        self.count = np.full((self.threads.blocks, whole), self.first)
        self.asked = np.zeros(self.count.shape, bool)

    def change(self, direction, count, mask, at):
        """setmaxnreg.inc or .dec, by whole warpgroups."""
        for number in self.warps.whole(mask, at, WARPGROUP // 32).tolist():
            place = divmod(number, self.count.shape[1])
            if count % UNIT or not 24 <= count <= 256:
                self.fault(at, f"{count} registers: a multiple of 8 from 24 to 256 is wanted", number * WARPGROUP)
            if (count < self.count[place]) != (direction == "dec") and count != self.count[place]:
                self.fault(at, f"setmaxnreg.{direction} from {self.count[place]} to {count} registers", number * WARPGROUP)
            self.count[place], self.asked[place] = count, True
            total = int(self.count[place[0]].sum()) * WARPGROUP
            if self.asked[place[0]].all() and total > FILE:
                self.fault(at, f"the block's warpgroups ask for {total} registers of {FILE}: one waits for ever",
                           number * WARPGROUP)
