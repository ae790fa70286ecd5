"""The numpy tower on a small checkpoint of every layout, against what a float64 model answered (data/make_golden.py).

Tolerance 5e-4 on logits of size 5 to 40: float32 against float64, with some twenty sums of a few hundred terms each
between the embedding and the logits; 1e-4 on states of size 5. A mistake in the mathematics or in a layout moves a
logit by 0.1 or more.
"""
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import random_checkpoint
from random_checkpoint import RECIPES

from qwentin.model.cpu import CpuTower
from qwentin.model.weights import open_checkpoint
from qwentin.step import Rows, pack

DATA = Path(__file__).parent / "data"
GOLDEN = np.load(DATA / "layouts.npz")
CUTS = {"whole": [], "in pieces": [1, 3, 4, 67, 89], "one row at a time": range(1, 90)}


def digest(arrays):
    """As make_golden.py takes it."""
    spec = importlib.util.spec_from_file_location("make_golden", DATA / "make_golden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.digest(arrays)


@pytest.fixture(scope="module", params=RECIPES)
def case(request, tmp_path_factory):
    """(recipe, its golden arrays, the open checkpoint)"""
    recipe = RECIPES[request.param]
    golden = {key.split("/")[1]: GOLDEN[key] for key in GOLDEN if key.startswith(request.param + "/")}
    directory = random_checkpoint.write(recipe, tmp_path_factory.mktemp(request.param))
    with open_checkpoint(directory) as checkpoint:
        yield recipe, golden, checkpoint


def run(forward, tokens, cuts, **extra):
    """Feed the tokens in pieces; the outputs' logits and hidden rows one after the other."""
    logits, hidden = [], []
    for start, stop in zip([0, *cuts], [*cuts, len(tokens)]):
        rows = Rows(tokens[start:stop], slot=0, pages=np.array([1], np.int32), length=start,
                    outputs=np.arange(stop - start))
        out = forward(pack([rows], hidden=True), **{key: value[start:stop] for key, value in extra.items()})
        logits.append(out.logits)
        hidden.append(out.hidden)
    return np.concatenate(logits), np.concatenate(hidden)


def test_the_checkpoint_is_the_one_the_golden_file_was_made_from(case):
    recipe, golden, _ = case
    assert digest(random_checkpoint.stored(recipe)) == str(golden["digest"])


@pytest.mark.parametrize("cuts", CUTS)
def test_logits_and_state(case, cuts):
    _, golden, checkpoint = case
    tower = CpuTower(checkpoint, pages=2, slots=1)
    logits, _ = run(tower.forward, golden["ids"], CUTS[cuts])
    rows = golden["logits"].shape[0]
    assert np.abs(logits[-rows:] - golden["logits"]).max() < 5e-4
    assert np.abs(tower.S[:, 0] - golden["S"]).max() < 1e-4
    assert np.abs(tower.window[:, 0] - golden["conv"]).max() < 1e-4


@pytest.mark.parametrize("cuts", ["whole", "in pieces"])
def test_mtp_logits(case, cuts):
    recipe, golden, checkpoint = case
    assert checkpoint.has_mtp == ("mtp_logits" in golden)
    if not checkpoint.has_mtp:
        return
    tower = CpuTower(checkpoint, pages=2, slots=1)
    ids = golden["ids"]
    _, hidden = run(tower.forward, ids, [])
    logits, _ = run(tower.forward_mtp, ids[1:], [cut for cut in CUTS[cuts] if cut < len(ids) - 1], hidden=hidden[:-1])
    rows = golden["mtp_logits"].shape[0]
    assert np.abs(logits[-rows:] - golden["mtp_logits"]).max() < 5e-4
