"""The request log, if --request-log names a file: one JSON object a line for each generation, when it is over.

    {"time": "2026-11-30T08:00:00.123+00:00", "route": "/v1/messages", "client": "127.0.0.1", "status": 200, "error": null,
     "id": "msg_...", "stream": true, "seconds": 1.8, "prompt_tokens": 31044, "completion_tokens": 96, "choices": 1, ...}

What follows is the reply's x_qwentin: cached tokens, seconds by phase, how thinking was resolved, tool calls dropped. Counts
and names only: no line holds anything of a prompt or an answer. Lines are appended, so logrotate's copytruncate works.
Proven by tests/test_requestlog.py.
"""
import json
import logging
from datetime import UTC, datetime
from time import monotonic

from ..errors import ConfigError
from .metrics import Record
from .refusals import describe_quietly

log = logging.getLogger("qwentin.server")


class RequestLog:
    """Appends to `path`. Raises ConfigError if that cannot be opened."""

    def __init__(self, path: str):
        try:
            self.file = open(path, "a", encoding="utf-8", buffering=1)      # whole lines go out at once
        except OSError as error:
            raise ConfigError(f"--request-log: {path} cannot be written: {error.strerror}.") from None
        self.complained = False

    def write(self, record: Record, client: str | None) -> None:
        """A disk that is full costs lines and one complaint, never a request."""
        try:
            self.file.write(json.dumps(entry(record, client), ensure_ascii=True) + "\n")
        except (OSError, ValueError) as error:
            if not self.complained:
                log.warning("the request log cannot be written: %s", error)
            self.complained = True


def entry(record: Record, client: str | None) -> dict:
    reply, now = record.reply, datetime.now(UTC)
    code = None if record.error is None else describe_quietly(record.error)[2]["error"]["code"]
    line = {"time": now.isoformat(timespec="milliseconds"), "route": record.route, "client": client,
            "status": record.status, "error": code, "seconds": round(monotonic() - record.begun, 4)}
    if reply is None:
        return line
    usages = record.usages
    return {**line, "id": reply.requests[0].id, "stream": bool(reply.body.stream),
            "choices": sum(request.n for request in reply.requests),
            "prompt_tokens": sum(len(request.prompt) for request in reply.requests),
            "completion_tokens": sum(usage.completion_tokens for usage in usages),
            **reply.extras().get("x_qwentin", {})}
