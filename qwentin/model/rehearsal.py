"""The kernels that serving will launch, known and compiled before the device holds anything, in as many processes as help.

    a tower that only counts (memory.py) -> every graph's launches listed -> those not on disk yet -> compiled there

A kernel takes numba and the assembler 1 to 9 s: one after the other they would let a first start wait for half a minute.

Who calls: towers.py. Proven by tests/test_memory.py.
"""
import functools
import logging
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from ..kernels import build, machines
from .chain import ONE
from .cuda import CudaTower
from .memory import CountingBackend, CountingSource
from .weights import open_checkpoint

log = logging.getLogger("qwentin.towers")

MOST = 16                       # processes: each imports numba, 0.3 GB


class RehearsalBackend(CountingBackend):
    """Nothing is launched or copied; `stream.kernels` are those that would be."""

    def __init__(self, chip, multiprocessors, shared):
        super().__init__(chip, multiprocessors, shared)
        self.stream = machines.Recorder()

    def record(self, queue):
        queue()

    def staging(self, shape, dtype):
        return np.zeros(shape, dtype)

    def write(self, array, values):
        pass

    def read(self, array, into):
        pass

    def synchronize(self):
        pass


@functools.cache
def rehearsed(directory, chip, multiprocessors, shared, shape):
    """(tower, its backend) after a decode step; shape: names and values of CudaTower's arguments."""
    backend = RehearsalBackend(chip, multiprocessors, shared)
    with open_checkpoint(directory) as checkpoint:
        built = CudaTower(checkpoint.config, CountingSource(checkpoint, backend), **dict(shape))
    built.record("forward", built.scratch.buffers(ONE), built.queue_forward)
    return built, backend


@functools.cache
def kernels(where, shape) -> list:
    """Of all graphs, in the order of their first launches."""
    tower, backend = rehearsed(*where, shape)
    tower.capture()
    return backend.stream.kernels


def compile_one(number, where, shape):
    """In a process of its own."""
    kernels(where, shape)[number].cubin(where[1])


def compile_ahead(directory, chip, multiprocessors, shared, **shape):
    """Compile what is missing on disk. If a decode step's kernels are there, so are all others but for an accident, and that
    one is compiled when it is captured."""
    where, shape = (directory, chip, multiprocessors, shared), tuple(shape.items())
    _, backend = rehearsed(*where, shape)
    if all(build.on_disk(kernel, chip) for kernel in backend.stream.kernels):
        return
    missing = [i for i, kernel in enumerate(kernels(where, shape)) if not build.on_disk(kernel, chip)]
    processes = min(len(missing), os.cpu_count() or 1, MOST)
    log.info("compiling %d kernels in %d processes", len(missing), processes)
    try:
        with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(functools.partial(compile_one, where=where, shape=shape), missing))
    except (BrokenProcessPool, OSError) as error:
        log.warning("kernels are compiled one after the other: %s", error)
