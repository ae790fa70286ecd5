"""DraftTree: guesses at the next tokens, verified all at once; and the walk that takes from them what the model would say.

    row      0        1     2      3     4
    token   "The" -> "cat" "dog"                    row 0, the root, is the last token that was chosen; each other row is
                      '---> "sat" "is"              a guess that follows its parent
    parent  -1        0     0      1     1

Why nothing changes. The tower computes every row as if the tokens on its path were the text. The walk starts at the root
and chooses the next token from that row's logits exactly as plain decoding does: the same processors, penalties and masks
in the state that they have after the tokens before, the same draw from the same stream of random numbers. If a child of
the row holds the token that was chosen, the walk goes on from that child, whose logits are those of the text so far; if
none does, the token was chosen rightly all the same and the walk ends. So by induction every token has the target's
distribution given those before it, and with one seed the very tokens of plain decoding. Guesses decide how many rows are
of use, nothing else.

This is the multi-branch rejection rule for drafters that name tokens, with no distribution over them. There a child x is
tried with probability min(1, p(x) / q(x)), q a point mass: accepted with p(x), else p loses x and is normalised anew
before the next child is tried. All in all child i is taken with p(x_i) and none with 1 - sum p(x_i), the rest being
distributed as p without them: one draw from p, compared with the children, is the same law in one step. Greedy choice is
the case p = 0 or 1.

Who calls: the drafters grow trees, engine.py walks them. Proven by tests/test_tree.py, with a wrong rule that is caught.
"""
from collections.abc import Callable

import numpy as np


class DraftTree:
    """Rows in the order they were added, parents first. chances[i]: the guessed probability of row i given its parent;
    reach[i]: the product along its path. origins[i]: who proposed it, for the drafters' own book-keeping."""

    def __init__(self, root: int):
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self.chances, self.reach, self.origins = [1.0], [1.0], [None]
        self.children: list[dict[int, int]] = [{}]      # token: row

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, chance: float, origin=None) -> int:
        """The row of `token` below `parent`; if two propose it, the more confident one counts."""
        row = self.children[parent].get(token)
        if row is not None:
            if chance > self.chances[row]:
                self.chances[row], self.origins[row] = chance, origin
                self.spread(row)
            return row
        row = self.children[parent][token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.chances.append(chance)
        self.reach.append(self.reach[parent] * chance)
        self.origins.append(origin)
        self.children.append({})
        return row

    def spread(self, row: int) -> None:
        """The reach of a row and of all below it, after its chance changed."""
        self.reach[row] = self.reach[self.parents[row]] * self.chances[row]
        for child in self.children[row].values():
            self.spread(child)

    def best(self, guesses: int, least: float = 0.0, depth: int | None = None) -> "DraftTree":
        """The tree of at most so many guesses, those of the greatest reach, none below `least` or deeper than `depth`.

        A row is never picked without its parent: reach does not grow along a path, and of equals the earlier goes first.
        """
        found = DraftTree(self.tokens[0])
        rows = [i for i in range(1, len(self)) if self.reach[i] >= least and (depth is None or self.depths[i] <= depth)]
        rows.sort(key=lambda i: (-self.reach[i], i))
        place = {0: 0}
        for i in sorted(rows[:guesses]):
            place[i] = found.add(place[self.parents[i]], self.tokens[i], self.chances[i], self.origins[i])
        return found

    def path(self, row: int) -> list[int]:
        """The rows from the root to `row`, both included."""
        rows = [row]
        while rows[-1]:
            rows.append(self.parents[rows[-1]])
        return rows[::-1]

    def follow(self, tokens: list[int]) -> int:
        """The row where `tokens` lead from the root, as far as the tree holds them; 0 if it holds not even the first."""
        row = 0
        for token in tokens:
            if token not in self.children[row]:
                break
            row = self.children[row][token]
        return row

    @property
    def expected(self) -> float:
        """Tokens that a round with this tree is expected to give, the one chosen after the last accepted row included."""
        return sum(self.reach)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, parents), i32 [N], as a Step has them."""
        return np.array(self.tokens, np.int32), np.array(self.parents, np.int32)


def walk(tree: DraftTree, choose: Callable[[int], int | None]) -> list[int]:
    """The rows that the text runs through, root first. choose(row) picks the token after that row; None ends the walk there
    (the token ended the choice)."""
    path = [0]
    while (token := choose(path[-1])) is not None:
        row = tree.children[path[-1]].get(token)
        if row is None:
            break
        path.append(row)
    return path
