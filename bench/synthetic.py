"""The 27B's shapes with made-up weights, for benches on a GPU: nothing is read from disk, nothing is worth generating.

SyntheticSource has matrix.Source's five methods. Matrices are drawn, tile by tile, from a pool of random tiles on the
device: all codes equally likely, row scales such that activations stay near one. Vectors are like a trained model's.
"""
import dataclasses

import numpy as np

from qwentin import numerics
from qwentin.config import ModelConfig
from qwentin.kernels import gemv, packed
from qwentin.model import names, terms
from qwentin.model.matrix import Matrix

CONFIG_27B = dict(
    model_type="qwen3_5_text", vocab_size=248320, hidden_size=5120, intermediate_size=17408, num_hidden_layers=64,
    full_attention_interval=4, num_attention_heads=24, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16,
    linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    rms_norm_eps=1e-6, max_position_embeddings=262144, mtp_num_hidden_layers=1, tie_word_embeddings=False,
    rope_parameters=dict(rope_theta=1e7, partial_rotary_factor=0.25))
POOL = 1 << 16                  # tiles: 103 MB of fp6, twice an H200's L2
SHAPES = {"27b": CONFIG_27B}


def config_of(shape: str, layers: int | None = None) -> ModelConfig:
    """The configuration of a named shape; fewer layers for a quick look."""
    return ModelConfig.from_dict(dict(SHAPES[shape], **({"num_hidden_layers": layers} if layers else {})))


class SyntheticSource:
    """Weights for `config` on a GPU backend; `packing` is a name of gemv.PACKINGS."""

    def __init__(self, config, backend, packing="fp6", seed=0):
        self.config, self.backend, self.rng = config, backend, np.random.default_rng(seed)
        self.packing, self.shapes = gemv.PACKINGS[packing], names.expected(config)
        # a product of K unit inputs with weights of this size is a unit again, K being about 5120
        tiles = gemv.make(self.rng, n=128, k=128 * (POOL // 8), rows=0, packing=packing)["w"].reshape(POOL, -1)
        self.scale(tiles, 5120 ** -0.5)
        self.pool, self.tile_bytes = backend.upload(tiles.ravel()), tiles.shape[1]

    def scale(self, tiles, factor):
        """Make the weights smaller by changing the tiles' scales."""
        part, block = tiles[:, self.packing.code_bytes:], self.packing.block
        dtype, decode = packed.SCALES[block]
        encode = {128: numerics.encode_bf16, 32: numerics.encode_ue8m0, 16: numerics.E4M3.encode}[block]
        if block == 16:
            return                                      # e4m3 scales are near one; alpha brings the rest
        values = decode(np.ascontiguousarray(part).view(dtype)) * np.float32(factor)
        part[...] = encode(values).view(np.uint8)

    def vector(self, name):
        shape, rng = self.shapes[name], self.rng
        if name.endswith("A_log"):
            return np.log(rng.uniform(0.05, 0.5, shape)).astype(np.float32)
        if name.endswith("linear_attn.norm.weight"):
            return rng.normal(1, 0.1, shape).astype(np.float32)
        return (rng.standard_normal(shape) * (0.5 if "conv1d" in name else 0.1)).astype(np.float32)

    def matrix(self, *names, columns=None):
        k = self.shapes[names[0]][1] if columns is None else columns.stop - columns.start
        return self.drawn(sum(self.shapes[n][0] for n in names), k)

    def with_terms(self, names, small):
        rows, extra = (sum(self.shapes[n][0] for n in some) for some in (names, small))
        like = self.packing if self.packing in terms.TERMS else packed.FP6
        return dataclasses.replace(self.drawn(rows + terms.rows(like, extra), self.shapes[names[0]][1]),
                                   terms=terms.TERMS[like])

    def drawn(self, rows, k):
        """A matrix of random tiles."""
        alpha = self.backend.upload(np.full(rows // 16, 5120 ** -0.5, np.float32)) if self.packing.block == 16 else None
        return Matrix(rows, self.packing, self.tiles(self.packing.shape(rows, k)), alpha, rows, None)

    def glu(self, gate, up):
        return dataclasses.replace(self.matrix(gate, up), width=self.shapes[gate][0], gated=True)

    def tiles(self, shape):
        """Runs of the pool, from random places."""
        out = self.backend.empty(shape, np.uint8)
        flat, at = out.reshape(out.nbytes), 0
        while at < out.nbytes:
            first = int(self.rng.integers(0, POOL // 2)) * self.tile_bytes
            size = min(out.nbytes - at, self.pool.nbytes - first)
            self.backend.copy(flat[at:at + size], self.pool[first:first + size])
            at += size
        return out

    def table(self, name):
        (rows, k), bits = self.shapes[name], 6
        codes = self.rng.integers(0, 256, (rows, k * bits // 8), dtype=np.uint8)
        return (self.backend.upload(codes), self.backend.upload(np.full((rows, k // 128), 0.3, np.float32)), "e2m3")
