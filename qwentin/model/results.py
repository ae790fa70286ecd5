"""What a step's rounds gave, put together on the host: a few integers of each wanted row, its logits only if asked.

    best 64 values and ids of a row    the round has copied them
    hiddens                            copied if the step wants them
    logits                             stay on the device until the tower's next round writes over them

Who calls: model/cuda.py, model/wide.py. Proven by tests/test_cuda.py.
"""
import numpy as np

from ..step import Output
from .buffers import BEST


class Results:
    """Of one step on `tower`: add each of its rounds once it is launched, then take the output."""

    def __init__(self, tower, step):
        self.tower, self.outputs = tower, len(step.outputs)
        self.hidden = np.empty((step.rows, tower.config.hidden_size), np.float32) if step.hidden else None
        self.seeded = np.zeros(step.sequences, np.int32)        # rows that the draft head has of each sequence (wide.py)
        self.ids = self.values = None
        self.last, self.round = None, 0         # (buffers, outputs, how many) whose logits are on the device
        self.whole = {}                         # output: its logits, of rounds before

    def make_way(self):
        """The next round writes over the logits of the last."""
        if self.last is not None:
            _, wanted, n = self.last
            self.whole.update(zip(np.arange(self.outputs)[wanted].tolist(), self.read(slice(0, n))))
            self.last = None

    def add(self, part):
        """Wait for a round that was launched, and take what came back."""
        tower = self.tower
        if self.hidden is not None:
            tower.backend.read(part.buffers.normed[:part.rows], tower.host_hidden[:part.rows])
        tower.backend.synchronize()
        self.take(part.buffers, part.wanted, part.outputs)
        if self.hidden is not None:
            self.hidden[part.at] = tower.host_hidden[:part.rows]

    def take(self, b, wanted, n):
        """The candidates of n outputs, `wanted` of the step's, from a round that is over; their logits stay there."""
        if not n:
            return
        self.last, self.round = (b, wanted, n), self.tower.rounds
        ids, values = b.host["best_ids"][:n], b.host["best_values"][:n]
        if n == self.outputs:
            self.ids, self.values = ids.astype(np.int64), values.copy()
            return
        if self.ids is None:
            self.ids, self.values = np.empty((self.outputs, BEST), np.int64), np.empty((self.outputs, BEST), np.float32)
        self.ids[wanted], self.values[wanted] = ids, values

    def output(self) -> Output:
        if self.ids is None:
            self.ids, self.values = np.empty((0, BEST), np.int64), np.empty((0, BEST), np.float32)
        return Output(self.fetch, self.hidden, (self.ids, self.values), self.seeded)

    def fetch(self, which: slice) -> np.ndarray:
        """Logits of some outputs, f32 [n, V]."""
        if self.last is not None and self.last[2] == self.outputs:
            return self.read(which)
        place = {} if self.last is None else {
            i: at for at, i in enumerate(np.arange(self.outputs)[self.last[1]].tolist())}
        rows = [self.whole[i] if i in self.whole else self.read(slice(place[i], place[i] + 1))[0]
                for i in range(*which.indices(self.outputs))]
        return np.array(rows, np.float32).reshape(-1, self.tower.config.vocab_size)

    def read(self, rows: slice) -> np.ndarray:
        """Rows of the last round's logits."""
        tower = self.tower
        assert self.round == tower.rounds, "logits are read before the next round"
        device = self.last[0].logits[rows]
        tower.backend.read(device, tower.host_logits[:len(device)])
        tower.backend.synchronize()
        return tower.host_logits[:len(device)].copy()
