"""ldmatrix, stmatrix and mma.sync: where a warp's lanes hold the elements of a matrix, and what is computed.

Lane l is in row-quad g = l / 4, place q = l % 4. A 32-bit register holds e consecutive elements of a row (2 halves, 4
bytes, 8 packed fp4); with h = 4 e:

    A [16, 2h]   register 0: row g,     k = q e ..          B [2h, 8]   register 0: column g, k = q e ..
                 register 1: row g + 8, k = q e ..                      register 1: column g, k = h + q e ..
                 register 2: row g,     k = h + q e ..      C, D [16, 8]   0, 1: row g,     columns 2q, 2q + 1
                 register 3: row g + 8, k = h + q e ..                     2, 3: row g + 8, columns 2q, 2q + 1

Products are summed exactly decoded, in float64, and rounded once; hardware truncates inside the sum, so compare with
a tolerance.

Block scaling multiplies chunk j of A's row m and of B's column n (1, 2 or 4 chunks along k) by a scale byte. Of each
quad, the lane pair chosen by thread-id-a holds A's scales (its first lane those of row g, its second those of row
g + 8) and the lane thread-id-b those of column g; byte-id chooses the first byte for chunk 0.

Sources: PTX ISA, "Matrix fragments for mma.m16n8k..." and "Block scaling for mma.sync"; for which lane of the pair
holds which row, CUTLASS's sm_120 traits (SFALayout).
"""
import numpy as np

from .dtypes import f2, f4, u1, u2, u4, u8
from .formats import SCALE_BYTE, decode
from .shared import READ, WRITE
from .spaces import SHARED_WINDOW, WARP

ROW_BYTES = dict(b16=16, b6x16_p32=12, b4x16_p64=8)                      # what ldmatrix reads of a 16-byte row


class Matrix:
    """Matrix instructions of a group's warps."""

    def __init__(self, group):
        self.threads, self.shared, self.warps, self.fault = group.threads, group.shared, group.warps, group.fault

    # ---- ldmatrix, stmatrix
    def rows(self, address, n, mask, at, how, read_bytes=16):
        """(warps, byte offsets of their 8 n row addresses, which lanes 0 .. 8 n - 1 give)."""
        warps = self.warps.whole(mask, at)
        lanes = (warps[:, None] * WARP + np.arange(8 * n)).ravel()
        a = address[lanes]
        if a.dtype == u8 and (a >> u8(32) == u8(SHARED_WINDOW >> 32)).all():
            a = a - u8(SHARED_WINDOW)
        if (wrong := a & a.dtype.type(15)).any():
            j = np.flatnonzero(wrong)[0]
            self.fault(at, f"misaligned matrix row: 16 bytes at {int(a[j]):#x}", lanes[j])
        offset = self.shared.offsets(a, 16, lanes, at)
        if read_bytes & 15:                                              # fp6 and fp4 rows leave their padding alone
            piece = offset[:, None] + np.arange(0, read_bytes, 4)
            self.shared.touch(piece.ravel(), 4, np.repeat(lanes, piece.shape[1]), at, how)
        else:
            self.shared.touch(offset, 16, lanes, at, how)
        return warps, offset

    def ldmatrix(self, address, n, form, transposed, mask, at):
        """n 8x8 matrices of 16-bit (or 8x16 of 8-bit) elements -> n registers."""
        warps, offset = self.rows(address, n, mask, at, READ, ROW_BYTES[form])
        raw = self.shared.data[offset[:, None] + np.arange(16)].reshape(len(warps), n, 8, 16)
        if form == "b6x16_p32":                                          # 16 six-bit codes in 12 bytes, then padding
            bits = np.unpackbits(raw[..., :12], axis=-1, bitorder="little").reshape(raw.shape[:-1] + (16, 6))
            raw = np.packbits(bits, axis=-1, bitorder="little")[..., 0]
        elif form == "b4x16_p64":
            raw = np.stack([raw[..., :8] & 15, raw[..., :8] >> 4], -1).reshape(raw.shape)
        if transposed:
            raw = np.ascontiguousarray(raw).view(u2).swapaxes(-1, -2)
        words = np.ascontiguousarray(raw).view(u4).reshape(len(warps), n, WARP)
        out = np.zeros((n, self.threads.count // WARP, WARP), u4)
        out[:, warps] = words.swapaxes(0, 1)
        return list(out.reshape(n, -1))

    def stmatrix(self, address, values, transposed, mask, at):
        n = len(values)
        warps, offset = self.rows(address, n, mask, at, WRITE)
        x = np.stack([v.reshape(-1, WARP)[warps] for v in values], 1).reshape(len(warps), n, 8, 4).view(u2)
        x = np.ascontiguousarray(x.swapaxes(-1, -2) if transposed else x).view(u1).reshape(-1, 16)
        self.shared.data[offset[:, None] + np.arange(16)] = x

    # ---- mma
    def mma(self, kinds, a, b, c, half_result, scale, mask, at):
        """D = A B + C. kinds: element types of A and B; scale: None, or what `scaled` takes."""
        warps = self.warps.whole(mask, at)
        A, B = fragment_a(self.of_warps(a, warps), kinds[0]), fragment_b(self.of_warps(b, warps), kinds[1])
        if scale:
            A, B = self.scaled(A, B, *scale, warps, at)
        old, n = self.of_warps(c, warps), len(warps)
        if half_result:                                                  # two halves a register
            old = [x.view(f2)[..., i::2] for x in map(np.ascontiguousarray, old) for i in range(2)]
        C = np.empty((n, 2, 8, 4, 2))                                    # warp, row half, g, q, column of pair
        for i, x in enumerate(old):
            C[:, i // 2, :, :, i % 2] = x.reshape(n, 8, 4)
        D = (np.matmul(A, B) + C.reshape(n, 16, 8)).reshape(C.shape)
        if half_result:
            new = [np.ascontiguousarray(D[:, i].astype(f2)).view(u4) for i in range(2)]
        else:
            new = [D[:, i // 2, :, :, i % 2].astype(f4) for i in range(4)]
        out = np.zeros((len(new), self.threads.count // WARP, WARP), new[0].dtype)
        for i, x in enumerate(new):
            out[i, warps] = x.reshape(n, WARP)
        return list(out.reshape(len(new), -1))

    def of_warps(self, registers, warps):
        """Registers as [warps, 32], of some warps."""
        return [np.broadcast_to(r, (self.threads.count,)).reshape(-1, WARP)[warps] for r in registers]

    def scaled(self, A, B, chunks, kind, scale_a, select_a, scale_b, select_b, warps, at):
        """A and B times their scales. select: (byte-id, thread-id), constants of the warp."""
        row, column = np.arange(16), np.arange(8)
        for name, data, (byte, thread), lanes, top in (
                ("a", scale_a, select_a, lambda t: 4 * (row % 8) + row // 8 + 2 * t, 1),
                ("b", scale_b, select_b, lambda t: 4 * column + t, 3)):
            byte, thread = self.uniform(byte, warps, at), self.uniform(thread, warps, at)
            if thread > top or byte not in {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}[chunks]:
                self.fault(at, f"byte-id-{name} {byte} with thread-id-{name} {thread}: invalid for "
                               f"scale_vec::{chunks}X", WARP * warps[0])
            words = self.of_warps([data], warps)[0][:, lanes(thread)]
            shift = (8 * (byte + np.arange(chunks))).astype(u4)
            scales = SCALE_BYTE[kind][words[..., None] >> shift & u4(255)]       # [warps, row or column, chunk]
            scales = np.repeat(scales, A.shape[2] // chunks, axis=2)
            if name == "a":
                A = A * scales
            else:
                B = B * scales.swapaxes(1, 2)
        return A, B

    def uniform(self, value, warps, at):
        """A selector as a number: a constant, or a register that is equal in all lanes."""
        values = np.unique(np.broadcast_to(value, (self.threads.count,)).reshape(-1, WARP)[warps])
        if len(values) != 1:
            self.fault(at, f"a scale selector that is not one number: {values}", WARP * warps[0])
        return int(values[0])


def fragment_a(registers, kind):
    """A [warps, 16, k] of four registers [warps, 32]; see the module's picture."""
    words = np.empty((len(registers[0]), 2, 8, 2, 4), u4)                # warp, row half, g, half of k, q
    for i, x in enumerate(registers):
        words[:, i % 2, :, i // 2] = x.reshape(-1, 8, 4)
    return decode(words.reshape(-1, 16, 8), kind)


def fragment_b(registers, kind):
    """B [warps, k, 8] of two registers [warps, 32]."""
    words = np.empty((len(registers[0]), 8, 2, 4), u4)                   # warp, g, half of k, q
    for i, x in enumerate(registers):
        words[:, :, i] = x.reshape(-1, 8, 4)
    return decode(words.reshape(-1, 8, 8), kind).swapaxes(1, 2)
