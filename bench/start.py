"""Start-up of the CUDA tower on this machine's GPU, itemised: the first start (nothing compiled yet) and the second.

    python bench/start.py [--shape 27b] [--load GB]

Each start is a fresh process with its own folder of compiled kernels: nano from its file, then with --shape the 27B's shapes
with synthetic weights. Items: imports, opening the device, building the tower (weights, pools), the first forward of one
row (kernels compiled or read, a graph captured), the second, and all graphs captured, as a server does before it is ready.
--load: how fast so many GB of a file, in the page cache, come to the device, copied as they are or through pinned buffers.
Prints a table, then one JSON line.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time


def start(shape):
    """Seconds by item, in this process."""
    marks = [("", time.perf_counter())]
    mark = lambda name: marks.append((name, time.perf_counter()))
    import numpy as np
    from qwentin import nano
    from qwentin.device import Device
    from qwentin.model.backend import GpuBackend
    from qwentin.model.cuda import CudaTower
    from qwentin.model.matrix import Source
    from qwentin.model.weights import open_checkpoint
    from qwentin.step import Rows, pack
    mark("imports")
    backend = GpuBackend(Device.open())
    mark("device")
    if shape == "nano":
        checkpoint = open_checkpoint(nano.DIRECTORY)
        source, config = Source(checkpoint, backend), checkpoint.config
    else:
        from synthetic import SyntheticSource, config_of
        config = config_of(shape)
        source = SyntheticSource(config, backend)
    mark("source")
    tower = CudaTower(config, source, 64, 2, active=1)
    backend.synchronize()
    mark("tower")
    tower.clear_slot(0)
    for name in ("first forward", "second forward", "third forward"):
        tower.forward(pack([Rows(np.array([5], np.int32), 0, np.array([0], np.int32), 0, np.array([0], np.int32))]))
        mark(name)
    tower.capture()
    mark(f"all {len(tower.graphs)} graphs")
    return {name: b - a for (_, a), (name, b) in zip(marks, marks[1:])}


def load(size):
    """GB/s by way of copying: one file of `size` bytes, read into the page cache before."""
    import numpy as np
    from qwentin.device import Device
    from qwentin.model.conveyor import Conveyor
    stream, found = Device.open().stream, {}
    target = stream.device.empty((size >> 12, 4096), np.uint8)
    with tempfile.NamedTemporaryFile(dir=".") as file:
        np.lib.format.open_memmap(file.name, "w+", np.uint8, target.shape)[:] = 7
        ways = {"as it is": target.upload, **{
            f"pinned, {threads} threads": (lambda c: lambda values: c.send(target, values))(Conveyor(stream, threads))
            for threads in (1, 2, 4, 8)}}
        for name, way in ways.items():
            for _ in range(2):
                values = np.load(file.name, mmap_mode="r")
                begun = time.perf_counter()
                way(values)
                stream.synchronize()
                found[name] = size / (time.perf_counter() - begun) / 1e9
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=["nano", "27b"])
    parser.add_argument("--load", type=float, default=0, metavar="GB")
    parser.add_argument("--one", help="start this shape here (what this script runs)")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(start(options.one)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shape:
            for which in ("first", "second"):
                where = os.path.join(folder, shape)
                begun = time.perf_counter()
                done = subprocess.run([sys.executable, __file__, "--one", shape], capture_output=True, text=True, check=True,
                                      env={**os.environ, "XDG_CACHE_HOME": where})
                items = json.loads(done.stdout.splitlines()[-1])
                rows.append(dict(shape=shape, start=which, process_s=time.perf_counter() - begun, items=items))
                print(f"{shape:5} {which:7} {rows[-1]['process_s']:6.2f} s:  "
                      + "  ".join(f"{name} {seconds:.3f}" for name, seconds in items.items()), flush=True)
    loads = load(int(options.load * 1e9) >> 12 << 12) if options.load else {}
    for name, rate in loads.items():
        print(f"loading, {name:20} {rate:6.1f} GB/s")
    print(json.dumps(dict(bench="start", rows=rows, loads=loads)))


if __name__ == "__main__":
    main()
