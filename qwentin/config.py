"""The two configurations: `ModelConfig` (what a checkpoint is) and `EngineConfig` (how we serve it).

Both are frozen and validated when built. EngineConfig's fields carry their own help text: the command-line parser,
`--help` and the README's table of options are generated from it, so an option lives in one place.
"""
import argparse
import json
import os
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

from . import nano
from .errors import ConfigError

LINEAR, FULL = "linear_attention", "full_attention"
MOST_PREFIXES = 512     # entries of the prefix cache: choosing one to evict looks at all of them
MODEL_TYPES = ("qwen3_5", "qwen3_5_text")


@dataclass(frozen=True)
class ModelConfig:
    """Geometry of a dense Qwen3.5-family text model, from config.json (model_type qwen3_5 or qwen3_5_text)."""
    vocab_size: int                 # V, rows of the embedding and the head (padded above the tokenizer's length)
    hidden_size: int                # D
    intermediate_size: int          # F
    num_hidden_layers: int
    layer_types: tuple[str, ...]    # LINEAR or FULL, one a layer
    num_attention_heads: int        # H, query heads of a full layer
    num_key_value_heads: int        # G
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int        # dk
    linear_value_head_dim: int      # dv
    linear_conv_kernel_dim: int     # taps of the causal convolution
    rope_theta: float
    rotary_dim: int                 # the first so many of head_dim are rotated
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    mtp_num_hidden_layers: int      # 0 (no draft head) or 1
    eos_token_id: tuple[int, ...]   # from generation_config.json where it has them, else config.json

    def __post_init__(self):
        check_geometry(self)

    @property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: q, k and v of a linear layer side by side."""
        return (2 * self.linear_num_key_heads * self.linear_key_head_dim
                + self.linear_num_value_heads * self.linear_value_head_dim)

    @property
    def state_bytes(self) -> int:
        """Of one sequence's recurrent state in float32, the convolution windows included."""
        S = self.linear_num_value_heads * self.linear_key_head_dim * self.linear_value_head_dim
        return 4 * max(1, len(self.linear_layers)) * (S + (self.linear_conv_kernel_dim - 1) * self.conv_channels)

    @classmethod
    def from_directory(cls, directory) -> "ModelConfig":
        """Read config.json and generation_config.json of a checkpoint directory.

        Raises ConfigError naming the file and the key.
        """
        directory = Path(directory)
        outer = read_json(directory / "config.json")
        generation = read_generation_config(directory)
        return cls.from_dict(outer, generation.get("eos_token_id"), directory / "config.json")

    @classmethod
    def from_dict(cls, outer: dict, eos=None, where="config.json") -> "ModelConfig":
        """`outer` is the whole config.json; its text part may stand under text_config. `eos` overrides the stop ids."""
        text = outer.get("text_config", outer)
        kind = outer.get("model_type", text.get("model_type"))
        if kind not in MODEL_TYPES:
            raise ConfigError(f"{where}: model_type is {kind!r}; this engine serves {' and '.join(MODEL_TYPES)} only.")
        rope = text.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default":
            raise ConfigError(f"{where}: rope_type is {rope['rope_type']!r}; only 'default' is implemented.")

        def need(key):
            if key not in text:
                raise ConfigError(f"{where}: the key {key!r} is missing.")
            return text[key]

        layers = need("num_hidden_layers")
        interval = text.get("full_attention_interval", 4)
        types = text.get("layer_types") or [FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers)]
        eos = outer.get("eos_token_id", text.get("eos_token_id")) if eos is None else eos
        plain = {f.name: need(f.name) for f in fields(cls) if f.name not in DERIVED}
        return cls(
            **plain, layer_types=tuple(types),
            rope_theta=float(rope.get("rope_theta", text.get("rope_theta", 1e7))),
            rotary_dim=int(need("head_dim") * rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))),
            tie_word_embeddings=bool(outer.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            mtp_num_hidden_layers=int(text.get("mtp_num_hidden_layers", 0)),
            eos_token_id=tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,))


DERIVED = frozenset({"layer_types", "rope_theta", "rotary_dim", "tie_word_embeddings", "mtp_num_hidden_layers",
                     "eos_token_id"})


def check_geometry(c: ModelConfig) -> None:
    """Refuse a geometry that the towers cannot run, in one sentence."""
    for f in fields(c):
        value = getattr(c, f.name)
        if f.type is int and f.name != "mtp_num_hidden_layers" and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"config.json: {f.name} is {value!r}; a positive integer was wanted.")
    if len(c.layer_types) != c.num_hidden_layers or set(c.layer_types) - {LINEAR, FULL}:
        raise ConfigError(f"config.json: layer_types must name {c.num_hidden_layers} layers, each {LINEAR!r} or "
                          f"{FULL!r}; got {len(c.layer_types)}: {sorted(set(c.layer_types))}.")
    for many, few in (("num_attention_heads", "num_key_value_heads"),
                      ("linear_num_value_heads", "linear_num_key_heads")):
        if getattr(c, many) % getattr(c, few):
            raise ConfigError(f"config.json: {many} {getattr(c, many)} is not a multiple of {few} {getattr(c, few)}.")
    if c.rotary_dim % 2 or c.rotary_dim > c.head_dim:
        raise ConfigError(f"config.json: the rotary width {c.rotary_dim} must be even and at most {c.head_dim}.")
    if c.mtp_num_hidden_layers not in (0, 1):
        raise ConfigError(f"config.json: mtp_num_hidden_layers is {c.mtp_num_hidden_layers}; 0 or 1 was wanted.")


def option(default, help, **more):
    """A field of EngineConfig; `more` may hold `choices`, `metavar`, `low` (the least value allowed)."""
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class EngineConfig:
    """How a checkpoint is served. Every field is a command-line option of the same name."""
    model: str = option(str(nano.DIRECTORY), "checkpoint directory (default: the embedded nano model)", metavar="DIR")
    device: str = option("auto", "where the model runs: auto takes a GPU if there is one that can be used, else cpu",
                         choices=("auto", "cpu", "cuda", "emulator"))
    kv: str = option("bf16", "format of keys and values on a GPU; e4m3 takes half the memory", choices=("bf16", "e4m3"))
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one and prints it", low=0)
    api_key: str = option("", "require this bearer token on every route but /health and the status page's own files",
                          metavar="KEY")
    cors_origins: str = option("", "origins whose pages may use this server from a browser, separated by commas; * for all",
                               metavar="LIST")
    tls_cert: str = option("", "certificate chain (PEM): serve https; with --tls-key", metavar="FILE")
    tls_key: str = option("", "private key (PEM) of --tls-cert", metavar="FILE")
    served_model_name: str = option("", "name in /v1/models (default: the directory's)", metavar="NAME")
    max_model_len: int = option(0, "context window in tokens; 0 takes the checkpoint's", low=0)
    max_seqs: int = option(16, "sequences that run at once; more wait in the queue", low=1)
    max_queue: int = option(256, "requests that may wait before new ones are refused with 503", low=1)
    prefill_chunk: int = option(0, "prompt tokens in one step; 0: by memory, beside other streams by measured time", low=0)
    prefill_format: str = option("e4m3", "activations of long prompts on a GPU: e4m3 where it can, or f16, which is slower",
                                 choices=("e4m3", "f16"))
    kv_tokens: int = option(0, "KV cache size in tokens; 0 takes four context windows", low=0)
    cache_mib: int = option(256, "MiB of recurrent-state snapshots kept for prompts that begin alike; 0 keeps none", low=0)
    cache_dir: str = option("", "keep prefixes here when the server stops and find them when it starts", metavar="DIR")
    cache_dir_mib: int = option(4096, "MiB that --cache-dir may hold", low=1)
    sleep_idle_s: float = option(0.0, "seconds without work after which the model's memory is freed; 0: never", low=0.0)
    sleep_mib: int = option(4096, "MiB of prefixes that sleep keeps in host memory; --cache-dir takes them to disk", low=0)
    thinking: str = option("auto", "whether a request thinks that does not say; auto leaves it to the chat template",
                           choices=("auto", "on", "off"))
    reasoning_effort: str = option("auto", "effort of a request that does not say, where the chat template reads one",
                                   choices=("auto", "low", "medium", "xhigh"))
    preserve_thinking: str = option("auto", "whether thoughts of earlier turns stay in the prompt, where the template asks",
                                    choices=("auto", "on", "off"))
    reasoning_budget: int = option(0, "tokens after which a thought is closed if the request does not say; 0: never", low=0)
    reasoning_loop: int = option(256, "tokens of a thought that only repeat before it is closed; 0: never", low=0)
    draft: str = option("auto", "who guesses tokens ahead: the draft head and earlier text (auto), one of them, or nobody",
                        choices=("auto", "head", "lookup", "off"))
    draft_depth: int = option(12, "tokens that may be guessed in a row; 0: none", low=0)
    draft_guesses: int = option(15, "guesses that may be verified at once", low=1)
    draft_vocabulary: int = option(0, "rows of the output matrix that the draft head chooses from, the lowest ids, in whole "
                                      "128s; 0: all", low=0)
    draft_window: int = option(4096, "tokens before the end that the draft head reads, in whole 128s; 0: all", low=0)
    draft_hidden: str = option("normed", "the hidden that the draft head goes on from: after or before the last norm",
                               choices=("normed", "raw"))
    threads: int = option(0, "BLAS threads of the numpy tower; 0 takes the usable cores, 4 at most; 1 on a busy machine",
                          low=0)
    max_body_mib: int = option(64, "MiB that a request's body may have", low=1)
    request_timeout_s: float = option(0.0, "seconds after which a request ends with an error; 0: never", low=0.0)
    request_log: str = option("", "append a JSON line of counts for each generation, no text, to this file", metavar="FILE")
    keepalive_s: float = option(10.0, "seconds of silence after which a stream gets an SSE comment", low=0.05)
    shutdown_s: float = option(10.0, "seconds that SIGTERM lets running streams finish", low=0.0)

    def __post_init__(self):
        for f in fields(self):
            value, low, choices = getattr(self, f.name), f.metadata.get("low"), f.metadata.get("choices")
            if choices and value not in choices:
                raise ConfigError(f"--{f.name.replace('_', '-')} is {value!r}; {', '.join(choices)} can be chosen.")
            if low is not None and value < low:
                raise ConfigError(f"--{f.name.replace('_', '-')} is {value}; at least {low} was wanted.")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("--tls-cert and --tls-key go together; one of them is missing.")
        if not Path(self.model).is_dir():
            raise ConfigError(f"--model: {self.model} is not a directory; give a checkpoint directory, "
                              "or leave the option out for the embedded nano model.")

    @property
    def origins(self) -> frozenset[str]:
        """The origins of --cors-origins."""
        return frozenset(origin.strip().rstrip("/") for origin in self.cors_origins.split(",") if origin.strip())

    @property
    def model_name(self) -> str:
        name = Path(self.model).resolve().name
        return self.served_model_name or ("qwentin-nano" if Path(self.model) == nano.DIRECTORY else name)

    @property
    def template_defaults(self) -> dict:
        """Variables of the chat template for requests that do not give them; those on auto are the template's matter."""
        switches = {"enable_thinking": self.thinking, "preserve_thinking": self.preserve_thinking}
        effort = {} if self.reasoning_effort == "auto" else {"reasoning_effort": self.reasoning_effort}
        return {name: value == "on" for name, value in switches.items() if value != "auto"} | effort

    def context_window(self, model: ModelConfig) -> int:
        """Tokens of one sequence, prompt and completion together."""
        if self.max_model_len > model.max_position_embeddings:
            raise ConfigError(f"--max-model-len is {self.max_model_len}; this checkpoint goes up to "
                              f"{model.max_position_embeddings}.")
        return self.max_model_len or model.max_position_embeddings

    def kv_rows(self, model: ModelConfig) -> int:
        """Token rows of the KV cache: at least one whole context, so that the oldest sequence always gets through."""
        window = self.context_window(model)
        if self.kv_tokens and self.kv_tokens < window:
            raise ConfigError(f"--kv-tokens is {self.kv_tokens}; at least one context window, {window}, was wanted.")
        return self.kv_tokens or 4 * window

    def kept_states(self, model: ModelConfig) -> int:
        """Snapshots that fit --cache-mib."""
        return min(MOST_PREFIXES, self.cache_mib * 2**20 // model.state_bytes)


def add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add EngineConfig's fields (all, or the named ones) to `parser`."""
    for f in fields(EngineConfig):
        if names and f.name not in names:
            continue
        assert f.default is not MISSING
        shown = "" if f.name == "model" or f.default in ("", 0) else f" (default: {f.default})"
        parser.add_argument("--" + f.name.replace("_", "-"), type=type(f.default), default=f.default,
                            metavar=f.metadata.get("metavar", "|".join(f.metadata.get("choices", ())) or
                                                   type(f.default).__name__.upper()),
                            help=f.metadata["help"] + shown)


def from_options(namespace: argparse.Namespace) -> EngineConfig:
    """The EngineConfig that parsed options describe; options it does not know are left alone."""
    known = {f.name for f in fields(EngineConfig)}
    return EngineConfig(**{k: v for k, v in vars(namespace).items() if k in known})


def read_json(path: Path) -> dict:
    """A JSON object from a file, or ConfigError naming the file."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; a checkpoint directory needs it.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; a JSON object was wanted.")
    return value


def read_generation_config(directory) -> dict:
    """generation_config.json of a checkpoint, or {} where there is none."""
    path = Path(directory) / "generation_config.json"
    return read_json(path) if path.exists() else {}


def cache_directory() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/qwentin, or ~/.cache/qwentin."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qwentin"
