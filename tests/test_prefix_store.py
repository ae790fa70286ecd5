"""PrefixStore: entries survive a restart bit for bit; damaged, foreign and surplus files do no harm."""
import logging

import numpy as np
import pytest

from qwentin.errors import ConfigError
from qwentin.prefix_store import PrefixStore, model_digest
from test_prefix import make_engine, run        # noqa: F401  (make_engine is a fixture)


def arrays(seed, rows=5):
    rng = np.random.default_rng(seed)
    return {"kv": rng.standard_normal((2, 1, rows, 1, 4)).astype(np.float32), "S": rng.standard_normal(7)}


def ids(*values):
    return np.array(values, np.int32)


@pytest.fixture
def store(tmp_path):
    return PrefixStore(tmp_path / "cache", "model", 10**6)


def reopened(store, **change):
    return PrefixStore(store.directory, change.get("model", store.model), change.get("budget", store.budget))


def test_round_trip(store):
    assert store.save(ids(1, 2, 3), arrays(1)) and store.save(ids(1, 2), arrays(2))
    again = reopened(store)
    assert again.match(ids(1, 2, 3, 4), 0).ids.tolist() == [1, 2, 3]
    assert again.match(ids(1, 2, 3, 4), 3) is None and again.match(ids(1, 3), 0) is None
    got = again.load(again.match(ids(1, 2), 0))
    assert all(np.array_equal(got[name], a) for name, a in arrays(2).items()) and set(got) == {"kv", "S"}
    assert not list(store.directory.glob("*.part"))


def test_another_models_files_are_left_alone(store):
    store.save(ids(1), arrays(1))
    other = reopened(store, model="other")
    assert other.match(ids(1), 0) is None
    assert len(list(store.directory.iterdir())) == 1


@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied", "gone"])
def test_damaged_files_are_ignored_with_a_line_in_the_log(store, caplog, damage):
    store.save(ids(1, 2), arrays(1))
    (path,) = store.directory.iterdir()
    raw = bytearray(path.read_bytes())
    again = reopened(store) if damage in ("flipped", "gone") else None
    if damage == "gone":
        path.unlink()
    else:
        raw[-3] ^= 1
        path.write_bytes({"truncated": raw[:-9], "flipped": raw, "emptied": b""}[damage])
    with caplog.at_level(logging.WARNING):
        again = again or reopened(store)
        entry = again.match(ids(1, 2), 0)
        assert entry is None or again.load(entry) is None
    assert again.match(ids(1, 2), 0) is None and path.name in caplog.text


def test_the_budget_drops_the_oldest_of_earlier_runs(store):
    import os
    for i in range(3):
        store.save(ids(i), arrays(i))
    for age, path in enumerate(sorted(store.directory.iterdir())):
        os.utime(path, (age, age))
    oldest = reopened(store).entries[0].ids.tolist()
    again = reopened(store, budget=sum(e.bytes for e in reopened(store).entries) + 10)
    assert again.save(ids(9), arrays(9))
    left = [e.ids.tolist() for e in reopened(store).entries]
    assert oldest not in left and [9] in left and len(left) == 3
    small = reopened(store, budget=100)
    assert not small.save(ids(8), arrays(8)), "larger than the whole budget"


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--cache-dir"):
        PrefixStore(tmp_path / "file" / "cache", "model", 1)


def test_model_digest_sees_every_part(tmp_path):
    digests = set()
    for name, content in (("config.json", b"{}"), ("tokenizer.json", b"{}"), ("a.safetensors", b"x" * 9), ("notes", b"")):
        digests.add(model_digest(tmp_path))
        (tmp_path / name).write_bytes(content)
    assert len(digests) == 4 and model_digest(tmp_path) in digests, "other files do not matter"


def test_a_restarted_engine_is_warm_and_says_the_same(make_engine, tmp_path, caplog):     # noqa: F811
    prompt = [300 + i % 70 for i in range(200)]
    first = make_engine(cache_dir=str(tmp_path))
    cold, none = run(first, prompt, max_tokens=8)
    assert none == 0
    first.stop()
    second = make_engine(cache_dir=str(tmp_path))
    warm, cached = run(second, prompt + cold + [5], max_tokens=8)
    assert cached == 207, "all but the last generated token, which was never computed"
    second.scheduler.check()
    assert warm == run(make_engine(cache_mib=0), prompt + cold + [5], max_tokens=8)[0]
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-50])
    third = make_engine(cache_dir=str(tmp_path))
    assert run(third, prompt + cold + [5], max_tokens=8) == (warm, 0) and "damaged" in caplog.text
