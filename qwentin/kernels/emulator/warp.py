"""What the lanes of a warp do together: shuffles, votes, matches, reductions, barriers of a warp."""
import numpy as np

from .arithmetic import leading_zeros
from .dtypes import i4, u4
from .spaces import WARP

REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
              "xor": np.bitwise_xor}


def lane_words(masks):
    """Masks over lanes -> one u32 a warp."""
    return np.packbits(masks.reshape(-1, WARP), axis=1, bitorder="little").view(u4).ravel()


class Warps:
    """Collective operations of a group's warps."""

    def __init__(self, group):
        self.threads, self.order, self.fault = group.threads, group.order, group.fault

    def ballot(self, predicate, mask):
        """A bit for each active lane where the predicate holds (None: for each active lane), in every lane."""
        active = self.threads.active(mask)
        return np.repeat(lane_words(active if predicate is None else active & predicate), WARP)

    def vote(self, op, predicate, members, mask, at):
        """vote.sync."""
        self.converged(members, mask, at)
        yes, here = self.ballot(predicate, mask), self.ballot(None, mask)
        return {"ballot": yes, "any": yes != 0, "all": yes == here, "uni": (yes == here) | (yes == 0)}[op]

    def first_lane(self, mask):
        """The lowest active lane of each warp, in every lane (elect.sync)."""
        bits = self.ballot(None, mask)
        return u4(31) - leading_zeros(np.maximum(bits & (~bits + u4(1)), u4(1)))

    def converged(self, members, mask, at):
        """Every living lane named by the member mask must execute the instruction together with the others."""
        active = self.threads.active(mask)
        here, alive = self.ballot(None, mask), self.ballot(None, None)
        members = np.broadcast_to(members, active.shape).astype(u4)
        if (bad := active & ((members & alive & ~here) != 0)).any():
            self.fault(at, "a lane in the member mask is not here: the warp is diverged", np.flatnonzero(bad)[0])
        if (bad := active & ((members >> self.threads.lane & u4(1)) == 0)).any():
            self.fault(at, "the executing lane is not in its own member mask", np.flatnonzero(bad)[0])

    def whole(self, mask, at, warps=1):
        """Numbers of the warps (or groups of `warps` warps) that execute an .aligned instruction, complete."""
        active = self.threads.active(mask).reshape(-1, WARP * warps)
        some = active.any(1)
        if not active[some].all():
            first = int(np.flatnonzero(some & ~active.all(1))[0]) * WARP * warps
            self.fault(at, f"an .aligned instruction needs all {WARP * warps} lanes of its "
                           f"{'warp' if warps == 1 else 'warpgroup'}", first)
        return np.flatnonzero(some)

    def shuffle(self, mode, value, by, control, members, mask, at):
        """shfl.sync -> (value, whether the source lane was in range)."""
        self.converged(members, mask, at)
        full = lambda x: np.broadcast_to(x, (self.threads.count,))
        value, by, control = full(value), full(by).astype(i4) & 31, full(control).astype(i4)
        lane, segment, clamp = self.threads.lane.astype(i4), control >> 8 & 31, control & 31
        low, top = lane & segment, lane & segment | clamp & ~segment
        source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": low | by & ~segment}[mode]
        valid = source >= top if mode == "up" else source <= top
        source = self.threads.index - lane + np.where(valid, source, lane)
        active = self.threads.active(mask)
        if (bad := active & ~active[source]).any():
            self.fault(at, "shfl reads a lane that is not active", np.flatnonzero(bad)[0])
        return value[source], valid

    def barrier(self, members, mask, at):
        self.converged(members, mask, at)
        self.order.warps(mask)

    def reduce(self, op, value, members, mask, at):
        """redux.sync"""
        self.converged(members, mask, at)
        active, rows = self.threads.active(mask).reshape(-1, WARP), value.reshape(-1, WARP)
        out = np.zeros_like(rows)
        for w in np.flatnonzero(active.any(1)):
            out[w] = REDUCTIONS[op].reduce(rows[w][active[w]])
        return out.ravel()

    def match(self, op, value, members, mask, at):
        """match.sync: the lanes with an equal value (any), or all lanes and whether they agree (all)."""
        self.converged(members, mask, at)
        rows, active = value.reshape(-1, WARP), self.threads.active(mask).reshape(-1, 1, WARP)
        equal = lane_words((rows[:, :, None] == rows[:, None, :]) & active)
        if op == "any":
            return equal, None
        agree = equal == self.ballot(None, mask)
        return np.where(agree, equal, u4(0)), agree
