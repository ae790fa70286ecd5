"""wgmma: four warps multiply A [64, k] by B [k, n] from shared memory (A from registers, too).

An operand in shared memory is given by a 64-bit descriptor, byte counts in units of 16:

    bits  0-13 start    16-29 leading offset    32-45 stride offset    49-51 base offset    62-63 swizzle

The swizzle (1: 128 bytes, 2: 64, 3: 32, 0: none) gives the width w of the rows of an atom of 8 rows; in an address,
its 16-byte column number is xored with its row number. With r along m or n, k along the contraction, T the elements
of 16 bytes and c = byte column:

    K-major, none      start + (r / 8) stride + (c / 16) leading + (r % 8) 16 + c % 16
    K-major            start + (r / 8) stride + (r % 8) w + c
    MN-major, none     start + (r / T) stride + (k / 8) leading + (k % 8) 16 + 2 (r % T)             halves only
    MN-major           start + (r / (w / 2)) leading + (k / 8) stride + (k % 8) w + 2 (r % (w / 2))    halves only

The accumulator's register 4 j + 2 h + i of lane l of warp w is row 16 w + 8 h + l / 4, column 8 j + 2 (l % 4) + i. A
in registers is mma.sync's fragment, warp w holding rows 16 w .. 16 w + 15.

The product is computed when the instruction is issued. Its shared operands stay locked until the wait that retires
its group; that registers are left alone until then is checked before the kernel runs (asyncregs.py).

Sources: PTX ISA, "Asynchronous warpgroup matrix"; the canonical layouts in CUTLASS's sm_90 GMMA traits.
"""
import numpy as np

from .dtypes import f2, f4, f8, i4, u2, u4
from .formats import OPERAND_BYTE, from_bf16
from .matrix import fragment_a
from .shared import READ
from .spaces import SHARED_BASE, WARPGROUP

SWIZZLE_WIDTH = {1: 128, 2: 64, 3: 32}


class Wgmma:
    """The wgmma instructions of a group's warpgroups."""

    def __init__(self, group):
        self.threads, self.shared, self.warps, self.fault = group.threads, group.shared, group.warps, group.fault
        self.committed = np.zeros(self.threads.count, i4)
        self.reading = []                                                # (first thread, group, granules)

    def addresses(self, descriptor, rows, k, element, mn_major, at, thread):
        """Shared addresses [rows, k, bytes of an element] of an operand."""
        start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        mode = descriptor >> 62
        if descriptor >> 49 & 7:
            self.fault(at, f"a wgmma descriptor with a base offset ({descriptor:#x}), which is not known", thread)
        r, c = np.arange(rows)[:, None], np.arange(k)[None, :]
        if mn_major:
            if mode == 0:
                address = (r // 8) * stride + (c // 8) * leading + (c % 8) * 16 + 2 * (r % 8)
            else:
                width = SWIZZLE_WIDTH[mode]
                across = width // 2
                address = (r // across) * leading + (c // 8) * stride + (c % 8) * width + 2 * (r % across)
        else:
            c = c * element
            if mode == 0:
                address = (r // 8) * stride + (c // 16) * leading + (r % 8) * 16 + c % 16
            else:
                address = (r // 8) * stride + (r % 8) * SWIZZLE_WIDTH[mode] + c
        address = start + address
        if mode:
            address = address ^ (address >> 3 & SWIZZLE_WIDTH[mode] - 16)
        if address.min() < SHARED_BASE or address.max() + element > SHARED_BASE + self.shared.size:
            self.fault(at, f"a wgmma operand outside shared memory (descriptor {descriptor:#x})", thread)
        return address[..., None] + np.arange(element)

    def operand(self, descriptors, rows, k, kind, mn_major, first, at):
        """(float64 [rows, k], granules) of an operand of the warpgroup that starts at thread `first`."""
        values = np.unique(descriptors[first:first + WARPGROUP])
        if len(values) != 1:
            self.fault(at, "a wgmma descriptor that differs within the warpgroup", first)
        element = 1 if kind in OPERAND_BYTE else 2
        offset = self.addresses(int(values[0]), rows, k, element, mn_major, at, first) + self.shared.base[first]
        pieces = np.unique(offset >> 4) << 4                             # 16-byte pieces stay whole under every swizzle
        self.shared.touch(pieces, 16, np.full(pieces.size, first), at, READ, who="wgmma: ")
        raw = self.shared.data[offset]
        if element == 1:
            x = OPERAND_BYTE[kind][raw[..., 0]]
        else:
            half = np.ascontiguousarray(raw).view(u2)[..., 0]
            x = (half.view(f2) if kind == "f16" else from_bf16(half)).astype(f8)
        return x, self.shared.granules(pieces, 16, pieces)[0]

    def multiply(self, shape, kinds, accumulators, a, b, scale_d, signs, mn_major, mask, at):
        """wgmma.mma_async -> the accumulator registers.

        shape: (n, k); kinds: types of D, A, B; a: a descriptor or four registers; b: a descriptor; scale_d: whether D
        is added; signs: of A and B; mn_major: of A and B."""
        n, k = shape
        groups = self.warps.whole(mask, at, 4)
        out = np.stack([np.broadcast_to(x, (self.threads.count,)) for x in accumulators]).copy()
        scale_d = np.broadcast_to(scale_d, (self.threads.count,))
        row, column = accumulator_place(n)
        for g in groups.tolist():
            first = g * WARPGROUP
            mine = slice(first, first + WARPGROUP)
            if isinstance(a, list):
                words = [np.broadcast_to(x, (self.threads.count,))[mine].reshape(4, 32) for x in a]
                A = fragment_a(words, kinds[1]).reshape(64, k)
                granules = np.zeros(0, int)
            else:
                A, granules = self.operand(a, 64, k, kinds[1], mn_major[0], first, at)
            B, more = self.operand(b, n, k, kinds[2], mn_major[1], first, at)
            granules = np.unique(np.concatenate([granules, more]))
            self.shared.locks[granules] += 1
            self.reading.append((first, int(self.committed[first]), granules))
            # a warp's 16 rows at a time: small enough that BLAS starts no threads, which cost more than they bring
            product = np.matmul((A * signs[0]).reshape(4, 16, k), (B * signs[1]).T).reshape(64, n)
            product = product[row, column]                               # [registers (or halves), lanes]
            old = out[:, mine]
            if kinds[0] == "f16":
                pairs = np.ascontiguousarray(old[..., None]).view(f2)    # [registers, lanes, 2]
                old = pairs.transpose(0, 2, 1).reshape(-1, WARPGROUP)
            new = np.where(scale_d[mine], old, 0) + product
            if kinds[0] == "f16":
                halves = new.astype(f2).reshape(-1, 2, WARPGROUP).transpose(0, 2, 1)
                out[:, mine] = np.ascontiguousarray(halves).view(u4)[..., 0]
            else:
                out[:, mine] = new.astype(f4)
        return list(out)

    def commit(self, mask):
        self.committed = self.committed + self.threads.active(mask)

    def wait(self, newest, mask, at):
        """wgmma.wait_group: all but the `newest` groups are complete."""
        self.warps.whole(mask, at)
        active, still = self.threads.active(mask), []
        for first, group, granules in self.reading:
            if active[first] and group < self.committed[first] - newest:
                self.shared.release(granules, np.arange(first, first + WARPGROUP, 32))
            else:
                still.append((first, group, granules))
        self.reading = still


def accumulator_place(n):
    """(rows, columns), each [n / 2, 128]: which element of D each register of each lane holds."""
    thread = np.arange(WARPGROUP)
    warp, lane = thread // 32, thread % 32
    j, h, i = (x.ravel()[:, None] for x in np.meshgrid(np.arange(n // 8), [0, 1], [0, 1], indexing="ij"))
    return 16 * warp + lane // 4 + 8 * h, 8 * j + 2 * (lane % 4) + i
