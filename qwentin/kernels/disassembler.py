"""SASS, the chip's own instructions, out of a cubin; through NVIDIA's nvdisasm, which needs no GPU."""
import functools
import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from .build import kept


@functools.cache
def nvdisasm():
    """Path of the program: of the wheel nvidia-cuda-nvdisasm, else of a CUDA toolkit on the PATH."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [str(f.locate()) for f in files if f.name == "nvdisasm"] + [shutil.which("nvdisasm")]
    if not found[0]:
        raise FileNotFoundError("SASS needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    return found[0]


@functools.cache
def sass(cubin):
    """The instructions of a Cubin, one a line, without addresses and encodings; kept beside the cubins."""
    def make():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(cubin.code)
            return subprocess.run([nvdisasm(), "-c", str(path)], capture_output=True, check=True).stdout
    text = kept(f"{hashlib.sha256(cubin.code).hexdigest()[:20]}.sass", make).decode()
    lines = (re.sub(r"\s*/\*[^*]*\*/\s*", " ", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(("//", ".")) or line.startswith(".L_"))


def opcodes(cubin):
    """Every instruction's mnemonic with its modifiers, in order: `LDG.E.128.CONSTANT`, `HMMA.16816.F32`, ..."""
    found = (re.match(r"(?:@!?U?P\w+ )?([A-Z][\w.]*)\b.*;", line) for line in sass(cubin).splitlines())
    return [match.group(1) for match in found if match]
