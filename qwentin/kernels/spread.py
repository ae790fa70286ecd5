"""spread: how codes of 4 and 6 bits lie in words, so that few instructions make an f16 register of two of them.

A register holds a code in each half: sign at bit 15, exponent and mantissa ending at bit 11, which is the value times 2^-14.

    bit    31  30 29 28  27 26 25 24 23  22 .. 16    15  14 13 12  11 10  9  8  7   6 .. 0
    fp4     s            e  e  m                      s            e  e  m                      mask 0x8E008E00
    fp6     s            e  e  m  m  m                s            e  e  m  m  m                mask 0x8F808F80

Words are rotated, perhaps two are added (exclusive or), and the mask cuts a register out. Rotations left by so few bits are
shifts, which multiply-add units do, beside the integer ones. Such masks do not tile words, hence the sums: every register
bit is a sum of one or two bits of words, and all bits of words follow from those of registers (`plan`). What makes the
eight registers of two rows and eight inputs, n: word n rotated left by so much:

    fp4    row 0    0           0 >> 3          0 << 4 + 0 << 7     0 << 4 + 0 << 9
           row 1    1           1 >> 3          1 << 4 + 1 << 7     1 << 4 + 1 << 9
    fp6    row 0    0           0 << 2 + 2 >> 3     0 << 7 + 2 >> 3     0 >> 4 + 2
           row 1    1 + 2 << 7  1 << 2 + 2 << 5     1 << 7 + 2 << 7     1 >> 4

Word 2 of fp6 is shared by the rows: 64 bits of registers out of 64, or 96 out of 96. The rules were
found by search. Here is the law in numpy; registers.py has it on a device.
"""
import functools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rule:
    """words: how many a group has; registers: of (row, place), the terms (word, left) of the sum."""
    bits: int
    words: int
    registers: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def mask(self) -> int:
        """Sign and magnitude, in both halves."""
        return (0x8000 | 0x1000 - (1 << self.low)) * 0x10001

    @property
    def low(self) -> int:
        """Where a code's lowest bit goes."""
        return 13 - self.bits


RULES = {4: Rule(4, 2, tuple(r for w in (0, 1) for r in (((w, 0),), ((w, -3),), ((w, 4), (w, 7)), ((w, 4), (w, 9))))),
         6: Rule(6, 3, (((0, 0),), ((0, 2), (2, -3)), ((0, 7), (2, -3)), ((0, -4), (2, 0)),
                        ((1, 0), (2, 7)), ((1, 2), (2, 5)), ((1, 7), (2, 7)), ((1, -4),)))}


@functools.cache
def plan(rule: Rule) -> tuple[tuple[int, int, int, int, int, int], ...]:
    """How words follow from registers: (word, register, known word or -1, its left, mask, left), in this order. Bits `mask`
    of the register, less those of the known word rotated left, are the word's, rotated left.
    """
    known, out = set(), []
    todo = {(i, bit) for i in range(len(rule.registers)) for bit in range(16) if rule.mask >> bit & 1}
    while todo:
        found = {}
        for i, bit in sorted(todo):
            places = [(word, (bit - left) % 16) for word, left in rule.registers[i]]
            unknown = [n for n, place in enumerate(places) if place not in known]
            if len(unknown) == 1:
                found[i, bit] = unknown[0], places[unknown[0]]
        assert found and len({place for _, place in found.values()}) == len(found), "a rule without an inverse"
        for i, n in sorted({(i, n) for (i, _), (n, _) in found.items()}):
            mask = sum(1 << bit for (j, bit), (m, _) in found.items() if (j, m) == (i, n))
            word, left = rule.registers[i][n]
            other = rule.registers[i][1 - n] if len(rule.registers[i]) == 2 else (-1, 0)
            out.append((word, i, *other, mask * 0x10001, left))
        known |= {place for _, place in found.values()}
        todo -= found.keys()
    return tuple(out)


def turned(word, left):
    return word << np.uint32(left % 32) | word >> np.uint32(-left % 32) if left else word


def registers_of(rule, words):
    """The eight registers of a group of words."""
    return [functools.reduce(np.bitwise_xor, (turned(words[word], left) for word, left in terms)) & np.uint32(rule.mask)
            for terms in rule.registers]


def words_of(rule, registers):
    """The inverse."""
    words = [np.zeros_like(registers[0])] * rule.words
    for word, i, known, by, mask, left in plan(rule):
        x = registers[i] if known < 0 else registers[i] ^ turned(words[known], by)
        words[word] = words[word] | turned(x & np.uint32(mask), -left)
    return words
