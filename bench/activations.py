"""What activations in e4m3 cost in quality: wide prefill's products, emulated by the numpy tower, on nano.

    python bench/activations.py [--model DIR] [--weights fp6] [--no-answers]

An emulation, not the kernels: what the layers' matrices multiply is rounded to e4m3, one scale for a
row (kernels/quantise_rows.py), and multiplied in float32. The head and the delta rule are left alone. Against
the same packed weights with float32 activations:

    teacher-forced    bench/quality.py's columns, every row rounded, also those of the answer, which a GPU decodes in f16
    exact answers     generated; only steps of 65 rows or more are rounded, decode rows among them too

Prints a table, then one JSON line.
"""
import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

import numpy as np

from qwentin import nano, numerics
from qwentin.kvpool import pages_for
from qwentin.model.convert import prepare
from qwentin.model.cpu import CpuTower
from qwentin.model.panels import Panels
from qwentin.model.weights import open_checkpoint

LARGEST, LEAST = 448, 65


class Rounding:
    """A matrix that rounds what it is multiplied with, if that has `least` rows."""

    def __init__(self, panels, least):
        self.panels, self.least = panels, least

    def __call__(self, x, workers=None):
        return self.panels(rounded(x) if len(x) >= self.least else x, workers)


def rounded(x: np.ndarray) -> np.ndarray:
    """f32 [T, K] as e4m3 keeps it."""
    top = np.abs(x).max(-1, keepdims=True)
    scale = np.where(top > 0, top / LARGEST, 1).astype(np.float32)
    return numerics.E4M3.decode(numerics.E4M3.encode(x / scale)).astype(np.float32) * scale


def e4m3(tower, least=1):
    """A numpy tower, changed in place."""
    def changed(part):
        return dataclasses.replace(part, **{f.name: Rounding(getattr(part, f.name), least) for f in dataclasses.fields(part)
                                            if isinstance(getattr(part, f.name), Panels)})
    tower.layers = [dataclasses.replace(changed(layer), mixer=changed(layer.mixer)) for layer in tower.layers]
    return tower


def main():
    import quality
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(nano.DIRECTORY))
    parser.add_argument("--weights", default="fp6")
    parser.add_argument("--longest", type=int, default=1200)
    parser.add_argument("--no-answers", action="store_true")
    options = parser.parse_args()
    cases, everyone = (quality.read_cases(options.model, quality.EVAL, n) for n in (options.longest, 1 << 30))
    pages = pages_for(max(len(case.prompt) + len(case.reference) for case in cases))
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "packed"
        prepare(options.model, directory, options.weights, "fp6").run()
        plain = CpuTower(open_checkpoint(directory), pages, 1)
        coarse, tally = e4m3(CpuTower(open_checkpoint(directory), pages, 1)), quality.Tally()
        for case in cases:
            ids = np.concatenate([case.prompt, case.reference])
            tally.add(ids, quality.read_text(plain, ids)[0], *quality.read_text(coarse, ids))
        found = {k: float(v) for k, v in tally.summary().items()}
        print(f"{options.weights}, activations in e4m3 against float32, emulated: "
              + ", ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True)
        if not options.no_answers:
            texts = [quality.answers(directory, everyone, change, prefill_chunk=8192) for change in
                     (lambda tower: tower, lambda tower: e4m3(tower, LEAST))]
            found["exact"] = [quality.exact(everyone, each) for each in texts]
            found["same"] = sum(a == b for a, b in zip(*texts))
            print(f"exact answers {found['exact'][1]}, with float32 {found['exact'][0]}; {found['same']} of {len(everyone)} "
                  "texts are the same")
    print(json.dumps(dict(bench="activations", weights=options.weights, **found)))


if __name__ == "__main__":
    main()
