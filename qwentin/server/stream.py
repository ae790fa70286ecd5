"""Server-sent events: one JSON object a frame, a sign of life while there is nothing to say.

    : prefill 512/8192, 2.1 s left    a comment; clients skip it, proxies and people see that the request lives
    data: {"id": ...}
    data: [DONE]

    event: message_start        the newer dialects name each frame by its type, and end without [DONE]
    data: {"type": "message_start", ...}

    event: ping                 their clients count only events as life, so their signs of life are events
    data: {"type": "ping"}

Headers go out at once, before the prompt is prefilled. Proven by tests/test_stream.py, tests/test_messages.py and
tests/test_responses.py.
"""
import asyncio
import contextlib
import json

from aiohttp import web

from ..request import Progress
from .bridge import Run
from .reply import Reply

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
STALL_S = 60.0          # so long may a client read nothing with its buffers full
DONE = b"data: [DONE]\n\n"


def frame(chunk: dict, named: bool) -> bytes:
    event = f"event: {chunk['type']}\n" if named else ""
    return event.encode() + b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def frames(reply: Reply, chunks: list[dict]) -> bytes:
    return b"".join(frame(chunk, reply.named_frames) for chunk in chunks)


def comment(text: str) -> bytes:
    return f": {text}\n\n".encode()


async def stream(request: web.Request, run: Run, reply: Reply,
                 keepalive_s: float) -> tuple[web.StreamResponse, Exception | None]:
    """Write a reply's chunks as the engine's events come. An error after the headers becomes an error frame, and is
    returned beside the response.

    A socket that breaks ends the stream quietly: leaving the run cancels it.
    """
    response, failure = web.StreamResponse(headers=HEADERS), None
    try:
        await response.prepare(request)
        await send(response, comment("accepted") + frames(reply, reply.opening()))
        try:
            await write_chunks(response, run, reply, keepalive_s)
        except ConnectionError:
            raise
        except Exception as error:
            failure = error
            await send(response, frames(reply, [reply.failed(error)]))
        if not reply.named_frames:
            await send(response, DONE)
        await response.write_eof()
    except ConnectionError:
        if request.transport is not None:
            request.transport.abort()
    return response, failure


async def send(response: web.StreamResponse, raw: bytes) -> None:
    """Write. A client that reads nothing for STALL_S while the buffers are full is gone: ConnectionError."""
    try:
        async with asyncio.timeout(STALL_S):
            await response.write(raw)
    except TimeoutError:
        raise ConnectionResetError("the client stopped reading") from None


async def stream_failure(request: web.Request, reply: Reply, error: Exception) -> web.StreamResponse:
    """A stream that only says why it cannot be."""
    response = web.StreamResponse(headers=HEADERS)
    with contextlib.suppress(ConnectionError):
        await response.prepare(request)
        await response.write(frames(reply, [*reply.opening(), reply.failed(error)]))
        await response.write_eof()
    return response


async def write_chunks(response: web.StreamResponse, run: Run, reply: Reply, keepalive_s: float) -> None:
    """Frames as they become ready, a sign of life whenever nothing was written for `keepalive_s` seconds. What an event
    raises is raised once everything before it is written."""
    clock = asyncio.get_running_loop().time
    due, news = clock() + keepalive_s, "waiting"
    while run.open:
        written, failure = b"", None
        for number, event in await run.take(max(0.0, due - clock())):
            if isinstance(event, Progress):
                left = "" if event.left_s is None else f", {event.left_s:.1f} s left"
                news = f"prefill {event.done}/{event.total}{left}"
            try:
                written += frames(reply, reply.chunks(number, event))
            except Exception as error:
                failure = error
                break
        if not written and clock() >= due:
            alive = reply.alive()
            written = comment(news) if alive is None else frames(reply, [alive])
        if written:
            await send(response, written)
            due = clock() + keepalive_s
        if failure is not None:
            raise failure
