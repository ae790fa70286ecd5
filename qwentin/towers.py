"""Where the model runs: the choice of a tower, its memory planned before a weight is read, and what came of it in words.

    --device auto     a GPU if there is one that can be used, else cpu
             cpu      model/cpu.py, numpy
             cuda     model/cuda.py on a GPU; refused in one sentence where there is none or it is too old or too small
             emulator model/cuda.py, every kernel's PTX executed on numpy: for looking, a token takes seconds

Who calls: engine.py at load. Proven by tests/test_towers.py.
"""
import logging
import time
from dataclasses import dataclass, field

from .config import EngineConfig, ModelConfig
from .device import Device, DeviceError
from .errors import ConfigError
from .kvpool import PAGE, pages_for
from .model.budget import CONTEXT
from .model.cpu import CpuTower, tune_process
from .model.weights import open_checkpoint

log = logging.getLogger("qwentin.towers")

GIB = 1 << 30
ROWS = 128                      # of a matrix: a strip on the GPU, a few panels without one
CHUNKS = (4096, 2048, 1024, 512)        # rows of prefill at once, the most that memory allows: 0.9 GB of 27B at 4096
# (rows, whether matrices stay unpacked), the fastest first; each next takes less memory
PREFILL_FORMS = (CHUNKS[0], True), *((rows, False) for rows in CHUNKS), (0, False)
OLDEST = (8, 0)                 # compute capability: mma.sync m16n8k16, cp.async


@dataclass
class Placed:
    """A tower and the pools it was built for."""
    tower: object
    pages: int
    slots: int
    kept: int                   # of the slots, those for snapshots
    device: str
    memory: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    chunk: int = 0              # prompt rows that go through the layers at once; 0: no matter
    prefill: str = ""           # how prompts are read on a GPU, in words

    def report(self) -> dict:
        """For /health: device, bytes by part, seconds to load, graphs captured so far."""
        backend = getattr(self.tower, "backend", None)
        free = {"device_free_bytes": backend.free_bytes()} if backend else {}
        return {"device": self.device, "memory": self.memory, "load_seconds": round(self.seconds, 3), **free,
                "graphs": len(getattr(self.tower, "graphs", ())), **({"prefill": self.prefill} if self.prefill else {})}


def load_tower(config: EngineConfig, tokens: int) -> tuple[Placed, ModelConfig]:
    """The tower of config.model's weights, and what the checkpoint is; `tokens` is its tokenizer's size.

    Raises CheckpointError, ConfigError or DeviceError.
    """
    with open_checkpoint(config.model) as checkpoint:
        model = checkpoint.config
        if tokens > model.vocab_size:
            raise ConfigError(f"{config.model}: the tokenizer has {tokens} ids, the model {model.vocab_size} rows; they do "
                              "not belong together.")
        return place(config, checkpoint, tokens), model


def place(config: EngineConfig, checkpoint, valid: int) -> Placed:
    """Build the tower that the configuration asks for. Raises ConfigError or DeviceError before anything is allocated.

    valid: ids from here on have no text.
    """
    start = time.perf_counter()
    placed = PLACES[choice(config.device)](config, checkpoint, valid)
    placed.seconds = time.perf_counter() - start
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in placed.memory.items())
    log.info("on %s: %s GiB; built in %.1f s", placed.device, parts, placed.seconds)
    if placed.prefill:
        log.info("prefill: %s", placed.prefill)
    return placed


def choice(device: str) -> str:
    """The place that "auto" stands for."""
    if device != "auto":
        return device
    try:
        return "cuda" if usable(Device.open()) else "cpu"
    except DeviceError:
        return "cpu"


def draft_options(config) -> dict:
    """What a tower's draft head chooses from and goes on from."""
    return dict(draft_rows=-(-config.draft_vocabulary // ROWS) * ROWS, raw_hidden=config.draft_hidden == "raw")


def usable(device) -> bool:
    return device.capability >= OLDEST


def on_cpu(config, checkpoint, valid):
    model = checkpoint.config
    pages, kept = pages_for(config.kv_rows(model)), config.kept_states(model)
    tower = CpuTower(checkpoint, pages, config.max_seqs + kept, tune_process(config.threads), **draft_options(config))
    memory = {"weights": tower.weight_bytes(), "KV": tower.kv.nbytes, "state": tower.S.nbytes + tower.window.nbytes}
    return Placed(tower, pages, config.max_seqs + kept, kept, "cpu (numpy)", memory)


def on_gpu(config, checkpoint, valid):
    from .model.backend import GpuBackend       # numba is imported where a GPU is used, not before
    from .model.rehearsal import compile_ahead
    device = Device.open()
    if not usable(device):
        major, minor = OLDEST
        found = ".".join(map(str, device.capability))
        raise DeviceError(f"--device cuda: {device.name} has compute capability {found}; "
                          f"at least {major}.{minor} is needed; --device cpu runs anywhere.")
    placed = on_device(config, checkpoint, valid, GpuBackend(device), device.free_bytes())
    wide = placed.tower.wide
    compile_ahead(checkpoint.directory, device.chip, device.multiprocessors, device.shared_per_block, pages=placed.pages,
                  slots=placed.slots, has_mtp=checkpoint.has_mtp, kv=config.kv, active=config.max_seqs, wide=placed.chunk,
                  resident=bool(wide and wide.arena.resident), prefill=config.prefill_format)
    placed.tower.capture()
    return placed


def on_emulator(config, checkpoint, valid):
    from .model.backend import EmulatorBackend
    return on_device(config, checkpoint, valid, EmulatorBackend(), 2 * GIB)


@dataclass(frozen=True)
class Plan:
    """A CUDA tower and its memory before anything is allocated."""
    shape: dict                 # CudaTower's arguments but for the pages
    least: int                  # pages of one context window
    pages: int                  # of the cache: as many as were asked for and fit
    rest: int                   # bytes besides them
    counted: object             # the tower with `least` pages, on a backend that only counts


def planned(config, checkpoint, card, free) -> Plan:
    """The tower for `free` bytes of a card (its chip, multiprocessors, shared), which reads prompts in the fastest way that
    fits, or in the leanest if none does."""
    from .model import memory
    model = checkpoint.config
    shape = dict(slots=config.max_seqs + config.kept_states(model), has_mtp=checkpoint.has_mtp, kv=config.kv,
                 active=config.max_seqs, prefill=config.prefill_format)
    least, wanted = pages_for(config.context_window(model)), pages_for(config.kv_rows(model))
    for shape["wide"], shape["resident"] in PREFILL_FORMS:
        counted = memory.imagined(checkpoint, card.chip, card.multiprocessors, card.shared, **shape, pages=least)
        needed = memory.needed(counted)
        rest = sum(needed.values()) - needed["KV"] + CONTEXT
        fit = int(free - rest) // (needed["KV"] // least)
        if fit >= (wanted if shape["resident"] else least):
            break
    return Plan(shape, least, min(wanted, fit), rest, counted)


def on_device(config, checkpoint, valid, backend, free):
    from .model import memory
    from .model.cuda import CudaTower
    from .model.matrix import Source
    plan = planned(config, checkpoint, backend, free)
    if plan.pages < plan.least:
        raise ConfigError(f"{backend.name} has {free / GIB:.2f} GiB free and {checkpoint.directory} needs "
                          f"{plan.rest / GIB:.2f} besides its KV cache: a context of {max(plan.pages, 0) * PAGE} tokens "
                          f"would fit, {plan.least * PAGE} were asked for; lower --max-model-len, --max-seqs or "
                          "--cache-mib, take --kv e4m3, or convert to smaller weights.")
    tower = CudaTower(checkpoint.config, Source(checkpoint, backend), **plan.shape, pages=plan.pages, valid=valid,
                      **draft_options(config))
    counted = memory.imagined(checkpoint, backend.chip, backend.multiprocessors, backend.shared, **plan.shape,
                              pages=plan.pages)
    return Placed(tower, plan.pages, plan.shape["slots"], config.kept_states(checkpoint.config), backend.name,
                  memory.needed(counted), chunk=tower.wide.most if tower.wide else 0, prefill=described(tower))


def described(tower):
    """How a CUDA tower reads prompts."""
    if tower.wide:
        kept = ", matrices kept unpacked" if tower.wide.arena.resident else ""
        return f"chunks of {tower.wide.most} rows, {tower.wide.arena.activations} activations{kept}"
    return f"rounds of 32 rows, f16 activations: {tower.hindrance or 'no memory left for chunks'}"


PLACES = {"cpu": on_cpu, "cuda": on_gpu, "emulator": on_emulator}
