"""Memory of the CUDA tower on a GPU: `qwentin budget`'s prediction beside what the device has less, at the longest context.

    python bench/memory_cuda.py --shape 27b --synthetic [--context 262144] [--gpu-gib 31.4] [--weights fp6] [--kv e4m3]

The tower is the one that the server plans for so much memory of an H200's chip (towers.planned), its weights made up
(synthetic.py). Free memory is read when it stands, when all its graphs are captured, as they are at load, behind a prompt
of 4,096 rows at the context's end, and behind a decode step after that; the most that is taken counts. Exits with 1 unless
every item is what the tower allocated, to the byte, and the sum is within 1 %. Prints a table, then one JSON line.
"""
import argparse
import json

from prefill_cuda import compile_all, prompt
from qwentin.commands.budget import on_card
from qwentin.config import EngineConfig
from qwentin.device import Device
from qwentin.model import memory, pack
from qwentin.model.backend import GpuBackend
from qwentin.model.budget import CARDS, GIB
from qwentin.model.cuda import CudaTower
from qwentin.model.imagined import converted, imagine
from qwentin.model.rehearsal import RehearsalBackend
from qwentin.towers import described
from synthetic import SHAPES, SyntheticSource, config_of

CARD = CARDS["sm_90a"]
ROWS = 4096                 # of the prompt
WITHIN = 0.01


def launched(checkpoint, shape):
    """The kernels of all graphs."""
    backend = RehearsalBackend(CARD.chip, CARD.multiprocessors, CARD.shared)
    CudaTower(checkpoint.config, memory.CountingSource(checkpoint, backend), **shape).capture()
    return backend.stream.kernels


def items_of(budget, kv):
    """The prediction by the tower's names."""
    items = budget.items
    return {"KV": items[f"KV, {kv}"] + items.get("KV of the MTP head", 0),
            "state": items["state S"] + items["convolution window"],
            **{name: items[name] for name in ("rounds", "scratch", "prefill") if name in items}}


def measure(config, packing, shape, context):
    """(bytes of the tower's items, [(when, bytes of the device taken)])."""
    device, taken = Device.open(), []
    backend = GpuBackend(device)

    def mark(when):
        backend.synchronize()
        taken.append((when, device.memory_bytes - device.free_bytes()))
        print(f"{when:24} {taken[-1][1] / 1e9:8.3f} GB", flush=True)
    mark("opened")
    tower = CudaTower(config, SyntheticSource(config, backend, packing), **shape)
    mark("built")
    tower.capture()
    mark(f"{len(tower.graphs)} graphs")
    tower.clear_slot(0)
    tower.forward(prompt(tower, ROWS, context - ROWS - 1, hidden=True))
    mark(f"a prompt of {ROWS}")
    tower.forward(prompt(tower, 1, context - 1))
    mark("a decode step")
    return memory.parts(tower), taken, device.name


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="27b")
    parser.add_argument("--synthetic", action="store_true", required=True, help="say that the weights are made up")
    parser.add_argument("--weights", default="fp6", choices=["fp6", "fp8", "fp4"])
    parser.add_argument("--kv", default="e4m3", choices=["e4m3", "bf16"])
    parser.add_argument("--context", type=int, default=262144)
    parser.add_argument("--gpu-gib", type=float, default=31.4, help="memory that the plan is for")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    options = parser.parse_args()
    config, kind = config_of(options.shape, options.layers), {"e4m3": "fp8"}.get(options.kv, options.kv)
    checkpoint = converted(imagine(config, "."), options.weights, "fp6")
    budget, plan = on_card(EngineConfig(max_seqs=1), checkpoint, options.context, kind, int(options.gpu_gib * GIB), CARD)
    shape = dict(plan.shape, pages=plan.pages)
    print(f"{described(plan.counted)}; predicted {budget.total / 1e9:.3f} GB:")
    for name, size in budget.items.items():
        print(f"    {name:24} {size / 1e9:8.3f}")
    compile_all(launched(checkpoint, shape))
    parts, taken, name = measure(config, pack.WEIGHTS[options.weights].name, shape, options.context)
    most = max(size for _, size in taken)
    off, same = most / budget.total - 1, parts == items_of(budget, kind)
    print(f"at most {most / 1e9:.3f} GB taken, predicted {budget.total / 1e9:.3f}: {off:+.2%}; items "
          f"{'as predicted to the byte' if same else f'differ: {parts}'}")
    print(json.dumps(dict(bench="memory_cuda", device=name, weights=options.weights, kv=options.kv, context=options.context,
                          prefill=described(plan.counted), predicted=budget.total, items=budget.items, taken=taken)))
    if not same or abs(off) > WITHIN:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
