"""Server-sent events: one JSON object a frame, comments while there is nothing to say, [DONE] at the end.

    : prefill 512/8192          a comment; clients skip it, proxies and people see that the request lives
    data: {"id": ...}
    data: [DONE]

Headers go out at once, before the prompt is prefilled. Proven by tests/test_stream.py.
"""
import asyncio
import json

from aiohttp import web

from ..request import Progress
from .bridge import Run
from .refusals import describe
from .reply import Reply

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"


def frame(data: dict) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def comment(text: str) -> bytes:
    return f": {text}\n\n".encode()


async def stream(request: web.Request, run: Run, reply: Reply, keepalive_s: float) -> web.StreamResponse:
    """Write a reply's chunks as the engine's events come. An error after the headers becomes an error frame.

    A socket that breaks ends the stream quietly: leaving the run cancels it.
    """
    response = web.StreamResponse(headers=HEADERS)
    try:
        await response.prepare(request)
        await response.write(comment("accepted"))
        try:
            await write_chunks(response, run, reply, keepalive_s)
        except ConnectionError:
            raise
        except Exception as error:
            await response.write(frame(describe(error)[2]))
        await response.write(DONE)
        await response.write_eof()
    except ConnectionError:
        pass
    return response


async def write_chunks(response: web.StreamResponse, run: Run, reply: Reply, keepalive_s: float) -> None:
    """Frames as they become ready, a comment whenever nothing was written for `keepalive_s` seconds."""
    clock = asyncio.get_running_loop().time
    due, news = clock() + keepalive_s, "waiting"
    while run.open:
        frames = []
        for number, event in await run.take(max(0.0, due - clock())):
            if isinstance(event, Progress):
                news = f"prefill {event.done}/{event.total}"
            frames += [frame(chunk) for chunk in reply.chunks(number, event)]
        if not frames and clock() >= due:
            frames = [comment(news)]
        if frames:
            await response.write(b"".join(frames))
            due = clock() + keepalive_s
