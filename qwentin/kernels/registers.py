"""registers: spread.py's rules as device functions, for the kernels that unpack codes and the one that packs them."""
import functools

from . import ptx
from .build import device, lineless_device
from .ptx import u32
from .spread import RULES, plan
from .unroll import compile_time, static_range

HIGH = 0x7351                         # of a permute: the high bytes of two registers' halves, in byte order
SIGNS = 0x80808080


@functools.cache
def registers_of(bits, wanted=tuple(range(8))):
    """Device function: a tuple of a group's words -> its registers of these numbers."""
    terms, mask = [RULES[bits].registers[i] for i in wanted], RULES[bits].mask
    count = len(terms)

    @compile_time
    def word(i, n):
        return terms[i][n][0]

    @compile_time
    def left(i, n):
        return terms[i][n][1]

    @compile_time
    def two(i):
        return len(terms[i]) == 2

    @lineless_device
    def made(words):
        return tuple(((u32(words[word(i, 0)] << left(i, 0)) if left(i, 0) >= 0 else
                       ptx.shift_right_pair(words[word(i, 0)], words[word(i, 0)], -left(i, 0)))
                      ^ ((u32(words[word(i, 1)] << left(i, 1)) if left(i, 1) >= 0 else
                          ptx.shift_right_pair(words[word(i, 1)], words[word(i, 1)], -left(i, 1))) if two(i) else u32(0)))
                     & mask for i in static_range(count))
    return made


@functools.cache
def bytes_of(bits):
    """Device function: two registers, of four inputs -> the codes in byte order (packed.ORDER): of 6 bits as e4m3 bytes,
    the value times 2^-6, of 4 bits as e5m2 bytes, the value times 2^-14."""
    six = bits == 6

    @lineless_device
    def made(a, b):
        word = ptx.permute(a, b, HIGH)
        if six:
            word = (word & SIGNS) | ptx.permute(u32(a << 1), u32(b << 1), HIGH)
        return word
    return made


@functools.cache
def fragment_of(bits):
    """Device function: a group's words -> its four operands of an 8-bit m16n8k32, rows 2g, 2g + 1 by halves s."""
    made, joined = registers_of(bits), bytes_of(bits)

    @lineless_device
    def fragment(words):
        w = made(words)
        return tuple(joined(w[i % 2 * 4 + i // 2 * 2], w[i % 2 * 4 + i // 2 * 2 + 1]) for i in static_range(4))
    return fragment


@functools.cache
def words_of(bits):
    """Device function: a group's eight registers -> its words."""
    rows, count = plan(RULES[bits]), RULES[bits].words
    length = len(rows)

    @compile_time
    def at(k, column):
        return rows[k][column]

    @compile_time
    def right(k, column):
        """How far to rotate right for a rotation left, or the other way round."""
        return rows[k][column] % 32 if column == 5 else -rows[k][column] % 32

    @device
    def turn(word, by):
        return ptx.shift_right_pair(u32(word), u32(word), u32(by))

    @device
    def made(registers):
        words = (u32(0),) * count
        for k in static_range(length):
            part = registers[at(k, 1)]
            if at(k, 2) >= 0:
                part = part ^ turn(words[at(k, 2)], right(k, 3))
            part = turn(part & at(k, 4), right(k, 5))
            words = tuple(u32(words[j] | part) if j == at(k, 0) else words[j] for j in static_range(count))
        return words
    return made
