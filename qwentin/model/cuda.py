"""The CUDA tower: the model as a list of launches, captured once for each size of round and replayed.

    Step -> long prompts in wide chunks (wide.py), where there is a product for them (products.py)
         -> rounds of at most 32 rows (rounds.py) -> integers copied in, one graph launch, best ids copied out (buffers.py)

    a round:   embed | 64 x ( norm, mixer, norm + residual, MLP ) | norm, wanted rows, head, candidates

It implements what model/cpu.py does, with the same names, and runs on a GPU or, for tests, under the emulator: the same
launches, the same PTX. The arrays that KVPool and StateSlots only count:

    kv   bf16 or e4m3 [2 L, P, 128, G, 256]     K and V of the full layers in turn, the draft head's last
    S, window and the rows that a state still lags behind: one set of Pools a linear layer (deltanet.py)

Who calls: engine.py. Proven by tests/test_cuda.py; on a GPU, bench/parity.py.
"""
import numpy as np
from tqdm import tqdm

from ..config import FULL
from ..kernels import embed, kv_move, plan
from ..kvpool import PAGE
from ..step import Output, Row, Step
from . import graphs, past
from .attention import Attention
from .buffers import ROWS, Scratch
from .chain import LINKS, Chain
from .deltanet import DeltaNet, Pools
from .head import heads
from .layer import Layer
from .matrix import workspace
from .mtp import DraftHead
from .norm import Norm
from .results import Results
from .rounds import Ledger, split
from .staging import Part, fill, gaps, pad, path_moves
from .trace import Trace
from .wide import opened

KV_DTYPES = {"bf16": np.uint16, "e4m3": np.uint8}


class CudaTower:
    """`pages` pages of KV and `slots` recurrent states on `backend`, weights from `source` (matrix.Source).

    active: how many sequences run at once, at most: each may have rows that its state lags behind; kv: format of the pages;
    wide: rows of a chunk of prefill, 0 for rounds alone; resident: its matrices stay unpacked; prefill: format of its
    activations (products.py); draft: head.heads'.
    """

    def __init__(self, config, source, pages, slots, has_mtp=True, kv="bf16", active=16, valid=None, wide=0, resident=False,
                 prefill="e4m3", **draft):
        c, backend = config, source.backend
        self.config, self.backend, self.kv_name = c, backend, f"kv_{kv}"
        layers = len(c.full_layers) + has_mtp
        self.kv = backend.zeros((2 * layers, pages, PAGE, c.num_key_value_heads, c.head_dim), KV_DTYPES[kv])
        self.main_kv = self.kv[:2 * len(c.full_layers)]     # the draft head's rows are not a tree's: they stay
        self.pools = [Pools.make(backend, c, slots, 2 * active, ROWS) for _ in c.linear_layers]
        self.scratch = Scratch(backend, c, min(pages, -(-c.max_position_embeddings // PAGE)), kv)
        self.work = workspace(backend)
        self.ledger = Ledger(active, self.settle)
        self.embedding = source.table("model.embed_tokens.weight")
        self.layers = self.read_layers(source)
        self.norm = backend.upload(source.vector("model.norm.weight"))
        self.head, self.draft_head = heads(source, c, valid, **draft)
        self.last = Norm(self.norm, c.rms_norm_eps)         # the head does it
        self.mtp = DraftHead.read(source, c, self.read_layer(source, "mtp.layers.0.", FULL, layers - 1)) if has_mtp else None
        self.host_logits = backend.staging((ROWS, c.vocab_size), np.float32)
        self.host_hidden = backend.staging((ROWS, c.hidden_size), np.float32)
        self.chain = Chain(backend, self.scratch)
        self.graphs = {}                # (what, Bucket or None) -> Replay
        self.rounds = 0                 # that wrote logits
        table = min(pages, -(-c.max_position_embeddings // PAGE))
        self.wide, self.hindrance = opened(self, wide, table, prefill, resident)

    # ------------------------------------------------------------------ loading
    def read_layers(self, source):
        kinds = tqdm(self.config.layer_types, desc="loading", unit="layer", leave=False, disable=None)
        full, linear = iter(range(len(self.config.full_layers))), iter(self.pools)
        found = []
        for i, kind in enumerate(kinds):
            before, state = found[-1].mlp.down if i else None, next(full if kind == FULL else linear)
            found.append(self.read_layer(source, f"model.layers.{i}.", kind, state, before))
        return found

    def read_layer(self, source, prefix, kind, state, before=None):
        """state: the layer's place in kv, or its pools; before: the matrix that ends the layer before it."""
        mixer = Attention.read(source, prefix, self.config, self.kv[2 * state], self.kv[2 * state + 1]) if kind == FULL \
            else DeltaNet.read(source, prefix, self.config, state)
        return Layer.read(source, prefix, self.config, mixer, before)

    def attach(self):
        """Let the calling thread run the tower: a GPU wants to know its threads."""
        self.backend.attach()

    # ------------------------------------------------------------------ state, as the pools direct
    def clear_slot(self, slot):
        """The state before the first token."""
        self.ledger.close(slot)
        for pools in self.pools:
            self.backend.clear(pools.S[slot])
            self.backend.clear(pools.window[slot])

    def copy_slot(self, source, target):
        self.settle(source)
        self.ledger.close(target)
        for pools in self.pools:
            self.backend.copy(pools.S[target], pools.S[source])
            self.backend.copy(pools.window[target], pools.window[source])

    def copy_page(self, source, target):
        for plane in range(self.kv.shape[0]):
            self.backend.copy(self.kv[plane][target], self.kv[plane][source])

    def export_state(self, slot, pages, length):
        """All of one sequence's past, for the disk."""
        self.settle(slot)
        return past.export(self, slot, pages, length)

    def import_state(self, slot, pages, arrays):
        """Put an exported past into a slot and pages; False, with nothing changed, if it is another model's or format's."""
        if not past.fits(self, pages, arrays):
            return False
        self.ledger.close(slot)
        past.restore(self, slot, pages, arrays)
        return True

    def settle(self, slot):
        """Bring a slot's state up to the rows that it has committed."""
        owed = self.ledger.close(slot)
        if owed is not None:
            self.advance(slot, *owed)

    def commit(self, slot, pages, length, accepted):
        """Make accepted rows of a slot's open tree part of its past, without a step; `length` rows are in its cache."""
        entry = self.ledger.take(slot)
        self.advance(slot, entry, tuple(int(row) for row in accepted), path_moves(pages, length, accepted))

    def advance(self, slot, entry, path, moves=()):
        """Replay rows of an entry into a slot's state, and close the gaps among their keys."""
        b = self.scratch.buffers(graphs.ALONE)
        pad(b.host, 0, 0)
        b.host["plan"][:] = plan.table([(slot, 0, 0, entry, -1, path)], ROWS)
        self.close_gaps(moves)
        self.replay("settle", b, self.queue_settle)
        self.backend.synchronize()

    def close_gaps(self, moves):
        """Queue the moves of rows that were accepted to where they belong."""
        if moves:
            host = self.scratch.host_moves
            host[0], host[1:1 + 2 * len(moves)] = len(moves), np.ravel(moves)
            self.replay("moves", None, self.queue_moves)

    def queue_moves(self, _):
        self.backend.write(self.scratch.moves, self.scratch.host_moves)
        kv_move.launch(self.backend.stream, self.main_kv, self.scratch.moves)

    def queue_settle(self, b):
        self.backend.write(b.integers, b.staging)
        for layer in self.layers:
            if isinstance(layer.mixer, DeltaNet):
                layer.mixer.advance(self.backend, b, 0)

    # ------------------------------------------------------------------ the forward passes
    def forward(self, step: Step) -> Output:
        """Run the step: commit the accepted rows, then compute its own."""
        results = Results(self, step)
        return self.run(step, results, "forward", self.queue_forward,
                        but=self.wide.run(step, results) if self.wide else frozenset())

    def forward_mtp(self, step: Step, hidden: np.ndarray) -> Output:
        """The draft head over pairs (hidden of position p, token p + 1), as model/cpu.py has it."""
        return self.run(step, Results(self, step), "mtp", self.queue_mtp, hidden)

    @property
    def longest_chain(self):
        """Guesses that draft_chain can give at once."""
        return LINKS + 1 if self.mtp else 0

    def draft_chain(self, step: Step, hidden: np.ndarray, depth: int) -> list[Row]:
        """As forward_mtp for one sequence and its last row; then the head goes on from its own best guess: `depth` rows in
        all, each what it says behind one more guess."""
        for spans in split(step):
            part = self.stage(step, spans, hidden)
            self.replay("mtp", part.buffers, self.queue_mtp)
            if spans[-1].first + spans[-1].count < step.rows:
                self.backend.synchronize()
        self.chain.stage(step, part.places, depth - 1)
        for i in range(depth - 1):
            self.replay(f"link {i}", self.chain.links[i], self.queue_link)
        self.backend.synchronize()
        return self.chain.rows(part.buffers.host, depth - 1)

    def run(self, step, results, what, queue, hidden=None, but=frozenset()):
        """Run the sequences of a step that are not in `but` in rounds."""
        for spans in split(step, but):
            results.make_way()
            part = self.stage(step, spans, hidden)
            self.replay(what, part.buffers, queue)
            results.add(part)
        return results.output()

    def capture(self):
        """Record every graph that can be needed, so that serving takes no more memory and waits for none."""
        graphs.capture(self)

    def record(self, what, b, queue):
        """Capture the graph of a round, or without buffers of what needs none."""
        graph = self.graphs[what, b and b.bucket] = self.backend.record(lambda: queue(b))
        if b:
            b.graphs[what] = graph
        return graph

    def replay(self, what, b, queue):
        """Launch a graph, captured at its first use at the latest."""
        graph = (b.graphs.get(what) if b else self.graphs.get((what, None))) or self.record(what, b, queue)
        self.rounds += b is not None and b.bucket.outputs > 0
        graph.launch()

    def queue_forward(self, b, watch=lambda name, array: None):
        self.backend.write(b.integers, b.staging)
        table, scale, format = self.embedding
        embed.launch(self.backend.stream, b.tokens, table, scale, b.hidden, format)
        watch("embed", b.hidden)
        for i, layer in enumerate(self.layers):
            then = self.layers[i + 1].norm_in if i + 1 < len(self.layers) else self.last
            layer.queue(self.backend, b, self.work, then, i == 0, lambda name, delta: watch(f"layer {i} {name}", delta))
        self.head.queue(self.backend, b, self.norm, self.work)
        watch("normed", b.normed)

    def queue_mtp(self, b):
        self.backend.write(b.integers, b.staging)
        self.queue_draft(b)

    def queue_link(self, b):
        if b is self.chain.links[0]:
            self.chain.begin(b)
        self.queue_draft(b)

    def queue_draft(self, b):
        table, scale, format = self.embedding
        embed.launch(self.backend.stream, b.tokens, table, scale, b.hidden, format)
        self.mtp.queue_pairs(self.backend, b, self.work)
        self.mtp.layer.queue(self.backend, b, self.work, self.last)
        self.draft_head.queue(self.backend, b, self.mtp.norm, self.work)

    def trace(self, step: Step) -> Trace:
        """Run a step of one round, launch by launch, and keep what every part of a layer gave; its state moves on."""
        spans, = split(step)
        part, found = self.stage(step, spans), Trace()

        def watch(name, array):
            shown = part.buffers.hidden if array is None else array
            into = self.backend.staging(shown.shape, shown.dtype)
            self.backend.read(shown, into)
            self.backend.synchronize()
            (found.grow if array is None else found.add)(name, into[:part.rows])
        self.queue_forward(part.buffers, watch)
        return found

    # ------------------------------------------------------------------ a round's integers
    def stage(self, step, spans, hidden=None):
        """The round's integers, written where its graph copies them from: a Part."""
        draft = hidden is not None
        debts = [None if draft else self.begin(step, s, spans) for s in spans]
        self.close_gaps([] if draft else [m for s in spans for m in gaps(step, s)])
        part = Part.of(step, spans, self.scratch)
        host, T = part.buffers.host, part.rows
        pad(host, T, len(spans))
        host["tokens"][:T], host["positions"][:T] = step.tokens[part.at], step.positions[part.at]
        host["outputs"][:part.outputs] = part.places
        row = 0
        for i, (span, debt) in enumerate(zip(spans, debts)):
            fill(host, step, i, span, row, debt)
            row += span.count
        if draft:
            self.host_hidden[:T] = hidden[part.at]
            self.backend.write(part.buffers.pair[:T], self.host_hidden[:T])
        return part

    def begin(self, step, span, spans):
        """(entry to read, entry to write, rows to replay) for a sequence of a round; the ledger takes note."""
        slot, accepted = int(step.slots[span.r]), step.accepted[span.r] if not span.done else ()
        found = self.ledger.begin(slot, accepted, step.slots[[s.r for s in spans]].tolist() if len(spans) > 1 else ())
        self.ledger.end(slot, span.count, bool(step.commit[span.r]))
        return found
