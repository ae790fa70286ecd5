"""PrefixCache: known token prefixes and where their state is kept, so that a warm turn computes only what is new.

    entry     the first `length` ids of some conversation, the pages that hold their KV rows (shared by reference with
              whoever else uses them) and a state slot with the recurrent state behind exactly these ids

A recurrent state cannot be cropped, so a prompt can go on from an entry only if it begins with all of its ids. Entries form
a radix tree; an entry's parent is the longest other entry that it begins with:

    system+tools --+-- question 1 -- answer 1 -- question 2 ...         one conversation is a path,
                   +-- title request                                    what conversations share is near the root

Which entry goes first, when slots or pages are short, is the GreedyDual rule (Cao & Irani, USITS 1997): an entry is worth
the tokens that losing it would cost, length - parent's length, on top of a clock that rises to the worth of what was evicted
last. So old entries sink and costly ones live longer; when a parent goes, its children inherit its tokens. Two kinds count a
quarter: waypoints (exactly one way leads on from them, so the next entry on it serves better) and one-offs (neither they
nor what they continue was ever used): side requests do not push out a dialogue. What several conversations share has
several ways on: it is refreshed by all of them and goes last.

The cache decides and counts; the caller moves the data (see Scheduler). Proven by tests/test_prefix.py.
"""
from dataclasses import dataclass, field

import numpy as np

from .kvpool import KVPool, Table
from .slots import StateSlots

MINOR = 0.25        # what a waypoint's or a one-off's tokens count


@dataclass(eq=False)
class Node:
    """A place in the radix tree: `edge` i32 [e] leads to it from `parent`; `entry` may end here."""
    edge: np.ndarray
    parent: "Node | None"
    children: dict[int, "Node"] = field(default_factory=dict)
    entry: "Entry | None" = None


@dataclass(eq=False)
class Entry:
    """One kept state. worth is its place in the order of eviction, the least first. For the draft head: hidden f32 [1, D] is
    the main model's at the last position, if it is known; first is where the rows begin that its cache has."""
    node: Node
    table: Table
    slot: int
    hidden: np.ndarray | None = None
    first: int = 0
    worth: float = 0.0
    used: bool = False

    @property
    def length(self) -> int:
        return self.table.length


class PrefixCache:
    """At most `capacity` entries, in the pages of `pool` and the slots of `slots`."""

    def __init__(self, pool: KVPool, slots: StateSlots, capacity: int):
        self.pool, self.slots, self.capacity = pool, slots, capacity
        self.root = Node(np.zeros(0, np.int32), None)
        self.entries: set[Entry] = set()
        self.clock = 0.0
        self.evictions = 0

    # ------------------------------------------------------------------ looking up
    def match(self, ids: np.ndarray) -> Entry | None:
        """The longest entry that ids i32 [T] begin with, all of it; None if there is none."""
        node, at, found = self.root, 0, None
        while at < len(ids):
            child = node.children.get(int(ids[at]))
            if child is None or common(child.edge, ids[at:]) < len(child.edge):
                break
            node, at = child, at + len(child.edge)
            found = node.entry or found
        return found

    def shared(self, ids: np.ndarray) -> int:
        """How many of ids i32 [T] stand at the beginning of some kept prefix too, whether a state is kept there or not."""
        node, at = self.root, 0
        while at < len(ids) and (child := node.children.get(int(ids[at]))) is not None:
            same = common(child.edge, ids[at:])
            at += same
            if same < len(child.edge):
                break
            node = child
        return at

    def use(self, entry: Entry) -> None:
        """A request goes on from this entry: it becomes as dear as a new one, and so do the branchings it stands on."""
        entry.used = True
        entry.worth = self.clock + self.cost(entry)
        while (entry := self.parent(entry)) is not None:
            if len(entry.node.children) > 1:
                entry.worth = self.clock + self.cost(entry)

    def cost(self, entry: Entry) -> float:
        """Tokens to compute again if this entry were lost, weighed by how likely that is."""
        parent, ways = self.parent(entry), len(entry.node.children)
        minor = ways == 1 or (ways == 0 and not entry.used and not (parent and parent.used))
        return (entry.length - (parent.length if parent else 0)) * (MINOR if minor else 1.0)

    @staticmethod
    def parent(entry: Entry) -> Entry | None:
        node = entry.node.parent
        while node is not None and node.entry is None:
            node = node.parent
        return node.entry if node else None

    # ------------------------------------------------------------------ keeping
    def take_slot(self, keep: Entry | None = None) -> int | None:
        """A slot for a new entry within capacity, evicting if need be (never `keep`); None if that is impossible."""
        while len(self.entries) >= self.capacity or not self.slots.free:
            if not self.evict(keep):
                return None
        return self.slots.acquire()

    def make_place(self, length: int) -> tuple[Table, int] | None:
        """A table of `length` rows and a slot for an entry from elsewhere, evicting if need be; None if that is impossible.
        The caller fills them, then calls insert() or give_back()."""
        slot = self.take_slot()
        if slot is None:
            return None
        table = self.pool.open()
        while self.pool.missing(table, length) > len(self.pool.free):
            if not self.evict():
                self.give_back(table, slot)
                return None
        self.pool.reserve(table, length)
        self.pool.advance(table, length)
        return table, slot

    def give_back(self, table: Table, slot: int) -> None:
        self.pool.release(table)
        self.slots.release(slot)

    def insert(self, ids: np.ndarray, table: Table, slot: int, hidden: np.ndarray | None = None, first: int = 0) -> None:
        """Keep what `table` and `slot`, which become the cache's, hold: the state behind ids i32 [table.length].

        If these ids are kept already, the new copy is let go.
        """
        assert len(ids) == table.length > 0
        node = self.node_at(ids)
        if node.entry is not None:
            self.give_back(table, slot)
            return
        node.entry = entry = Entry(node, table, slot, hidden, first)
        self.entries.add(entry)
        entry.worth = self.clock + self.cost(entry)
        if parent := self.parent(entry):                # it may be a mere waypoint from now on
            parent.worth = min(parent.worth, self.clock + self.cost(parent))

    @staticmethod
    def ids_of(entry: Entry) -> np.ndarray:
        """The ids that lead to an entry, i32 [length]."""
        edges, node = [], entry.node
        while node is not None:
            edges, node = [node.edge, *edges], node.parent
        return np.concatenate(edges)

    def holds(self, ids: np.ndarray) -> bool:
        """Whether exactly these ids are kept."""
        entry = self.match(ids)
        return entry is not None and entry.length == len(ids)

    def node_at(self, ids: np.ndarray) -> Node:
        """The tree node behind ids, made if need be: an edge that only begins alike is split."""
        node, at = self.root, 0
        while at < len(ids):
            child = node.children.get(int(ids[at]))
            if child is None:
                child = Node(ids[at:].copy(), node)
                node.children[int(ids[at])] = child
                return child
            same = common(child.edge, ids[at:])
            if same < len(child.edge):
                middle = Node(child.edge[:same], node, {int(child.edge[same]): child})
                node.children[int(ids[at])] = middle
                child.edge, child.parent, child = child.edge[same:], middle, middle
            node, at = child, at + same
        return node

    # ------------------------------------------------------------------ letting go
    def evict(self, keep: Entry | None = None) -> bool:
        """Drop the entry of the least worth, not `keep`; False if there is none."""
        victim = min((e for e in self.entries if e is not keep), key=lambda e: (e.worth, e.slot), default=None)
        if victim is None:
            return False
        self.clock = max(self.clock, victim.worth)
        heirs = [e for e in self.entries if self.parent(e) is victim]
        before = [self.cost(e) for e in heirs]
        self.drop(victim)
        for heir, cost in zip(heirs, before):
            heir.worth += self.cost(heir) - cost
        self.evictions += 1
        return True

    def forget(self, ids: np.ndarray) -> None:
        """Drop every entry that ids begin with: whatever spoiled this sequence may be in them."""
        while (entry := self.match(ids)) is not None:
            self.drop(entry)

    def drop(self, entry: Entry) -> None:
        self.entries.remove(entry)
        self.give_back(entry.table, entry.slot)
        node = entry.node
        node.entry = None
        while node.parent is not None and node.entry is None and len(node.children) < 2:
            self.unlink(node)
            node = node.parent

    @staticmethod
    def unlink(node: Node) -> None:
        """Take an empty node with at most one child out of the tree; the child's edge grows by the node's."""
        first = int(node.edge[0])
        if not node.children:
            del node.parent.children[first]
            return
        (child,) = node.children.values()
        child.edge, child.parent = np.concatenate([node.edge, child.edge]), node.parent
        node.parent.children[first] = child

    def clear(self) -> None:
        for entry in list(self.entries):
            self.drop(entry)

    def check(self) -> None:
        """Walk the tree; AssertionError names what does not add up."""
        found, stack = set(), [(self.root, 0)]
        while stack:
            node, length = stack.pop()
            if node.entry is not None:
                found.add(node.entry)
                assert node.entry.length == length, "an entry's length differs from its place in the tree"
            assert node is self.root or node.entry or len(node.children) > 1, "an empty node was left behind"
            for first, child in node.children.items():
                assert child.parent is node and int(child.edge[0]) == first, "a child hangs on the wrong id"
                stack.append((child, length + len(child.edge)))
        assert found == self.entries and len(found) <= self.capacity, "the tree's entries differ from the set"


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many ids a and b share at their beginnings."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
