"""The draft head (multi-token prediction) on the device: one more full layer, fed with pairs.

    x = fc [norm(embedding of token p + 1) | norm(hidden of p)];  then a layer as any other, its own norm, the main head

fc is kept as two matrices, one for each half of its inputs: their products meet in the layer's first norm, which adds.
Who calls: model/cuda.py. Proven against model/cpu.py by tests/test_cuda.py.
"""
from dataclasses import dataclass

from ..kernels import embed, rmsnorm
from .matrix import Matrix


@dataclass(frozen=True)
class DraftHead:
    from_embedding: Matrix      # fc[:, :D]
    from_hidden: Matrix         # fc[:, D:]
    norm_embedding: object
    norm_hidden: object
    layer: object               # cuda.Layer
    norm: object
    eps: float

    @classmethod
    def read(cls, source, config, layer):
        D, vector = config.hidden_size, lambda name: source.backend.upload(source.vector(f"mtp.{name}.weight"))
        return cls(source.matrix("mtp.fc.weight", columns=slice(0, D)),
                   source.matrix("mtp.fc.weight", columns=slice(D, 2 * D)), vector("pre_fc_norm_embedding"),
                   vector("pre_fc_norm_hidden"), layer, vector("norm"), config.rms_norm_eps)

    def queue_pairs(self, backend, b, work):
        """b.hidden holds embeddings, b.pair the hiddens; leaves the layer's input as b.hidden + b.delta."""
        rmsnorm.launch(backend.stream, b.pair, None, self.norm_hidden, b.x, self.eps)
        self.from_hidden.launch(backend, b.x, b.delta, work)
        rmsnorm.launch(backend.stream, b.hidden, None, self.norm_embedding, b.x, self.eps)
        self.from_embedding.launch(backend, b.x, b.hidden, work)

    @property
    def matrices(self):
        """What seeds go through."""
        return self.from_hidden, self.from_embedding, self.layer.mixer.qkv

    @property
    def row_bytes(self):
        return self.layer.mixer.row_bytes

    def queue_seeds(self, backend, c, embedding):
        """Queue the keys and values of the pairs (c.normed, c.follows) into the head's pages; no attention, no output."""
        stream, (table, scale, format) = backend.stream, embedding
        c.norm(self.from_hidden, c.normed, None, self.norm_hidden, self.eps)
        c.times(self.from_hidden, c.delta)
        embed.launch(stream, c.follows, table, scale, c.hidden, format)
        c.norm(self.from_embedding, c.hidden, None, self.norm_embedding, self.eps)
        c.times(self.from_embedding, c.hidden)
        c.norm(self.layer.mixer.qkv, c.hidden, c.delta, self.layer.norm_in.weight, self.eps)
        self.layer.mixer.append(backend, c, c.seeds)
