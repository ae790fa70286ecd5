"""One real server process a session and worker: `python -m qwentin.server --port 0` with the embedded model."""
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import pytest
from threadpoolctl import threadpool_limits

from http_client import call

# One BLAS thread a process: test processes run side by side, and threads that spin for each other slow all of them down.
threadpool_limits(1, "blas")
START_S = 120.0     # generous: the machine may be busy


@dataclass
class ServerProcess:
    url: str
    process: subprocess.Popen
    log: object

    @property
    def client(self):
        """The openai SDK, pointed here; imported late because most tests do without it."""
        import openai
        return openai.OpenAI(base_url=self.url + "/v1", api_key="any", max_retries=0, timeout=120.0)

    def health(self) -> dict:
        return call(self.url, "/health").json

    def idle(self) -> bool:
        """Nothing runs or waits, and every page and slot is back."""
        h = self.health()
        return (h["running"], h["waiting"]) == (0, 0) and h["kv_pages"] == h["kv_pages_free"] \
            and h["state_slots"] == h["state_slots_free"]

    def resident(self) -> int:
        """Bytes of memory that the process holds now."""
        with open(f"/proc/{self.process.pid}/statm") as f:
            return int(f.read().split()[1]) * 4096

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def log_text(self) -> str:
        self.log.seek(0)
        return self.log.read()


def start_server(*options: str) -> ServerProcess:
    """A server process that announced itself. Raises what it said if it did not."""
    log = tempfile.TemporaryFile("w+")
    process = subprocess.Popen([sys.executable, "-m", "qwentin.server", "--port", "0", "--threads", "1", *options],
                               stdout=subprocess.PIPE, stderr=log, text=True)
    line = process.stdout.readline()
    server = ServerProcess("", process, log)
    if " ready: " not in line:
        process.wait(START_S)
        raise RuntimeError(f"the server said {line!r}\n{server.log_text()}")
    server.url = line.split(" ready: ")[1].split("/v1")[0]
    return server


@pytest.fixture(scope="session")
def server():
    """The shared one. Tests leave it idle; it must end with code 0 and no traceback in its log."""
    found = start_server("--keepalive-s", "2")
    yield found
    assert found.stop() == 0
    assert "Traceback" not in found.log_text()


@pytest.fixture(scope="session")
def client(server):
    return server.client


def wait_idle(server: ServerProcess, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not server.idle():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
