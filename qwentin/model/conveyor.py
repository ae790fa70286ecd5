"""Host arrays to the device through two pinned buffers: one is filled, by several threads, while the other one travels.

    file's map --threads--> [ buffer 0 ] --copy engine--> device
               --threads--> [ buffer 1 ] -->                        a copy from unpinned memory does one after the other

Who calls: model/backend.py, at load. Measured by bench/start.py.
"""
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..device import Event
from ..driver import pinned

SIZE = 32 << 20                 # bytes of a buffer
THREADS = 8                     # that fill one: of a file's map an H200's host reads 6 GB/s with one, 19 with 4, 25 with 8


class Conveyor:
    """The buffers of one stream, in whose order copies arrive."""

    def __init__(self, stream, threads=THREADS):
        self.stream, self.threads = stream, threads
        self.pool = ThreadPoolExecutor(threads)
        self.buffers, self.arrived, self.turn = [pinned((SIZE,), np.uint8) for _ in range(2)], [None, None], 0

    def send(self, array, values):
        """Queue a copy of a host array, which the caller may change afterwards."""
        row = array.nbytes // max(len(array), 1)
        step = SIZE // max(row, 1)
        if not step or not array.shape:
            return array.upload(values)
        for at in range(0, len(array), step):
            part = values[at:at + step]
            buffer = self.free_buffer()[:part.nbytes].view(array.dtype).reshape(part.shape)
            share = -(-len(part) // self.threads)
            list(self.pool.map(lambda i: np.copyto(buffer[i:i + share], part[i:i + share]), range(0, len(part), share)))
            array[at:at + len(part)].upload(buffer, self.stream)
            self.arrived[self.turn].record(self.stream)
            self.turn ^= 1

    def free_buffer(self):
        """The one whose turn it is, once what it held has arrived."""
        if self.arrived[self.turn] is None:
            self.arrived[self.turn] = Event()
        else:
            self.arrived[self.turn].wait()
        return self.buffers[self.turn]
