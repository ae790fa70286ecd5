"""Plan: costs are learned, odds corrected, and what pays is drafted: checked against the best of all shapes."""
import pytest

from qwentin.treeplan import CERTAIN, OUTLIER, Acceptance, Costs, Fixed, Line, Plan


def costs(plain=1.0, verify=(1.5, 0.05), draft=(0.1, 0.0)):
    found = Costs()
    found.plain.first, found.plain.seen = plain, 2
    found.verify.first, found.verify.slope = verify
    found.draft.first, found.draft.slope = draft
    return found


def sure(rate, depth=8):
    """Odds that say: guesses are right so often, at any depth."""
    found = Acceptance()
    for d in range(1, depth + 1):
        found.seen[("head", d, 0)] = (1000.0, 1000.0 * rate, 1000.0 * rate)
    return found


def test_a_line_is_found_and_followed():
    line = Line()
    line.expect(10.0, 1.0)
    for i in range(300):
        x = 1 + i % 16
        line.add(x, 5 + 0.25 * (x - 1))
    assert line.first == pytest.approx(5, rel=0.02) and line.slope == pytest.approx(0.25, rel=0.1)
    for i in range(300):
        line.add(16, 20.0)                          # all x alike say nothing about the slope
    assert line(16) == pytest.approx(20, rel=0.01) and line.first >= line.slope >= 0


def test_one_hiccup_of_the_machine_is_not_believed():
    line = Line()
    line.expect(10.0, 0.0)
    for _ in range(50):
        line.add(1, 10.0)
    line.add(1, 10000.0)
    assert line(1) < 10 + 0.04 * OUTLIER * 10


def test_costs_are_guessed_until_they_are_measured():
    found = Costs()
    assert not found.known
    for _ in range(2):
        found.add_plain(1, 2.0)
    assert found.known and found.verify(8) > 2.0 and 0 < found.draft(1) < 2.0
    found.verify.add(8, 30.0)
    before = found.verify(8)
    found.add_plain(1, 2.0)
    assert found.verify(8) == before > 10, "what was measured is not guessed again"


def test_odds_follow_what_happened():
    odds = Acceptance()
    assert odds.chance("x", 0.5) == 0.5 and odds.rate("x", 0.7) == pytest.approx(0.7)
    for i in range(200):
        odds.observe("x", 0.5, i % 5 != 0)
    assert odds.chance("x", 0.5) == pytest.approx(0.8, abs=0.08) and odds.rate("x", 0.1) == pytest.approx(0.8, abs=0.15)
    assert odds.chance("x", 0.9) == CERTAIN
    for _ in range(200):
        odds.observe("x", 0.5, False)
    assert odds.chance("x", 0.5) < 0.1


def test_nothing_is_tried_before_a_plain_step_was_measured():
    assert not Plan(8, 8).begin(1) and Fixed(8, 8).begin(1)


@pytest.mark.parametrize("rate, tries", [(0.95, True), (0.6, True), (0.2, False), (0.02, False)])
def test_drafting_is_tried_if_it_can_pay(rate, tries):
    assert Plan(8, 15, costs=costs(), acceptance=sure(rate)).begin(1) is tries


def best_chain(rate, c, most=12):
    """The depth of the chain of the most tokens a second, by trying all; 0 is plain decoding."""
    def speed(depth):
        if not depth:
            return 1 / c.plain(1)
        tokens = sum(rate ** d for d in range(depth + 1))
        return tokens / (c.verify(1 + depth) + sum(c.draft(1) for _ in range(depth)))
    return max(range(most + 1), key=speed), speed


@pytest.mark.parametrize("rate", [0.97, 0.9, 0.8, 0.6])
def test_chains_grow_as_deep_as_is_best(rate):
    """By the rule alone, once `rate` is what its own rounds give."""
    c = costs()
    plan, (wanted, speed) = Plan(12, 12, costs=c, acceptance=sure(rate, 12)), best_chain(rate, costs())
    depth = 0
    for _ in range(60):
        depth, reach = 0, 1.0
        while depth < 12 and plan.deepen(reach, depth + 1, 1, 1):
            depth, reach = depth + 1, reach * rate
        tokens = sum(rate ** d for d in range(depth + 1))
        plan.observe_round(tokens, c.verify(1 + depth) + depth * c.draft(1))
    assert speed(depth) > 0.97 * speed(wanted), (depth, wanted)


def test_a_tree_is_verified_only_if_it_beats_a_plain_step():
    plan = Plan(8, 15, costs=costs())
    assert plan.pays(3.0, 8, 1) and not plan.pays(1.5, 8, 1)
    assert plan.least(1) == pytest.approx(0.05), "a row's seconds times what a second gives"
    plan.observe_round(40, 10.0)
    assert plan.rate(1) == 4.0 and plan.least(1) == pytest.approx(0.2) and not plan.pays(3.0, 8, 1)
