"""How many prompt rows a step may have."""
import pytest

from qwentin.pace import BOUND, FIRST, PLAIN, Pace


def test_what_was_asked_holds():
    assert Pace.of(100, 4096).rows(True) == Pace.of(100, 4096).rows(False) == Pace.of(100, 0).rows(True) == 100
    assert Pace.of(0, 0).rows(True) == PLAIN


def test_others_wait_no_longer_than_the_bound():
    pace = Pace.of(0, 4096)
    assert pace.rows(False) == 4096 and pace.rows(True) == FIRST and pace.left_s(100) is None
    for _ in range(30):
        pace.ran(4096, 0.42)                    # 9,752 rows a second
    assert pace.rows(False) == 4096 and pace.rows(True) == 1920 and 1920 / 9752 < BOUND
    assert pace.left_s(97520) == pytest.approx(10, 0.01)
    pace.ran(100, 10.0)                         # a warm turn's few rows change nothing
    assert pace.rows(True) == 1920
    for _ in range(30):
        pace.ran(128, 1.0)
    assert pace.rows(True) == 128               # never less than a tile
    for _ in range(30):
        pace.ran(4096, 0.01)
    assert pace.rows(True) == 4096
