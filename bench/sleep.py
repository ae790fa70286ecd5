"""Sleep and wake of an engine, measured: by what memory falls, what a wake takes, and that the turn after is warm and equal.

    python bench/sleep.py [--device auto|cpu|cuda] [--model DIR] [--tokens 600]

Memory is the device's free bytes on a GPU, the process's resident bytes without one. A prompt of --tokens ids is asked twice
(cold, warm), the engine sleeps, a third asking wakes it. Refuses to print times if the three answers differ. Prints a table,
then one JSON line.
"""
import argparse
import json
import threading
import time

import numpy as np

from qwentin.config import EngineConfig
from qwentin.device import Device
from qwentin.engine import Engine
from qwentin.request import Delta, Done, GenerateRequest, SamplingParams


def taken(device: str) -> int:
    """Bytes in use, so that differences are what something takes."""
    if not device.startswith("cpu"):
        return -Device.open().free_bytes()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def ask(engine, name, ids):
    """(ids of the answer, cached tokens, seconds)."""
    done, events, begun = threading.Event(), [], time.perf_counter()

    def sink(event):
        events.append(event)
        if isinstance(event, Done):
            done.set()
    engine.submit(GenerateRequest(name, ids, SamplingParams(temperature=0.0), max_tokens=16), sink)
    done.wait()
    said = [token.id for event in events if isinstance(event, Delta) for token in event.tokens]
    return said, events[-1].usage.cached_tokens, time.perf_counter() - begun


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--tokens", type=int, default=600)
    options = parser.parse_args()
    engine = Engine.load(EngineConfig(device=options.device, model=options.model))
    engine.start()
    device = engine.status()["device"]
    ids = np.random.default_rng(0).integers(300, 3000, options.tokens).astype(np.int32)
    cold, warm = ask(engine, "cold", ids), ask(engine, "warm", ids)
    awake = taken(device)
    begun = time.perf_counter()
    engine.sleeper.sleep()
    slept_s, asleep, status = time.perf_counter() - begun, taken(device), engine.status()
    woken = ask(engine, "woken", ids)
    again, wake_s = taken(device), engine.status()["wake_seconds"]
    engine.stop()
    if not cold[0] == warm[0] == woken[0] or woken[1] < warm[1]:
        raise SystemExit(f"the answers differ: {cold}, {warm}, {woken}")
    freed = sum(status["freed"].values())
    row = dict(bench="sleep", device=device, freed_mib=freed / 2**20, fell_mib=(awake - asleep) / 2**20, sleep_s=slept_s,
               parked_mib=status["parked_bytes"] / 2**20, wake_s=wake_s, grew_mib=(again - asleep) / 2**20,
               cached=woken[1], cold_s=cold[2], warm_s=warm[2], woken_s=woken[2])
    for name, value in row.items():
        print(f"{name:12} {value:.3f}" if isinstance(value, float) else f"{name:12} {value}")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
