"""The CUDA tower: the model as a list of launches, captured once for each size of round and replayed.

    Step -> long prompts in wide chunks (wide.py), on Hopper
         -> rounds of at most 32 rows (rounds.py) -> integers copied in, one graph launch, logits copied out (buffers.py)

    a round:   moves | embed | 64 x ( norm, mixer, norm + residual, MLP ) | norm, wanted rows, head, candidates

It implements what model/cpu.py does, with the same names, and runs on a GPU or, for tests, under the emulator: the same
launches, the same PTX. The arrays that KVPool and StateSlots only count:

    kv   bf16 or e4m3 [2 L, P, 128, G, 256]     K and V of the full layers in turn, the draft head's last
    S, window and the rows that a state still lags behind: one set of Pools a linear layer (deltanet.py)

Who calls: engine.py. Proven by tests/test_cuda.py; on a GPU, bench/parity.py.
"""
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from ..config import FULL
from ..kernels import embed, kv_move, plan, rmsnorm
from ..kvpool import PAGE
from ..step import Output, Step
from .attention import Attention
from .buffers import ROWS, Bucket, Scratch
from .deltanet import DeltaNet, Pools
from .head import Head
from .matrix import workspace
from .mlp import Mlp
from .mtp import DraftHead
from .rounds import Ledger, split
from .staging import Part, fill, gaps, pad, path_moves
from .trace import Trace
from .wide import Wide, hindrance

KV_DTYPES = {"bf16": np.uint16, "e4m3": np.uint8}


@dataclass(frozen=True)
class Layer:
    """Norm, mixer, norm, MLP; the residual stream is b.hidden, what is still to be added to it b.delta."""
    norm_in: object
    mixer: Attention | DeltaNet
    norm_post: object
    mlp: Mlp
    eps: float

    def queue(self, backend, b, work, first=False, watch=lambda name, array: None):
        rmsnorm.launch(backend.stream, b.hidden, None if first else b.delta, self.norm_in, b.x, self.eps)
        self.mixer.queue(backend, b, work)
        watch(self.mixer.kind, b.delta)
        rmsnorm.launch(backend.stream, b.hidden, b.delta, self.norm_post, b.x, self.eps)
        self.mlp.queue(backend, b, work)
        watch("mlp", b.delta)


class CudaTower:
    """`pages` pages of KV and `slots` recurrent states on `backend`, weights from `source` (matrix.Source).

    active: how many sequences run at once, at most: each may have rows that its state lags behind; kv: format of the pages;
    wide: rows of a chunk of prefill, 0 for rounds alone (wide.py); resident: with the matrices of chunks kept unpacked.
    """

    def __init__(self, config, source, pages, slots, has_mtp=True, kv="bf16", active=16, valid=None, wide=0, resident=False):
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
        tied = "model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"
        self.head = Head(source.matrix(tied), valid or c.vocab_size, c.rms_norm_eps)
        self.mtp = DraftHead.read(source, c, self.read_layer(source, "mtp.layers.0.", FULL, layers - 1)) if has_mtp else None
        self.host_logits = backend.staging((ROWS, c.vocab_size), np.float32)
        self.host_hidden = backend.staging((ROWS, c.hidden_size), np.float32)
        self.graphs = {}                # (what, Bucket) -> Replay
        self.hindrance = hindrance(self)
        table = min(pages, -(-c.max_position_embeddings // PAGE))
        self.wide = Wide(self, wide, table, resident) if wide and not self.hindrance else None

    # ------------------------------------------------------------------ loading
    def read_layers(self, source):
        kinds = tqdm(self.config.layer_types, desc="loading", unit="layer", leave=False, disable=None)
        full, linear = iter(range(len(self.config.full_layers))), iter(self.pools)
        return [self.read_layer(source, f"model.layers.{i}.", kind, next(full) if kind == FULL else next(linear))
                for i, kind in enumerate(kinds)]

    def read_layer(self, source, prefix, kind, state):
        """state: the layer's place in kv, or its pools."""
        mixer = Attention.read(source, prefix, self.config, self.kv[2 * state], self.kv[2 * state + 1]) if kind == FULL \
            else DeltaNet.read(source, prefix, self.config, state)
        vector = lambda name: self.backend.upload(source.vector(f"{prefix}{name}_layernorm.weight"))
        return Layer(vector("input"), mixer, vector("post_attention"), Mlp.read(source, prefix), self.config.rms_norm_eps)

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
        """All of one sequence's past, for the disk: kv_bf16 or kv_e4m3 [2 L, length, G, 256], S and window of its slot."""
        self.settle(slot)
        rows = self.download(self.kv[plane][page] for plane in range(self.kv.shape[0]) for page in pages)
        kv = rows.reshape(self.kv.shape[0], len(pages) * PAGE, *self.kv.shape[3:])[:, :length]
        return {self.kv_name: kv, "S": self.download(p.S[slot] for p in self.pools),
                "window": self.download(p.window[slot] for p in self.pools)}

    def import_state(self, slot, pages, arrays):
        """Put an exported past into a slot and pages; False, with nothing changed, if it is another model's or format's."""
        kv = arrays.get(self.kv_name)
        states = {name: (len(self.pools), *getattr(self.pools[0], name).shape[1:]) for name in ("S", "window")}
        if kv is None or kv.shape[1] > len(pages) * PAGE or kv.shape != (self.kv.shape[0], kv.shape[1], *self.kv.shape[3:]) \
                or any(arrays[name].shape != shape for name, shape in states.items()):
            return False
        self.ledger.close(slot)
        for plane in range(self.kv.shape[0]):
            for i, page in enumerate(pages):
                rows = kv[plane, i * PAGE:(i + 1) * PAGE]
                self.backend.fill(self.kv[plane][page][:len(rows)], np.ascontiguousarray(rows))
        for i, pools in enumerate(self.pools):
            self.backend.fill(pools.S[slot], arrays["S"][i])
            self.backend.fill(pools.window[slot], arrays["window"][i])
        return True

    def download(self, arrays):
        """Device arrays of one shape, stacked on the host."""
        found = []
        for array in arrays:
            found.append(np.empty(array.shape, array.dtype))
            self.backend.read(array, found[-1])
        self.backend.synchronize()
        return np.stack(found)

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
        b = self.scratch.buffers(Bucket.of(0, 1, 0, 0, 1, bool(moves)))
        pad(b.host, 0, 0)
        b.host["plan"][:] = plan.table([(slot, 0, 0, entry, -1, path)], ROWS)
        b.host["moves"][0], b.host["moves"][1:1 + 2 * len(moves)] = len(moves), np.ravel(moves)
        self.replay("settle", b, self.queue_settle)
        self.backend.synchronize()

    def queue_settle(self, b):
        self.backend.write(b.integers, b.staging)
        if b.bucket.moves:
            kv_move.launch(self.backend.stream, self.main_kv, b.moves)
        for layer in self.layers:
            if isinstance(layer.mixer, DeltaNet):
                layer.mixer.advance(self.backend, b, 0)

    # ------------------------------------------------------------------ the forward passes
    def forward(self, step: Step) -> Output:
        """Run the step: commit the accepted rows, then compute its own."""
        out = self.output(step)
        return self.run(step, out, "forward", self.queue_forward, but=self.wide.run(step, out) if self.wide else frozenset())

    def forward_mtp(self, step: Step, hidden: np.ndarray) -> Output:
        """The draft head over pairs (hidden of position p, token p + 1), as model/cpu.py has it."""
        return self.run(step, self.output(step), "mtp", self.queue_mtp, hidden)

    def output(self, step):
        """Room for what the step wants."""
        hidden = np.empty((step.rows, self.config.hidden_size), np.float32) if step.hidden else None
        return Output(np.empty((len(step.outputs), self.config.vocab_size), np.float32), hidden,
                      np.zeros(step.sequences, np.int32))

    def run(self, step, output, what, queue, hidden=None, but=frozenset()):
        """Run the sequences of a step that are not in `but` in rounds."""
        for spans in split(step, but):
            part = self.stage(step, spans, hidden)
            self.replay(what, part.buffers, queue)
            if part.outputs:
                self.backend.read(part.buffers.logits[:part.outputs], self.host_logits[:part.outputs])
            if step.hidden:
                self.backend.read(part.buffers.normed[:part.rows], self.host_hidden[:part.rows])
            self.backend.synchronize()
            output.logits[part.wanted] = self.host_logits[:part.outputs]
            if step.hidden:
                output.hidden[part.at] = self.host_hidden[:part.rows]
        return output

    def replay(self, what, b, queue):
        """Launch the graph of (what, bucket), captured at its first use."""
        key = what, b.bucket
        if key not in self.graphs:
            self.graphs[key] = self.backend.record(lambda: queue(b))
        self.graphs[key].launch()

    def queue_forward(self, b, watch=lambda name, array: None):
        self.backend.write(b.integers, b.staging)
        if b.bucket.moves:
            kv_move.launch(self.backend.stream, self.main_kv, b.moves)
        table, scale, format = self.embedding
        embed.launch(self.backend.stream, b.tokens, table, scale, b.hidden, format)
        watch("embed", b.hidden)
        for i, layer in enumerate(self.layers):
            layer.queue(self.backend, b, self.work, i == 0, lambda name, array: watch(f"layer {i} {name}", array))
        self.head.queue(self.backend, b, self.norm, self.work)
        watch("normed", b.normed)

    def queue_mtp(self, b):
        self.backend.write(b.integers, b.staging)
        table, scale, format = self.embedding
        embed.launch(self.backend.stream, b.tokens, table, scale, b.hidden, format)
        self.mtp.queue_pairs(self.backend, b, self.work)
        self.mtp.layer.queue(self.backend, b, self.work)
        self.head.queue(self.backend, b, self.mtp.norm, self.work)

    def trace(self, step: Step) -> Trace:
        """Run a step of one round, launch by launch, and keep what every part of a layer gave; its state moves on."""
        spans, = split(step)
        part, found = self.stage(step, spans), Trace()

        def watch(name, array):
            into = self.backend.staging(array.shape, array.dtype)
            self.backend.read(array, into)
            self.backend.synchronize()
            found.add(name, into[:part.rows])
        self.queue_forward(part.buffers, watch)
        return found

    # ------------------------------------------------------------------ a round's integers
    def stage(self, step, spans, hidden=None):
        """The round's integers, written where its graph copies them from: a Part."""
        draft = hidden is not None
        debts = [None if draft else self.begin(step, s, spans) for s in spans]
        moves = [] if draft else [m for s in spans for m in gaps(step, s)]
        part = Part.of(step, spans, moves, self.scratch)
        host, T = part.buffers.host, part.rows
        pad(host, T, len(spans))
        host["tokens"][:T], host["positions"][:T] = step.tokens[part.at], step.positions[part.at]
        host["outputs"][:part.outputs] = part.places
        if moves:
            host["moves"][0], host["moves"][1:1 + 2 * len(moves)] = len(moves), np.ravel(moves)
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
        found = self.ledger.begin(slot, accepted, {int(step.slots[s.r]) for s in spans})
        self.ledger.end(slot, span.count, bool(step.commit[span.r]))
        return found
