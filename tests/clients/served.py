"""The server under a client: a process of its own on a free port of loopback, and its counters between the turns.

    with serve(window=65536) as server:
        ...one turn of a client...
        server.since("asked")     ->  Turn("asked", requests=2, prompt=9000, cached=8700, refused={})

Nano's window is 8192 tokens and an agent's system prompt is longer: a wider window is nano's own weights under a config.json
that promises more positions. What it then says is worth less, how it is served is the same.
"""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from .place import Failed

ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT / "qwentin" / "nano"
START_S, STOP_S = 120.0, 60.0
NAMES = "requests_total|prompt_tokens_total|cached_tokens_total|running|waiting"
SAMPLE = re.compile(rf'^qwentin_({NAMES})(\{{.*\}})? (\S+)$', re.M)


@dataclass
class Turn:
    """What the server counted during one turn: requests that ended, their prompt tokens, those found in the prefix cache,
    and the answers that were no 200, by route and status. client_cached: what the client itself was told of the cache."""
    did: str = ""
    requests: int = 0
    prompt: int = 0
    cached: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    client_cached: int | None = None

    def __str__(self):
        share = f"{100 * self.cached / self.prompt:.0f} %" if self.prompt else "-"
        return f"{self.cached}/{self.prompt} = {share}" + (f" ({self.requests} requests)" if self.requests != 1 else "")


@dataclass
class Served:
    url: str
    process: subprocess.Popen
    log: object
    before: Turn = field(default_factory=Turn)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def counts(self) -> Turn:
        """Everything since the start, once nothing runs: a client may leave before its last request is counted."""
        while True:
            with urllib.request.urlopen(self.url + "/metrics", timeout=30) as answer:
                samples = SAMPLE.findall(answer.read().decode())
            plain = {name: float(value) for name, labels, value in samples if not labels}
            if plain["running"] == plain["waiting"] == 0:
                break
            time.sleep(0.05)
        found = Turn(prompt=int(plain["prompt_tokens_total"]), cached=int(plain["cached_tokens_total"]))
        for name, labels, value in samples:
            if labels and float(value):
                route, status = re.search(r'route="(.*?)"', labels)[1], re.search(r'status="(.*?)"', labels)[1]
                found.requests += int(float(value))
                if status != "200":
                    found.refused[f"{route} {status}"] = int(float(value))
        return found

    def since(self, did: str, client_cached: int | None = None) -> Turn:
        """What was counted since this was last asked."""
        now, old = self.counts(), self.before
        self.before = now
        refused = {k: n - old.refused.get(k, 0) for k, n in now.refused.items() if n > old.refused.get(k, 0)}
        return Turn(did, now.requests - old.requests, now.prompt - old.prompt, now.cached - old.cached, refused,
                    client_cached)

    def log_text(self) -> str:
        self.log.seek(0)
        return self.log.read()


def widened(folder: Path, window: int) -> Path:
    """A checkpoint directory in `folder`: nano's files by link, but with `window` positions, and greedy unless a request
    says otherwise, so that runs can be compared."""
    folder.mkdir()
    for path in NANO.iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path)
    changes = {"config.json": {"max_position_embeddings": window}, "generation_config.json": {"do_sample": False}}
    for name, change in changes.items():
        (folder / name).unlink()
        (folder / name).write_text(json.dumps({**json.loads((NANO / name).read_text()), **change}))
    return folder


@contextlib.contextmanager
def serve(*options: str, window: int = 0, rules=()):
    """A Served, led by `rules` if there are any. It must stop when told to, with code 0 and no traceback in its log."""
    with tempfile.TemporaryDirectory(prefix="qwentin-serve-") as folder, tempfile.TemporaryFile("w+") as log:
        options = ("--port", "0", "--threads", "1", "--served-model-name", "qwentin-nano", *options)
        if window:
            options += ("--model", str(widened(Path(folder) / "nano", window)), "--kv-tokens", str(2 * window))
        program = ["qwentin.server"]
        if rules:
            program = ["tests.clients.led_server", str(Path(folder) / "rules.json")]
            Path(program[1]).write_text(json.dumps(rules))
        process = subprocess.Popen([sys.executable, "-m", *program, *options], stdout=subprocess.PIPE, stderr=log,
                                   text=True, cwd=ROOT, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
        server = Served("", process, log)
        try:
            line = process.stdout.readline()
            if " ready: " not in line:
                raise Failed(f"the server said {line!r}\n{server.log_text()}")
            server.url = line.split(" ready: ")[1].split("/v1")[0]
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(STOP_S)
        if code or "Traceback" in server.log_text():
            raise Failed(f"the server ended with {code}\n{server.log_text()}")
