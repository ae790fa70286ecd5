"""KVPool: which pages of the KV cache belong to whom. Bookkeeping only; the arrays themselves live in the tower.

    page      128 consecutive token rows of every full-attention layer (and of the draft head's)
    table     the pages of one sequence, in order, and how many of their rows are in use

             page 7        page 2        page 9
    table  [ 0 .. 127 ] [ 128 .. 255 ] [ 256 . . . ]     length 300: three pages, the last one part used

A page may stand in several tables (a fork shares its full pages); it returns to the free list when the last one lets go.
Only the last, part used page of a table is ever written, so that one is never shared: fork() tells the caller to copy it.
Proven by tests/test_kvpool.py, which calls check() after every operation of a random run.
"""
from array import array
from dataclasses import dataclass, field

PAGE = 128      # rows; a multiple of every tile that the attention kernels use


class OutOfPages(Exception):
    """The pool cannot grow a table; the scheduler preempts somebody. Never leaves the engine."""


@dataclass(eq=False)
class Table:
    """One sequence's pages in order and the number of rows in use. Only the pool changes it."""
    pages: array = field(default_factory=lambda: array("i"))        # numpy reads it whole, 2,000 pages in a microsecond
    length: int = 0


class KVPool:
    """`pages` pages of PAGE rows."""

    def __init__(self, pages: int):
        self.total = pages
        self.free = list(range(pages - 1, -1, -1))      # a stack: pops ascend, so a fresh table is contiguous
        self.references = [0] * pages
        self.tables: set[Table] = set()

    def open(self) -> Table:
        """A new, empty table."""
        table = Table()
        self.tables.add(table)
        return table

    def reserve(self, table: Table, rows: int) -> None:
        """Make room for `rows` rows behind table.length; OutOfPages, with nothing changed, if there is none."""
        missing = self.missing(table, rows)
        if missing > len(self.free):
            raise OutOfPages
        for _ in range(missing):
            page = self.free.pop()
            self.references[page] = 1
            table.pages.append(page)

    def missing(self, table: Table, rows: int) -> int:
        """How many pages reserve() would take from the free list."""
        return max(0, pages_for(table.length + rows) - len(table.pages))

    def advance(self, table: Table, rows: int) -> None:
        """`rows` reserved rows were written."""
        assert pages_for(table.length + rows) <= len(table.pages), "reserve() comes before advance()"
        table.length += rows

    def room(self, table: Table) -> int:
        """Rows that reserve() can make room for behind table.length."""
        return (len(table.pages) + len(self.free)) * PAGE - table.length

    def trim(self, table: Table) -> None:
        """Give back pages that were reserved and hold no rows."""
        while len(table.pages) > pages_for(table.length):
            self.drop(table.pages.pop())

    def drop(self, page: int) -> None:
        self.references[page] -= 1
        if not self.references[page]:
            self.free.append(page)

    def fork(self, table: Table) -> tuple[Table, list[tuple[int, int]]]:
        """A second table with the same rows, and the (source, target) pages whose content the caller must copy.

        Raises OutOfPages, with nothing changed, if the part used last page has no free page to be copied to.
        """
        full, part = divmod(table.length, PAGE)
        if part and not self.free:
            raise OutOfPages
        child = self.open()
        for page in table.pages[:full]:
            self.references[page] += 1
            child.pages.append(page)
        child.length = full * PAGE
        if not part:
            return child, []
        self.reserve(child, part)
        self.advance(child, part)
        return child, [(table.pages[full], child.pages[full])]

    def release(self, table: Table) -> None:
        """Let go of all of a table's pages; the table is empty and unknown afterwards."""
        self.tables.remove(table)
        for page in reversed(table.pages):
            self.drop(page)
        table.pages, table.length = array("i"), 0

    def check(self) -> None:
        """Recount everything from the tables; AssertionError names what does not add up."""
        count = [0] * self.total
        for table in self.tables:
            assert pages_for(table.length) <= len(table.pages), "a table is longer than its pages"
            for page in table.pages:
                count[page] += 1
        assert count == self.references, "reference counts differ from the tables"
        unused = [page for page in range(self.total) if not count[page]]
        assert sorted(self.free) == unused, "the free list differs from the unused pages"


def pages_for(rows: int) -> int:
    """Pages that hold `rows` rows."""
    return -(-rows // PAGE)
