"""Service: what the routes serve, shared by all of them: the engine once it is loaded, the counts, the log.

Made by process.py (and by tests around a scripted engine); read by every handler.
"""
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from ..config import EngineConfig
from ..errors import EngineStopped
from .metrics import Metrics, Record
from .refusals import Loading
from .requestlog import RequestLog

log = logging.getLogger("qwentin.server")

MAX_NOTES = 200             # lines remembered, each logged once


@dataclass
class Service:
    """`engine` is None while it loads; `stopping` says that the process is on its way out."""
    config: EngineConfig
    engine: object = None
    stopping: bool = False
    started: int = field(default_factory=lambda: int(time.time()))
    noted: set[str] = field(default_factory=set)

    def __post_init__(self):
        self.metrics = Metrics(self.status)
        self.request_log = RequestLog(self.config.request_log) if self.config.request_log else None

    def ready(self):
        """The engine. Raises Loading or EngineStopped."""
        if self.stopping:
            raise EngineStopped("The server is shutting down.")
        if self.engine is None:
            raise Loading()
        return self.engine

    def status(self) -> dict:
        """The engine's; {} while there is none."""
        return {} if self.engine is None else self.engine.status()

    def word(self) -> str:
        """ok or asleep: requests are served. loading, stopping or failed: they are not."""
        if self.stopping or self.engine is None:
            return "stopping" if self.stopping else "loading"
        return self.status().get("status", "ok")

    @contextmanager
    def watch(self, route: str, client: str | None) -> Iterator[Record]:
        """Count and log one generation, however the block ends."""
        try:
            with self.metrics.watch(route) as record:
                yield record
        finally:
            if self.request_log:
                self.request_log.write(record, client)

    def note(self, lines: list[str]) -> None:
        """Log each line once."""
        for line in lines:
            if line not in self.noted and len(self.noted) < MAX_NOTES:
                self.noted.add(line)
                log.info("%s (logged once)", line)


SERVICE = web.AppKey("service", Service)
