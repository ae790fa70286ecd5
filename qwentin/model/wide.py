"""Wide prefill: a chunk of one sequence's prompt, all its rows through each layer at once, so that weights are read once.

    Step -> chunks of up to `most` rows (here), then what is left in rounds of at most 32 (rounds.py)

    a chunk:     embed | layers x ( norm, mixer, norm + residual, MLP ) | norm, wanted rows, head | draft head's keys
    a product:   rows [T, K] and a matrix -> out [T, N], as products.py says for the chip

A chunk's slot is settled before it and owes nothing behind it. The draft head is one layer, so its keys and values of a row
come of that row's hidden and the token behind it alone: where the step names these tokens, the chunk leaves them in the
head's pages, and no hidden but the last goes to the host.

Who calls: model/cuda.py. Proven by tests/test_wide.py.
"""
import numpy as np

from ..kernels import embed, rmsnorm
from ..step import is_chain
from .arena import Arena
from .buffers import ROWS, Bucket
from .products import way_of, ways
from .rounds import Span

LEAST = 65                      # rows of a sequence that go wide: fewer are two rounds, which read the weights twice
STEP = 128                      # rows of a tile: chunks are cut there
SIZES = range(STEP, 1025, STEP)         # rows of chunks that are captured, and the most; of others the launches take no time


def opened(tower, most, pages, activations, resident):
    """(a tower's Wide, or None without rows or where its prompts cannot go wide; why they cannot, "" if they can)."""
    why = hindrance(tower, activations)
    return Wide(tower, most, pages, activations, resident) if most and not why else None, why


def hindrance(tower, activations) -> str:
    """Why a tower's prompts cannot go wide, in words; "" if they can."""
    found = ways(tower.backend.chip, activations)
    if not found:
        return f"no {activations} product for {tower.backend.chip}"
    stuck = [m for part in parts(tower) for m in part.matrices if not way_of(found, m)]
    if not stuck:
        return ""
    kinds = sorted({m.packing.name if m.plain is None else "16-bit" for m in stuck})
    return f"{len(stuck)} matrices are {' and '.join(kinds)}, which is multiplied in rounds"


def parts(tower):
    """What a chunk goes through: parts with `matrices`, of which the first reads a norm, and `row_bytes`."""
    for layer in tower.layers:
        yield from (layer.mixer, layer.mlp)
    if tower.mtp:
        yield tower.mtp


def chunks(step, r, most):
    """Sequence r's rows as spans of nearly the same size, in whole tiles but the last."""
    first, stop = int(step.starts[r]), int(step.starts[r + 1])
    count = stop - first
    each = -(-count // -(-count // most))
    each = min(-(-each // STEP) * STEP, most)
    return [Span(r, first + done, min(each, count - done), done) for done in range(0, count, each)]


class Wide:
    """Wide prefill of a tower in chunks of up to `most` rows, a multiple of 128; activations: e4m3 where it can, or f16."""

    def __init__(self, tower, most, pages, activations="e4m3", resident=False):
        self.tower, self.most, self.backend = tower, most, tower.backend
        self.arena = Arena(tower.backend, tower.config, most, pages, list(parts(tower)),
                           ways(tower.backend.chip, activations), resident)
        self.nbytes = self.arena.nbytes
        self.seen = set()               # sizes of chunks that came once

    def takes(self, step, r) -> bool:
        """Whether a sequence's rows of a step go wide: committed, a chain, enough of them, and nothing to accept first."""
        rows = step.span(r)
        return rows.stop - rows.start >= LEAST and bool(step.commit[r]) and not len(step.accepted[r]) \
            and is_chain(step.parents[rows])

    def run(self, step, results) -> frozenset[int]:
        """Run the sequences of a step that go wide; what they give is in `results`. Which they are."""
        if step.rows < LEAST:
            return frozenset()
        taken = [r for r in range(step.sequences) if self.takes(step, r)]
        for r in taken:
            self.tower.settle(int(step.slots[r]))
            for span in chunks(step, r, self.most):
                self.run_chunk(step, span, results)
        return frozenset(taken)

    def run_chunk(self, step, span, results):
        tower = self.tower
        wanted = np.flatnonzero((step.outputs >= span.first) & (step.outputs < span.first + span.count))
        c = self.arena.stage(step, span, step.outputs[wanted] - span.first)
        self.launch(c)
        for at in range(0, len(wanted), ROWS):
            self.choose(c, at, wanted[at:at + ROWS], results)
        if tower.head.raw:
            self.backend.copy(c.normed, c.hidden)
        if step.hidden:                         # of rows that seed the draft head nobody wants the hidden
            first = 0 if step.follows is None or not tower.mtp else span.count - 1
            self.backend.read(c.normed[first:c.count], results.hidden[span.first + first:span.first + span.count])
        if c.known and tower.mtp:
            tower.mtp.queue_seeds(self.backend, c, tower.embedding)
            results.seeded[span.r] += c.known
        self.backend.synchronize()

    def launch(self, c):
        """All layers over a chunk. A size that comes again is captured, if it was not at load: one launch in place of a
        thousand."""
        graphs, key = self.tower.graphs, ("wide", c.rows)
        if key in graphs:
            graphs[key].launch()
        elif key in self.seen and (c.rows == self.most or c.rows in SIZES):
            graphs[key] = self.backend.record(lambda: self.queue(c))
            graphs[key].launch()
        else:
            self.seen.add(key)
            self.queue(c)

    def settle_matrices(self):
        """Unpack those that stay so now, not when a graph is recorded."""
        for part in parts(self.tower):
            self.arena.settle(part.matrices)

    def queue(self, c, watch=lambda name, hidden, delta: None):
        """All layers over a chunk; leaves c.normed. watch: shown what each part of a layer read and what it gave."""
        tower, stream = self.tower, self.backend.stream
        table, scale, format = tower.embedding
        embed.launch(stream, c.tokens, table, scale, c.hidden, format)
        for i, layer in enumerate(tower.layers):
            c.norm(layer.mixer.matrices[0], c.hidden, c.delta if i else None, layer.norm_in.weight, layer.norm_in.eps)
            layer.mixer.queue_wide(self.backend, c)
            watch(f"layer {i} {layer.mixer.kind}", c.hidden, c.delta)
            c.norm(layer.mlp.matrices[0], c.hidden, c.delta, layer.norm_post.weight, layer.norm_post.eps)
            layer.mlp.queue_wide(self.backend, c)
            watch(f"layer {i} mlp", c.hidden, c.delta)
        rmsnorm.launch(stream, c.hidden, c.delta, tower.norm, c.normed, tower.config.rms_norm_eps)

    def choose(self, c, at, wanted, results):
        """The head over up to 32 of a chunk's wanted rows, from its `at`-th on."""
        tower, n = self.tower, len(wanted)
        b = tower.scratch.buffers(Bucket.of(n, n, 1, n))
        results.make_way()
        tower.head.choose(self.backend, b, c.normed, c.outputs[at:at + b.bucket.outputs], tower.work)
        tower.rounds += 1
        self.backend.synchronize()
        results.take(b, wanted, n)
