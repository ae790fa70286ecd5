"""The threads of a group of blocks that run together: who they are, which are alive, what they see of themselves.

Arrays over threads have shape [threads]: blocks follow one another, each padded. A mask is such an
array of bool, or None for "all of them".
"""
import numpy as np

from .dtypes import u4, u8
from .errors import Unsupported
from .spaces import WARP


class Threads:
    """ids: the linear ids of the blocks in this group; per: threads a block, padded to whole warps (or warpgroups)."""

    def __init__(self, grid, block, ids, per):
        self.grid, self.shape, self.ids = grid, block, np.asarray(ids)
        self.block_size, self.per = block[0] * block[1] * block[2], per
        self.blocks, self.count = len(ids), len(ids) * self.per
        self.index = np.arange(self.count)
        self.local = np.tile(np.arange(self.per), self.blocks)           # index within the block
        self.block = np.repeat(np.arange(self.blocks), self.per)         # index of the block within the group
        self.number = self.ids[self.block] * self.per + self.local
        self.warp, self.lane = self.index // WARP, (self.local % WARP).astype(u4)
        self.real = None if self.per == self.block_size else self.local < self.block_size
        self.live = self.real
        self.special_values = {}

    def active(self, mask):
        """A mask as an array, without threads that have left or never were."""
        mask = mask if mask is not None else self.live
        if mask is None:
            return np.ones(self.count, bool)
        return mask if self.live is None else mask & self.live

    def pick(self, mask):
        """The active threads' indices, or None for every thread."""
        mask = self.live if mask is None else mask
        if mask is None:
            return None
        if self.live is not None:
            mask = mask & self.live
        chosen = np.flatnonzero(mask)
        return None if len(chosen) == self.count else chosen

    def chosen(self, mask):
        """The active threads' indices."""
        index = self.pick(mask)
        return self.index if index is None else index

    def any_warp(self, mask):
        """Which warps have a thread in the mask: [warps] bool."""
        return mask.reshape(-1, WARP).any(1)

    def name(self, thread):
        """A thread as a message names it: "block (1, 0, 0), thread (37, 0, 0)"."""
        block = coordinates(int(self.ids[self.block[thread]]), self.grid)
        return f"block {block}, thread {coordinates(int(self.local[thread]), self.shape)}"

    def linear(self, thread):
        """Numbers of threads in the whole grid."""
        return self.number if thread is self.index else self.number[thread]

    def special(self, name, sizes):
        """A special register, u64. sizes: what %dynamic_smem_size and %total_smem_size are."""
        if name not in self.special_values:
            value = self.coordinate(name)
            if value is None:
                value = self.lane_mask(name)
            if value is None:
                value = {**CONSTANT_REGISTERS, **sizes}.get(name)
            if value is None:
                raise Unsupported(f"special register {name}")
            self.special_values[name] = np.broadcast_to(np.asarray(value), (self.count,)).astype(u8)
        return self.special_values[name]

    def coordinate(self, name):
        """%tid.x and its relatives; a cluster is one block."""
        base, _, axis = name.partition(".")
        axis = "xyz".find(axis) if axis else None
        block_id = self.ids[self.block]
        if base in ("%laneid", "%warpid"):
            return self.lane if base == "%laneid" else self.local // WARP
        if axis is None or axis < 0:
            return None
        inner = int(np.prod(self.shape[:axis])), int(np.prod(self.grid[:axis]))
        values = {"%tid": self.local // inner[0] % self.shape[axis], "%ntid": self.shape[axis],
                  "%ctaid": block_id // inner[1] % self.grid[axis], "%nctaid": self.grid[axis],
                  "%cluster_ctaid": 0, "%cluster_nctaid": 1, "%nclusterid": self.grid[axis]}
        return values.get("%ctaid" if base == "%clusterid" else base)

    def lane_mask(self, name):
        one, lane = u8(1), self.lane.astype(u8)
        below, upto = (one << lane) - one, (u8(2) << lane) - one
        full = u8(0xFFFFFFFF)
        return {"%lanemask_eq": one << lane, "%lanemask_lt": below, "%lanemask_le": upto, "%lanemask_gt": full - upto,
                "%lanemask_ge": full - below}.get(name)


# One multiprocessor, and no clock: time has no meaning here.
CONSTANT_REGISTERS = {"%smid": 0, "%nsmid": 1, "%clock": 0, "%clock64": 0, "%globaltimer": 0, "%cluster_ctarank": 0,
                      "%cluster_nctarank": 1, "%is_explicit_cluster": 0, "WARP_SZ": WARP}


def coordinates(number, shape):
    return number % shape[0], number // shape[0] % shape[1], number // (shape[0] * shape[1])
