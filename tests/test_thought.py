"""Thought: budgets to the token, loops found, texts that are none left alone."""
import random

import pytest

from qwentin.thought import BUDGET, GRAM, LOOP, SEEN, Thought


def closed_at(tokens, budget=None, loop=256):
    """(how many tokens were taken before it was closed, why), or None."""
    thought = Thought(budget, loop)
    for n, token in enumerate(tokens, 1):
        if why := thought.push(token):
            return n, why
    return None


def test_a_budget_counts_to_the_token():
    assert closed_at(range(100), budget=7) == (7, BUDGET)
    assert closed_at(range(7), budget=8) is None
    assert Thought(0, 0).spent and not Thought(1, 0).spent and not Thought(None, 0).spent


@pytest.mark.parametrize("period", [1, 2, 3, 17, 100, 700])
def test_a_cycle_is_closed_when_it_has_repeated_long_enough(period):
    """The first SEEN rounds are new or may be quotations; then `loop` tokens of more of the same are too many."""
    lead = list(range(10_000, 10_050))
    at, why = closed_at(lead + [i % period for i in range(period * 5 + 600)])
    assert why == LOOP and at == len(lead) + GRAM - 1 + SEEN * period + 256


def test_paragraphs_in_changing_order_are_a_loop_too():
    rng = random.Random(1)
    paragraphs = [[1000 * k + i for i in range(40)] for k in range(4)]
    assert closed_at([token for _ in range(60) for token in rng.choice(paragraphs)], loop=128)[1] == LOOP


def test_text_that_is_no_loop():
    rng = random.Random(2)
    text = [rng.randrange(300) for _ in range(2000)]
    assert closed_at(text + text + text) is None            # a file quoted twice
    table = [token for i in range(500) for token in (1, 2, 3, 4, 5, 1000 + i)]
    assert closed_at(table) is None                         # rows that differ in one token
    assert closed_at([0] * 200 + text) is None              # a row of zeros


def test_zero_looks_for_no_loop():
    assert closed_at([1] * 5000, loop=0) is None
