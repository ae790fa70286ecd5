"""Device code: knows arrays, never the words "layer" or "request".

A kernel is one module and one name in ALL; `lab` runs, checks, times and disassembles it, `python -m qwentin.kernels`
prints the table, and the tests and benchmarks of every name in ALL already exist. README.md walks through one.
"""
import importlib

ALL = ("embed", "rmsnorm", "swiglu", "rope_append", "topk", "stream_read", "gemv", "gemv_glu", "gemv_residual",
       "gemv_sm120a", "pack", "attn_decode", "attn_combine", "attn_prefill", "attn_prefill_sm90a", "conv_split",
       "delta_verify", "delta_decode", "gated_norm", "dense", "gather", "kv_move", "gemm", "gemm_sm90a", "gemm_sm120a",
       "unpack_e4m3", "quantise_rows", "unpack_nvfp4", "rmsnorm_tiles", "unpack_f16", "tile_rows", "conv_wide",
       "delta_prepare", "delta_chunk", "delta_chunk_sm90a")


def module(name):
    """The kernel module with a name of ALL."""
    if name not in ALL:
        raise ValueError(f"there is no kernel {name!r}; there are {', '.join(ALL)}")
    return importlib.import_module(f"{__name__}.{name}")
