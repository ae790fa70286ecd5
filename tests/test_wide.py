"""Wide prefill under the emulator, on a tiny model, part by part against the numpy tower, which rounds to e4m3 likewise.

A part of a layer is two products. The first gets the same inputs on both sides, so its results are as near as f16 and the
kernels' float32 leave them. What the second gets differs by up to 2^-9 (bf16 keys), so with a chance of 2^-9 / 2^-3 it
falls into the neighbouring step of e4m3, 2^-3 of a number: sqrt(2^-9 2^-3) = 2^-6 of the product, and twice that is allowed.
States come of first products alone.

In f16 a rounding costs 2^-12.2 in the root mean square, and a part has up to nine one behind the other, 2^-10.6: 2^-10 is
allowed. Attention has bf16 besides, 2^-9.2 each of queries, keys, values and probabilities: twice that.
"""
import sys
from pathlib import Path

import numpy as np
import pytest
import random_checkpoint
from random_checkpoint import Recipe

from qwentin.config import EngineConfig
from qwentin.model.backend import EmulatorBackend
from qwentin.model.budget import CONTEXT
from qwentin.model.convert import prepare
from qwentin.model.cpu import CpuTower, rms_unit
from qwentin.model.cuda import CudaTower
from qwentin.model.matrix import Source
from qwentin.model.weights import open_checkpoint
from qwentin.model.wide import LEAST, chunks, parts
from qwentin.numerics import decode_bf16
from qwentin.step import Rows, pack
from qwentin.towers import on_device

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
from activations import e4m3  # noqa: E402

TINY = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
            num_attention_heads=2, num_key_value_heads=1, head_dim=256, linear_num_key_heads=1, linear_num_value_heads=3,
            linear_key_head_dim=128, linear_value_head_dim=128, vocab_size=256)     # heads of delta_chunk's cases
PART, STATE, HALF, BF16 = 2.0 ** -5, 2.0 ** -8, 2.0 ** -10, 2.0 ** -8
ROWS, PAGES = 70, 3
IDS = np.random.default_rng(0).integers(0, 256, ROWS + 1).astype(np.int32)
TABLE = np.array([2, 0], np.int32)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """In bf16."""
    directory = tmp_path_factory.mktemp("wide")
    random_checkpoint.write(Recipe(41, TINY), directory)
    (directory / "tokenizer.json").write_text("{}")
    return open_checkpoint(directory)


@pytest.fixture(scope="module")
def checkpoint(source, tmp_path_factory):
    """Packed."""
    packed = tmp_path_factory.mktemp("packed") / "fp6"
    prepare(source.directory, packed, weights="fp6").run()
    return open_checkpoint(packed)


@pytest.fixture(scope="module")
def towers(checkpoint):
    """(the CUDA tower in the emulator, the numpy tower with activations in e4m3) of one packed directory."""
    gpu = CudaTower(checkpoint.config, Source(checkpoint, EmulatorBackend("sm_90a")), PAGES, 1, active=1, wide=128)
    return gpu, e4m3(CpuTower(checkpoint, PAGES, 1))


def prompt(count=ROWS, length=0, follows=True):
    tokens, behind = IDS[length:length + count], IDS[length + 1:length + count + 1]
    behind = np.append(behind, np.full(count - len(behind), -1, np.int32))
    return pack([Rows(tokens, 0, TABLE, length, np.array([count - 1], np.int32), follows=behind if follows else None)], True)


def real(a):
    return decode_bf16(a) if a.dtype == np.uint16 else a.copy()


def off(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def part_of(cpu, step, index, name, hidden):
    """What the numpy tower's part of a layer gives for these hiddens."""
    layer, eps = cpu.layers[index], cpu.config.rms_norm_eps
    x = rms_unit(hidden, eps) * layer.norm_in
    if name == "mlp":
        return cpu.mlp(hidden, layer)
    if name == "delta net":
        return cpu.delta_net(x, layer.mixer, step, 0)
    return cpu.attention(x, layer.mixer, step, 0, *cpu.rope_table(step.positions))


def test_a_chunk_part_by_part(towers):
    compare_parts(*towers, PART, PART, STATE)


@pytest.fixture(scope="module")
def nvfp4(source, tmp_path_factory):
    """Packed with scales for 16 inputs."""
    packed = tmp_path_factory.mktemp("packed") / "nvfp4"
    prepare(source.directory, packed, weights="fp4").run()
    return open_checkpoint(packed)


@pytest.mark.parametrize("weights, chip, format", [("source", "sm_90a", "f16"), ("checkpoint", "sm_90a", "f16"),
                                                   ("nvfp4", "sm_120a", "e4m3")])
def test_a_chunk_of_f16_part_by_part(weights, chip, format, request):
    """The draft head's keys, too, behind the same hiddens. Asked for, or what the chip has for the weights."""
    weights = request.getfixturevalue(weights)
    gpu = CudaTower(weights.config, Source(weights, EmulatorBackend(chip)), PAGES, 1, active=1, wide=128, prefill=format)
    cpu = CpuTower(weights, PAGES, 1)
    c = compare_parts(gpu, cpu, HALF, BF16, HALF)
    hidden = c.normed[:ROWS].copy()
    gpu.mtp.queue_seeds(gpu.backend, c, gpu.embedding)
    cpu.forward_mtp(pack([Rows(IDS[1:ROWS + 1], 0, TABLE, 0, np.zeros(0, np.int32))]), hidden)
    assert off(decode_bf16(gpu.kv[2][TABLE[0]][:ROWS]), cpu.kv[0, -1, TABLE[0], :ROWS]) < BF16


def test_a_chunk_of_packed_matrices_part_by_part(checkpoint, towers):
    """Block-scaled on the chip that has it: nothing is unpacked."""
    gpu = CudaTower(checkpoint.config, Source(checkpoint, EmulatorBackend("sm_120a")), PAGES, 1, active=1, wide=128,
                    resident=True)
    assert not gpu.wide.arena.resident and "matrix" not in gpu.wide.arena.memory
    compare_parts(gpu, towers[1], PART, PART, STATE)


def compare_parts(gpu, cpu, part_off, attention_off, state_off):
    """The chunk behind it."""
    step, seen = prompt(), []
    gpu.clear_slot(0), cpu.clear_slot(0)
    c = gpu.wide.arena.stage(step, chunks(step, 0, 128)[0], step.outputs)
    gpu.wide.queue(c, lambda name, hidden, delta: seen.append((name, hidden[:ROWS].copy(), real(delta[:ROWS]))))
    assert len(seen) == 4
    for name, hidden, delta in seen:
        _, index, part = name.split(" ", 2)
        allowed = attention_off if part == "attention" else part_off
        assert off(delta, part_of(cpu, step, int(index), part, hidden)) < allowed, name
    pools = gpu.pools[0]
    assert off(pools.S[0], cpu.S[0, 0]) < state_off and off(pools.window[0], cpu.window[0, 0]) < state_off
    keys = decode_bf16(gpu.kv[0][TABLE[0]][:ROWS])
    assert off(keys, cpu.kv[0, 0, TABLE[0], :ROWS]) < BF16
    return c


def test_a_decode_step_behind_a_chunk_owes_nothing_and_the_head_is_seeded(towers):
    """Against the numpy tower without rounding: e4m3 activations err by 2.6 % a product, four of them a layer, and what the
    residual stream gathers stays below a tenth. The head's keys are two products behind a hidden of that error."""
    gpu, cpu = towers
    gpu.clear_slot(0), cpu.clear_slot(0)
    got, want = gpu.forward(prompt()), cpu.forward(prompt())
    assert not gpu.ledger.debts and got.seeded.tolist() == [ROWS]
    assert off(got.hidden[-1], want.hidden[-1]) < 0.1 and off(got.logits, want.logits) < 0.2
    seeds = decode_bf16(gpu.kv[2][TABLE[0]][:ROWS])
    cpu.forward_mtp(pack([Rows(IDS[1:ROWS + 1], 0, TABLE, 0, np.zeros(0, np.int32))]), want.hidden)
    assert off(seeds, cpu.kv[0, -1, TABLE[0], :ROWS]) < 0.2
    got, want = gpu.forward(prompt(1, ROWS)), cpu.forward(prompt(1, ROWS))
    assert got.seeded.tolist() == [0] and off(got.logits, want.logits) < 0.2


def test_the_chunk_is_what_chip_and_memory_allow(checkpoint):
    config = dict(max_model_len=256, max_seqs=1, cache_mib=1)
    plenty = on_device(EngineConfig(**config), checkpoint, None, EmulatorBackend("sm_90a"), 2 << 30)
    assert plenty.chunk == 4096
    assert plenty.report()["prefill"] == "chunks of 4096 rows, e4m3 activations, matrices kept unpacked"
    enough = sum(plenty.memory.values()) + CONTEXT
    whole = on_device(EngineConfig(**config), checkpoint, None, EmulatorBackend("sm_90a"), enough - 1)
    assert whole.chunk == 4096 and whole.report()["prefill"] == "chunks of 4096 rows, e4m3 activations"
    assert plenty.memory["prefill"] - whole.memory["prefill"] == sum(
        -(-m.n // 128) * 128 * m.tiles.shape[1] * 132 for part in parts(whole.tower) for m in part.matrices)
    least = sum(whole.memory.values()) - whole.memory["KV"] * 3 // 4 + CONTEXT       # one context of the four
    less = on_device(EngineConfig(**config), checkpoint, None, EmulatorBackend("sm_90a"), least - 1)
    assert less.chunk == 2048
    scaled = on_device(EngineConfig(**config), checkpoint, None, EmulatorBackend("sm_120a"), 2 << 30)
    assert scaled.chunk == 4096 and scaled.report()["prefill"] == "chunks of 4096 rows, e4m3 activations"
    assert scaled.memory["prefill"] < whole.memory["prefill"]
    plain = on_device(EngineConfig(**config), checkpoint, None, EmulatorBackend("sm_80"), 2 << 30)
    assert plain.chunk == 0 and plain.prefill == "rounds of 32 rows, f16 activations: no e4m3 product for sm_80"


def test_16_bits_of_activations_where_asked_or_of_weights(checkpoint, source, tmp_path):
    config = dict(max_model_len=256, max_seqs=1, cache_mib=1)
    for weights, format in ((checkpoint, "f16"), (source, "f16"), (source, "e4m3")):
        placed = on_device(EngineConfig(prefill_format=format, **config), weights, None, EmulatorBackend("sm_90a"), 2 << 30)
        assert placed.report()["prefill"] == "chunks of 4096 rows, f16 activations, matrices kept unpacked"
        found = [m for part in parts(placed.tower) for m in part.matrices]         # tiles, and of packed ones a scale
        assert sum(m.nbytes for m in placed.tower.wide.arena.resident.values()) == sum(
            -(-m.width * (1 + m.gated) // 128) * 128 * (2 * m.inputs + 4 * (m.plain is None)) for m in found)
    random_checkpoint.write(Recipe(41, TINY | dict(intermediate_size=160)), tmp_path)
    odd = on_device(EngineConfig(**config), open_checkpoint(tmp_path), None, EmulatorBackend("sm_90a"), 2 << 30)
    assert odd.prefill == "rounds of 32 rows, f16 activations: 2 matrices are 16-bit, which is multiplied in rounds"


def test_which_sequences_go_wide(towers):
    wide = towers[0].wide
    tree = Rows(IDS[:LEAST], 0, TABLE, 0, np.zeros(0, np.int32), np.full(LEAST, -1, np.int32), commit=False)
    assert wide.takes(prompt(LEAST), 0) and not wide.takes(prompt(LEAST - 1), 0) and not wide.takes(pack([tree]), 0)
    assert not wide.takes(pack([Rows(IDS[:LEAST], 0, TABLE, 1, np.zeros(0, np.int32), accepted=np.zeros(1, np.int32))]), 0)


@pytest.mark.parametrize("rows, most, counts", [(70, 4096, [70]), (4096, 4096, [4096]), (4097, 4096, [2176, 1921]),
                                                (300, 128, [128, 128, 44]), (1000, 512, [512, 488])])
def test_chunks_are_whole_tiles_of_nearly_one_size(rows, most, counts):
    step = pack([Rows(np.zeros(n, np.int32), 0, TABLE, 0, np.zeros(0, np.int32)) for n in (1, rows)])
    spans = chunks(step, 1, most)
    assert [s.count for s in spans] == counts
    assert [(s.first, s.done) for s in spans] == [(1 + d, d) for d in np.cumsum([0, *counts[:-1]])]
