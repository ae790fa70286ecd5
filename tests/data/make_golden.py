"""Make layouts.npz: what a float64 model answers for each recipe of tests/random_checkpoint.py.

    python tests/data/make_golden.py ORACLE.py

ORACLE.py is an independent numpy model of the architecture that is not part of this project; it was itself checked
against transformers in float32 (largest logit difference 1e-4 and less). What it must offer:

    Cfg.from_dict(config); RefModel(cfg, weights, dtype): new_state(), forward(ids, state) -> (hidden, logits)
    RefMTP(model, weights): new_state(), forward(state, next_ids, hidden) -> (hidden, logits)
    dequant_fp8_block(codes, scale, dtype=) -> weights

The weights are not kept: tests make the same checkpoints again from their seeds. For each recipe the file holds

    <recipe>/ids          i32 [T]
    <recipe>/logits       f32 [ROWS, V]                 of the last rows
    <recipe>/mtp_logits   f32 [ROWS, V]                 of the last pairs (H[t], ids[t+1]); absent without an MTP head
    <recipe>/S            f32 [linear layers, Nv, dk, dv]     the state after the last token
    <recipe>/conv         f32 [linear layers, taps - 1, C]    the convolution's window, oldest row first
    <recipe>/digest       of the weights, so that a test can tell a changed checkpoint from a wrong tower
"""
import argparse
import hashlib
import importlib.util
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE.parents[1]))

import random_checkpoint  # noqa: E402  (needs the path above)

TOKENS = 90                                             # one whole chunk of 64 and a ragged one
ROWS = 40                                               # rows 50..89: on both sides of the chunk's edge


def load(path):
    """The oracle as a module, from its file."""
    spec = importlib.util.spec_from_file_location("oracle", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["oracle"] = module                      # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def digest(arrays) -> str:
    """Of names and bytes, in order."""
    sha = hashlib.sha256()
    for name, array in arrays.items():
        sha.update(name.encode() + array.tobytes())
    return sha.hexdigest()


def decoded(arrays, oracle) -> dict[str, np.ndarray]:
    """f64 values of the stored arrays, block scales applied."""
    out = {}
    for name, array in arrays.items():
        scale = arrays.get(name + "_scale_inv")
        if scale is not None:
            out[name] = oracle.dequant_fp8_block(array.view(np.uint8), scale, dtype=np.float64)
        elif not name.endswith("_scale_inv"):
            out[name] = array.astype(np.float64)
    return out


def answer(recipe, oracle) -> dict[str, np.ndarray]:
    """The golden arrays of one recipe."""
    arrays = random_checkpoint.stored(recipe)
    weights = decoded(arrays, oracle)
    model = oracle.RefModel(oracle.Cfg.from_dict(recipe.geometry), weights, np.float64)
    ids = np.random.RandomState(recipe.seed + 100).randint(0, recipe.config.vocab_size, TOKENS)
    state = model.new_state()
    hidden, logits = model.forward(ids, state)
    linear = [layer for layer in state["layers"] if "S" in layer]
    out = {"ids": ids.astype(np.int32), "logits": logits[-ROWS:],
           "S": np.stack([layer["S"] for layer in linear]), "conv": np.stack([layer["conv"] for layer in linear]),
           "digest": np.array(digest(arrays))}
    if recipe.config.mtp_num_hidden_layers:
        head = oracle.RefMTP(model, weights)
        out["mtp_logits"] = head.forward(head.new_state(), ids[1:], hidden[:-1])[1][-ROWS:]
    return {key: value.astype(np.float32) if value.dtype == np.float64 else value for key, value in out.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("oracle", help="the float64 reference model, a Python file")
    oracle = load(parser.parse_args().oracle)
    golden = {}
    for name, recipe in random_checkpoint.RECIPES.items():
        arrays = answer(recipe, oracle)
        golden |= {f"{name}/{key}": value for key, value in arrays.items()}
        print(name, {key: value.shape for key, value in arrays.items()}, "max", np.abs(arrays["logits"]).max())
    np.savez_compressed(HERE / "layouts.npz", **golden)
