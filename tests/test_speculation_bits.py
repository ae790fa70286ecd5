"""Two hundred rounds of speculation on a small random model, stepwise: S, windows, keys and values of every full layer are
those of plain decoding to the last bit, whoever drafted, at the end of the context.

The plain form of the numpy tower agrees to rounding only (test_speculation_state.py): it takes a tree's rows, and their
replay, in one block of the delta rule. Everything else of a round is the same in both."""
import shutil

import numpy as np
import pytest

import random_checkpoint
from qwentin import nano
from qwentin.config import EngineConfig
from qwentin.drafter import HeadDrafter, LookupDrafter
from qwentin.engine import Engine
from qwentin.model.panels import independent
from qwentin.request import GenerateRequest
from qwentin.treeplan import Fixed
from random_checkpoint import Recipe
from test_engine import Reader
from test_speculation import GREEDY, Scripted, right, speculate, spoken
from test_speculation_state import Mix, Noise, last_state, nothing, padding, wrong

WINDOW = 1530
ROUNDS = 200
SHAPE = (6, 15, 3)              # depth, guesses, width
AHEAD = dict(wrong=220, padding=220, noise=620, mix=800, right=1420)      # tokens to the end of the context
pytestmark = pytest.mark.skipif(not independent(), reason="this BLAS has no products in place (on x86: AVX-512)")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    recipe = Recipe(41, dict(vocab_size=4096, max_position_embeddings=WINDOW))
    directory = random_checkpoint.write(recipe, tmp_path_factory.mktemp("bits"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(nano.DIRECTORY / name, directory)
    engine = Engine.load(EngineConfig(model=str(directory), threads=1, max_seqs=1, kv_tokens=2 * WINDOW, draft="off"))
    engine.tower.stepwise = True
    engine.start()
    yield engine
    engine.stop()
    engine.scheduler.check()


@pytest.fixture(scope="module")
def decode(engine):
    def run(name, *drafters):
        """(ids, state, counts) of a prompt continued to the end of the context."""
        engine.scheduler.cache.clear()
        speculate(engine, Fixed(*SHAPE) if drafters else None, *drafters)
        prompt, reader = np.random.default_rng(5).integers(0, 4000, WINDOW - AHEAD[name]).astype(np.int32), Reader()
        engine.submit(GenerateRequest(name, prompt, GREEDY, stop_ids=frozenset()), reader)
        ids = [*prompt.tolist(), *reader.wait().ids()]
        assert len(ids) == WINDOW
        state = last_state(engine, ids)
        return ids, {**state, "kv": state["kv"][:, :-1]}, spoken(reader)        # the last layer is the draft head's
    return run


@pytest.fixture(scope="module")
def plain(decode):
    """By how many tokens are ahead."""
    return {ahead: decode(name) for ahead, name in {ahead: name for name, ahead in AHEAD.items()}.items()}


@pytest.mark.parametrize("name", AHEAD)
def test_two_hundred_rounds_leave_the_bits_of_plain_decoding(engine, decode, plain, name):
    ids, state, _ = plain[AHEAD[name]]
    drafters = dict(wrong=Scripted(wrong, ids), right=Scripted(right, ids), noise=Scripted(Noise(1), ids),
                    padding=Scripted(padding, ids))
    drafter = drafters.get(name) or Mix(2, [*drafters.values(), HeadDrafter(engine, Fixed(*SHAPE), engine.tokenizer.size),
                                            LookupDrafter(Fixed(*SHAPE)), Scripted(nothing)])
    got, left, counts = decode(name, drafter)
    assert got == ids and counts.rounds >= ROUNDS, counts
    for part, want in state.items():
        assert np.abs(want).max() > 0 and np.array_equal(left[part], want), part
    assert (counts.accepted > ROUNDS) == (name not in ("wrong", "padding")), counts
    if name == "mix":
        assert len(set(drafter.used)) == 3 and counts.plain > 20
