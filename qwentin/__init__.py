"""qwentin: a local inference engine for the Qwen3.5 / 3.6 / 3.8 hybrid models, in pure Python.

Importing the package starts nothing: no CUDA, no numba, no server. Start at `engine.py` for the loop, `model/cpu.py`
for the mathematics, `server/app.py` for the HTTP side, `kernels/` for the device code.
"""
__version__ = "0.1.0"
