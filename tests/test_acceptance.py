"""ACCEPTANCE.md names tests that exist, and leaves no row of the contract out."""
import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
TEXT = (HERE / "ACCEPTANCE.md").read_text()
ROWS = dict(re.findall(r"^\| (.+?) \| (.+) \|$", TEXT, re.M))
# of the contract: the public bug reports
WANTED = {"T": (1, 2, 3, 5, 7, 8, 9, 11, 12, 14, 15, 16, 17, 18, 20, 22, 23, 24, 25), "R": (1, 2, 4, 5, 6, 7, 9, 10),
          "C": (1, 2, 4, 6, 7, 8), "P": (1, 2, 3, 4, 6, 7, 8, 9, 12), "M": (1, 2, 3, 5, 7, 8, 9, 10),
          "S": (1, 2, 3, 4, 5, 7), "N": (1, 2, 4, 5, 7, 9)}


def named_in(name: str) -> set[str]:
    tree = ast.parse((HERE / f"{name}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_named_test_exists():
    named = [reference for told in ROWS.values() for reference in re.findall(r"\b(test_\w+)(?:::(test_\w+))?", told)]
    assert len(named) > 120
    found = {name: named_in(name) for name in {name for name, _ in named}}
    assert [f"{name}::{test}" for name, test in named if test and test not in found[name]] == []


def test_no_row_is_missing():
    assert {f"{letter}-{number}" for letter, numbers in WANTED.items() for number in numbers} <= set(ROWS)
    assert [row for row, told in ROWS.items() if "test_" not in told and not told.startswith("needs a GPU: ")
            and row not in ("row", "---")] == []
