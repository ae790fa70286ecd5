"""Memory of a served model, item by item, and the longest context that fits.

    weights     the packed sizes of convert's plan, or 4 bytes a parameter for the numpy tower
    kv          pages of 128 rows for every full-attention layer, and for the draft head's one
    state       S f32 [layers, slots, Nv, dk, dv] and the window [layers, slots, taps - 1, C] of the linear layers
    rounds, scratch, prefill       as memory.py counts them, of the tower that the server would build (towers.planned)
    CUDA context                   the driver's, measured

    kv kind     bytes a token, a kv head, a layer        27B: bytes a token, draft head not counted
    f32         2 * 4 * hd                               131,072     the numpy tower
    bf16        2 * 2 * hd                                65,536
    fp8         2 * hd                                    32,768     e4m3
    q4          hd / 2 + hd + hd / 8 + 4                  26,880     4-bit K in groups of 32 with f16 scale and zero, e4m3 V
    a number    2 * hd * bits / 8                                    any other scheme, without its metadata

The towers allocate by these functions or are tested against them.
"""
import math
from dataclasses import dataclass

from ..config import ModelConfig
from ..errors import ConfigError
from ..kvpool import PAGE
from . import names
from .weights import Checkpoint

KV_HEAD_BYTES = {"f32": lambda hd: 8 * hd, "bf16": lambda hd: 4 * hd, "fp8": lambda hd: 2 * hd,
                 "q4": lambda hd: hd // 2 + hd + hd // 8 + 4}
GIB = 1 << 30
CONTEXT = 960 << 20             # what the driver, kernels' code and captured graphs take, measured on an H200: RESULTS.md


def kv_row_bytes(config: ModelConfig, kind: str, layers: int) -> int:
    """Bytes of one token's K and V in `layers` layers, rounded up. Raises ConfigError for an unknown kind."""
    if kind in KV_HEAD_BYTES:
        return layers * config.num_key_value_heads * KV_HEAD_BYTES[kind](config.head_dim)
    try:
        bits = float(kind)
    except ValueError:
        bits = 0
    if not 0 < bits <= 32:
        raise ConfigError(f"--kv is {kind!r}; {', '.join(KV_HEAD_BYTES)} or a number of bits a value was wanted.")
    return math.ceil(layers * config.num_key_value_heads * 2 * config.head_dim * bits / 8)


def state_bytes(config: ModelConfig) -> int:
    """S of one sequence, float32."""
    return (len(config.linear_layers) * config.linear_num_value_heads * config.linear_key_head_dim
            * config.linear_value_head_dim * 4)


def window_bytes(config: ModelConfig, item: int) -> int:
    """The convolution's window of one sequence, `item` bytes a number: 4 in both towers."""
    return len(config.linear_layers) * (config.linear_conv_kernel_dim - 1) * config.conv_channels * item


@dataclass(frozen=True)
class Card:
    """What of a GPU matters to a plan of its memory."""
    chip: str
    multiprocessors: int
    shared: int                 # bytes a block can have


CARDS = {card.chip: card for card in (Card("sm_120a", 170, 99 << 10), Card("sm_90a", 132, 227 << 10))}    # RTX 5090, H200


@dataclass(frozen=True)
class Budget:
    """Bytes by item; `row` is what one more token costs, `limit` the memory there is, `longest` the model's own limit."""
    items: dict[str, int]
    context: int
    row: int
    limit: int
    longest: int

    @property
    def total(self) -> int:
        return sum(self.items.values())

    @property
    def largest_context(self) -> int:
        """Tokens that fit, in whole pages, 0 if not even the rest does. Prefill can do without its item."""
        kv = -(-self.context // PAGE) * PAGE * self.row
        pages = (self.limit - (self.total - kv - self.items.get("prefill", 0))) // (PAGE * self.row)
        return max(min(pages * PAGE, self.longest), 0)


def budget(checkpoint: Checkpoint, weights: dict[str, int], context: int, kind: str, limit: int, slots: int = 1,
           **working: int) -> Budget:
    """`weights` are bytes by part, `working` what a GPU needs besides; the rest follows from the configuration."""
    config, rows = checkpoint.config, -(-context // PAGE) * PAGE
    main, draft = row_bytes(checkpoint, kind)
    items = {**weights, f"KV, {kind}": rows * main, "KV of the MTP head": rows * draft,
             "state S": slots * state_bytes(config), "convolution window": slots * window_bytes(config, 4), **working}
    return Budget({name: size for name, size in items.items() if size}, context, main + draft, limit,
                  config.max_position_embeddings)


def row_bytes(checkpoint: Checkpoint, kind: str) -> tuple[int, int]:
    """Bytes of one token's K and V in the model and in the draft head."""
    config = checkpoint.config
    return kv_row_bytes(config, kind, len(config.full_layers)), kv_row_bytes(config, kind, int(checkpoint.has_mtp))


def float32_weights(config: ModelConfig, has_mtp: bool) -> dict[str, int]:
    """What the numpy tower holds; a head that is the embedding is kept a second time, in panels."""
    out = {"weights": 4 * config.vocab_size * config.hidden_size * config.tie_word_embeddings, "MTP head": 0}
    for name, shape in names.expected(config).items():
        out["MTP head" if names.is_mtp(name) else "weights"] += 4 * math.prod(shape)
    return out if has_mtp else {"weights": out["weights"]}
