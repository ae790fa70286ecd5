"""Where a client lives: a folder of its own with what it needs installed, an empty home, and a project to work in.

Installing takes a venv for pip, or a prefix for npm; `kept` is a folder that survives, so that the next run finds it done.
A client gets an environment with nothing of the caller's but PATH, and a dead proxy for everything that is not loopback.
"""
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

INSTALL_S, RUN_S = 1200.0, 900.0
NOWHERE = "http://127.0.0.1:9"          # the discard port: a client that phones home is refused at once


class Failed(Exception):
    """A command of a client did not do what it should; the text says which and what it printed."""


@dataclass
class Done:
    code: int
    out: str
    err: str


class Place:
    def __init__(self, name: str, root: Path, kept: Path | None = None):
        self.installed = (kept or root) / f"{name}-installed"
        self.home, self.work = root / "home", root / "work"
        for folder in (self.installed, self.home, self.work):
            folder.mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------------ installing
    def pip(self, *packages: str) -> Path:
        """A venv with these packages; its bin folder."""
        where = self.installed / "venv"
        if not (where / "done").exists():
            self.install([sys.executable, "-m", "venv", str(where)])
            self.install([str(where / "bin" / "python"), "-m", "pip", "install", "-q", *packages])
            (where / "done").touch()
        return where / "bin"

    def npm(self, *packages: str) -> Path:
        """A prefix with these packages; the folder of their commands."""
        where = self.installed / "npm"
        if not (where / "done").exists():
            where.mkdir(exist_ok=True)
            self.install([shutil.which("npm") or "npm", "install", "--no-audit", "--no-fund", "--loglevel=error", "--prefix",
                          str(where), *packages])
            (where / "done").touch()
        return where / "node_modules" / ".bin"

    @staticmethod
    def install(command: list[str]) -> None:
        """With the caller's whole environment: where the registry is, is said there."""
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise Failed(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")

    # ------------------------------------------------------------------ running
    def environment(self, bins: Path, more: dict[str, str]) -> dict[str, str]:
        proxies = {name: NOWHERE for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")}
        loopback = {name: "127.0.0.1,localhost" for name in ("NO_PROXY", "no_proxy")}
        return {"PATH": f"{bins}:{os.environ['PATH']}", "HOME": str(self.home), "LANG": "C.UTF-8", "NO_COLOR": "1",
                "TERM": "dumb", **proxies, **loopback, **more}

    def run(self, bins: Path, *command: str, expect: int | None = 0, said: str = "", timeout: float = RUN_S, **env) -> Done:
        """A command of the client in its project. `said` is what it reads; Failed if it does not exit with `expect`."""
        found = shutil.which(command[0], path=str(bins)) or command[0]
        process = subprocess.Popen([found, *command[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                   stderr=subprocess.PIPE, cwd=self.work, env=self.environment(bins, env),
                                   start_new_session=True)
        try:
            out, err = process.communicate(said, timeout)
        except subprocess.TimeoutExpired:
            raise Failed(f"{' '.join(command)[:300]} did not end in {timeout:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):       # whatever it started and left behind
                os.killpg(process.pid, signal.SIGKILL)
        if expect is not None and process.returncode != expect:
            raise Failed(f"{' '.join(command)[:300]} ended with {process.returncode}:\n{out[-3000:]}\n{err[-3000:]}")
        return Done(process.returncode, out, err)
