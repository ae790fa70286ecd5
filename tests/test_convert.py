"""The converter: the same bytes always, exact sizes beforehand, whole directories or none, a sentence for each refusal."""
import errno
import hashlib
import json
import logging
import os
import queue
import re
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import random_checkpoint
from random_checkpoint import Recipe
from safetensors import safe_open
from safetensors.numpy import save_file
from test_pack import UP, WIDE
from test_weights import change, drop, edit_json, poison

from qwentin import nano
from qwentin.__main__ import main
from qwentin.config import EngineConfig
from qwentin.engine import Engine
from qwentin.errors import ConfigError, QwentinError
from qwentin.model import container, convert
from qwentin.model.convert import prepare
from qwentin.model.weights import open_checkpoint
from qwentin.request import Delta, Done, GenerateRequest, SamplingParams

RECIPE = Recipe(21, WIDE, prefix="model.language_model.", nested=True, vision=True, shards="three")


def source(tmp_path, recipe=RECIPE, name="source"):
    directory = random_checkpoint.write(recipe, tmp_path / name)
    shutil.copy(nano.DIRECTORY / "tokenizer.json", directory)
    return directory


def contents(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_same_input_same_bytes_whatever_the_threads(tmp_path):
    prepare(source(tmp_path), tmp_path / "one").run(threads=1)
    prepare(source(tmp_path), tmp_path / "four").run(threads=4)
    assert contents(tmp_path / "one") == contents(tmp_path / "four")


@pytest.mark.parametrize("weights, embedding", [("fp6", "fp6"), ("fp4", "bf16"), ("fp8", "fp8"), ("bf16", "bf16")])
def test_the_size_is_known_beforehand_to_the_byte(weights, embedding, tmp_path):
    job = prepare(source(tmp_path), tmp_path / "done", weights, embedding, file_bytes=200_000)
    assert len(job.files) > 2
    job.run()
    assert sum(map(len, contents(tmp_path / "done").values())) == job.size
    assert {p.name: p.stat().st_size for p in (tmp_path / "done").glob("*.safetensors")} == \
        {file.name: file.size for file in job.files}


def test_files_are_plain_safetensors_that_say_what_they_hold(tmp_path):
    directory = source(tmp_path)
    prepare(directory, tmp_path / "done", file_bytes=200_000).run()
    arrays = {key: array for path in directory.glob("*.safetensors") for key, array in random_checkpoint.load(path).items()}
    seen = {}
    for path in sorted((tmp_path / "done").glob("*.safetensors")):
        with safe_open(path, "np") as file:
            metadata = file.metadata()
            assert metadata["format"] == "qwentin" and metadata["version"] == "2"
            recipe, digests = json.loads(metadata["recipe"]), json.loads(metadata["source_sha256"])
            assert set(recipe) == set(digests)
            assert all(file.get_slice(key).get_shape() for key in file.keys())
            seen |= recipe
        for name, digest in digests.items():
            stored = arrays[name.replace("model.", RECIPE.prefix, 1) if name.startswith("model.") else name]
            assert digest == hashlib.sha256(stored.tobytes()).hexdigest(), name
    assert seen[UP] == "fp6" and seen["model.norm.weight"] == "copy" and seen["mtp.fc.weight"] == "fp6"


def test_every_part_is_aligned_to_its_elements(tmp_path):
    prepare(source(tmp_path, Recipe(22, WIDE | dict(linear_num_value_heads=2), float32=random_checkpoint.GATED)),
            tmp_path / "done").run()
    with open_checkpoint(tmp_path / "done") as done:
        for shard in done.shards:
            for key, entry in shard.entries.items():
                assert entry.start % {"U8": 64, "F32": 4, "BF16": 2}[entry.dtype] == 0, key


def test_the_packed_directory_serves(tmp_path):
    """By itself, through the engine, and close to the original's answer."""
    prepare(nano.DIRECTORY, tmp_path / "done").run()
    texts = []
    for model in (nano.DIRECTORY, tmp_path / "done"):
        engine = Engine.load(EngineConfig(threads=1, model=str(model), max_seqs=1, kv_tokens=512, max_model_len=512))
        engine.start()
        prompt = engine.chat_template.render([{"role": "user", "content": "Which number is bigger: 988 or 552?"}])
        events = queue.Queue()
        engine.submit(GenerateRequest(id="a", prompt=engine.tokenizer.encode(prompt), max_tokens=64,
                                      sampling=SamplingParams(temperature=0.0)), events.put)
        text = ""
        while not isinstance(event := events.get(timeout=60), Done):
            text += event.text if isinstance(event, Delta) else ""
        engine.stop()
        texts.append(text)
    assert texts[0] == texts[1] and "988" in texts[0]


def test_an_mtp_head_from_another_directory(tmp_path):
    main_part = source(tmp_path, Recipe(23, WIDE | dict(mtp_num_hidden_layers=0)))
    whole = random_checkpoint.write(Recipe(24, WIDE), tmp_path / "whole")
    arrays = random_checkpoint.load(whole / "model.safetensors")
    head = tmp_path / "head"
    head.mkdir()
    save_file({name: array for name, array in arrays.items() if name.startswith("mtp.")}, head / "mtp.safetensors")
    prepare(main_part, tmp_path / "done", "bf16", "bf16", mtp=head).run()
    with open_checkpoint(tmp_path / "done") as done:
        assert done.has_mtp
        np.testing.assert_array_equal(done.f32("mtp.fc.weight"), arrays["mtp.fc.weight"].astype(np.float32))
    with pytest.raises(QwentinError, match="head.*mtp.fc.weight is missing|mtp.fc.weight is missing"):
        change(head, lambda a: a.pop("mtp.fc.weight"), "mtp.safetensors")
        prepare(main_part, tmp_path / "more", mtp=head)
    with pytest.raises(QwentinError, match="holds no mtp"):
        prepare(main_part, tmp_path / "more", mtp=main_part)


def test_an_absent_head_is_said_and_the_new_config_does_not_announce_it(tmp_path, caplog):
    directory = source(tmp_path, Recipe(23, WIDE))
    change(directory, lambda a: [a.pop(name) for name in list(a) if name.startswith("mtp.")])
    with caplog.at_level(logging.WARNING):
        prepare(directory, tmp_path / "done").run()
    assert "no mtp.* tensor" in caplog.text
    assert open_checkpoint(tmp_path / "done").config.mtp_num_hidden_layers == 0


def interrupt_after(pieces):
    """A progress callback that stops the run."""
    count = []

    def progress(_):
        count.append(1)
        if len(count) == pieces:
            raise KeyboardInterrupt
    return progress


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    directory = source(tmp_path)
    prepare(directory, tmp_path / "whole", file_bytes=200_000).run()
    job = prepare(directory, tmp_path / "done", file_bytes=200_000)
    with pytest.raises(KeyboardInterrupt):
        job.run(interrupt_after(60), threads=1)
    assert not (tmp_path / "done").exists()
    finished = {path.name: path.stat().st_mtime_ns for path in job.partial.glob("*.safetensors")}
    assert 0 < len(finished) < len(job.files)
    prepare(directory, tmp_path / "done", file_bytes=200_000).run()
    assert contents(tmp_path / "done") == contents(tmp_path / "whole")
    assert all((tmp_path / "done" / name).stat().st_mtime_ns == time for name, time in finished.items())
    assert not job.partial.exists()


def test_leftovers_of_another_conversion_are_not_taken_up(tmp_path, caplog):
    directory = source(tmp_path)
    job = prepare(directory, tmp_path / "done", "fp8", file_bytes=200_000)
    with pytest.raises(KeyboardInterrupt):
        job.run(interrupt_after(60), threads=1)
    with caplog.at_level(logging.WARNING):
        prepare(directory, tmp_path / "done", "fp6", file_bytes=200_000).run()
    assert "another conversion" in caplog.text
    prepare(directory, tmp_path / "clean", "fp6", file_bytes=200_000).run()
    assert contents(tmp_path / "done") == contents(tmp_path / "clean")


def test_a_changed_source_is_not_taken_for_the_same(tmp_path):
    one = prepare(source(tmp_path), tmp_path / "done")
    two = prepare(source(tmp_path, Recipe(21, WIDE | dict(intermediate_size=384)), "other"), tmp_path / "done")
    assert one.identity != two.identity


# ---- refusals: each gives its sentence and exit code 2, and the target is as it was

def remove(name):
    return lambda d: (d / name).unlink()


def packed_already(d):
    prepare(d, d.parent / "packed").run()
    shutil.rmtree(d)
    shutil.move(d.parent / "packed", d)


def missing_scale(d):
    def edit(arrays):
        arrays[UP] = arrays[UP].astype(ml_dtypes.float8_e4m3fn)
    change(d, edit)


def bad_fp8_scale(d):
    def edit(arrays):
        arrays[UP] = arrays[UP].astype(ml_dtypes.float8_e4m3fn)
        arrays[UP + "_scale_inv"] = np.ones((2, 7), ml_dtypes.bfloat16)
    change(d, edit)


def newer_version(d):
    arrays = random_checkpoint.load(d / "model.safetensors")
    save_file(arrays, d / "model.safetensors", metadata={"format": "qwentin", "version": "3"})


BROKEN = {
    "truncated file": (lambda d: os.truncate(d / "model.safetensors", 90_000), "model.safetensors is truncated"),
    "wrong shape": (lambda d: change(d, lambda a: a.update({UP: a[UP][:7]})), r"up_proj.weight .* has shape \[7, 128\]"),
    "missing tensor": (drop, "up_proj.weight is missing"),
    "missing scale": (missing_scale, "is F8_E4M3 but has no scale"),
    "scale of another shape": (bad_fp8_scale, r"weight_scale_inv .* has shape \[2, 7\]; \[2, 1\] was wanted"),
    "unknown quant_method": (lambda d: edit_json(d / "config.json", lambda c: c.update(
        quantization_config={"quant_method": "awq"})), "quant_method is 'awq'"),
    "NaN": (lambda d: poison(d, np.nan), r"up_proj.weight in .* holds nan at \[3, 5\]"),
    "infinity": (lambda d: poison(d, np.inf), r"up_proj.weight in .* holds inf at \[3, 5\]"),
    "absent tokenizer": (remove("tokenizer.json"), "tokenizer.json is missing"),
    "absent config": (remove("config.json"), "config.json is missing"),
    "no weights": (remove("model.safetensors"), "holds no .*safetensors file"),
    "missing shard": (lambda d: (d / "model.safetensors.index.json").write_text(json.dumps(
        {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}})), "00001-of-00002.* that file is missing"),
    "config of another model": (lambda d: edit_json(d / "config.json", lambda c: c.update(model_type="llama")),
                                "model_type is 'llama'"),
    "packed already": (packed_already, "is packed already; convert the original"),
    "another version's file": (newer_version, "is in version 3 of the packed format; this program reads version 2"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_input(kind, tmp_path, capsys):
    spoil, sentence = BROKEN[kind]
    directory = source(tmp_path, Recipe(25, WIDE))
    spoil(directory)
    assert main(["convert", str(directory), str(tmp_path / "done")]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(sentence, said), said
    assert not (tmp_path / "done").exists()


def test_a_target_that_exists_is_left_alone(tmp_path, capsys):
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "precious").write_text("x")
    assert main(["convert", str(source(tmp_path)), str(tmp_path / "done")]) == 2
    assert "done exists already" in capsys.readouterr().err
    assert contents(tmp_path / "done") == {"precious": b"x"}


def test_a_target_inside_a_file_or_nowhere(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for target in (tmp_path / "file" / "done", tmp_path / "nowhere" / "done"):
        assert main(["convert", str(source(tmp_path)), str(target)]) == 2
        assert "is no directory" in capsys.readouterr().err


@pytest.mark.parametrize("number, sentence", [(errno.EROFS, "cannot be written: Read-only file system"),
                                              (errno.EACCES, "cannot be written: Permission denied")])
def test_a_read_only_target(number, sentence, tmp_path, capsys, monkeypatch):
    def refuse(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))
    directory = source(tmp_path)
    monkeypatch.setattr(convert.Path, "mkdir", refuse)
    assert main(["convert", str(directory), str(tmp_path / "done")]) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "done").exists()


def test_a_disk_without_room_is_found_before_anything_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    assert main(["convert", str(source(tmp_path)), str(tmp_path / "done")]) == 2
    assert "GB free; the packed checkpoint takes" in capsys.readouterr().err
    assert not list(tmp_path.glob("done*"))


def test_a_disk_that_fills_up_leaves_what_is_finished(tmp_path, monkeypatch):
    directory = source(tmp_path)
    job = prepare(directory, tmp_path / "done", file_bytes=200_000)
    real, calls = container.reserve, []

    def full(descriptor, size):
        calls.append(size)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, size)
    monkeypatch.setattr(container, "reserve", full)
    with pytest.raises(ConfigError, match="the disk of .*done.partial is full; free it and run the same command again"):
        job.run()
    assert not (tmp_path / "done").exists() and len(list(job.partial.glob("*.safetensors"))) == 2
    monkeypatch.setattr(container, "reserve", real)
    prepare(directory, tmp_path / "done", file_bytes=200_000).run()
    open_checkpoint(tmp_path / "done")


def test_peak_memory_does_not_grow_with_the_tensor(tmp_path):
    """A table of 96 MiB (bf16) in a process of its own: less than its size above what a small one takes."""
    program = """
import resource, sys
from qwentin.model.convert import prepare
prepare(sys.argv[1], sys.argv[2]).run(threads=2)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""
    peak = []
    for vocabulary in (256, 393216):
        directory = source(tmp_path, Recipe(26, WIDE | dict(tie_word_embeddings=True)), f"v{vocabulary}")
        edit_json(directory / "config.json", lambda c: c.update(vocab_size=vocabulary))
        change(directory, lambda a: a.update({"model.embed_tokens.weight": np.ones((vocabulary, 128),
                                                                                   ml_dtypes.bfloat16)}))
        done = subprocess.run([sys.executable, "-c", program, directory, tmp_path / f"p{vocabulary}"],
                              capture_output=True, text=True, check=True)
        peak.append(int(done.stdout))
    assert peak[1] - peak[0] < 96, peak
