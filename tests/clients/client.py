"""Client: one program to drive, and how a run of it goes: place, server, conversation, report."""
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .place import Failed, Place
from .report import LED, NANO, Report
from .served import Served, serve


@dataclass(frozen=True)
class Client:
    """`converse` installs what it needs, then fills in the report. window: of the server, 0 for nano's own.
    rules: which replies are written in advance (led_server.py); none: all are nano's."""
    name: str
    converse: Callable[[Place, Served, Report], None]
    window: int = 0
    rules: tuple[dict, ...] = ()

    def run(self, kept: Path | None = None) -> Report:
        report, begun = Report(self.name, replies=LED if self.rules else NANO), time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"qwentin-{self.name}-", ignore_cleanup_errors=True) as folder:
            try:
                place = Place(self.name, Path(folder), kept)
                with serve(window=self.window, rules=self.rules) as server:
                    self.converse(place, server, report)
            except Exception as error:      # the next client is to be run all the same
                report.result = f"FAILED: {error if isinstance(error, Failed) else repr(error)}"
        report.seconds = round(time.monotonic() - begun, 1)
        return report
