"""Between the event loop and the engine thread.

    coroutine                     engine thread
    open(requests) -- submit -->  queue, prefill, decode
    take()         <-- put -----  sink(event)
    leaving        -- cancel -->  within one step: Finish("cancel"), Done

Whoever leaves the `async with` early (a client that went away cancels its handler, a socket that broke raises) cancels
what is still running. A reader that is slower than the engine costs no more memory than the text it has not read:
waiting deltas are merged and only the latest progress is kept. Proven by tests/test_bridge.py.
"""
import asyncio
import math
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from ..request import Delta, Done, Event, GenerateRequest, Progress, Usage
from .refusals import TookTooLong

MERGE = 4096        # characters up to which a waiting delta grows; a bound keeps appending linear


class Mailbox:
    """Events of a few requests on their way from the engine thread to one coroutine: (number of the request, event)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, open_requests: int):
        self.loop = loop
        self.lock = threading.Lock()
        self.waiting: list[tuple[int, Event]] = []
        self.last: dict[tuple, int] = {}            # (request, choice or kind) -> where its latest event waits
        self.open_requests = open_requests          # those whose Done has not been taken
        self.arrived = asyncio.Event()
        self.closed = False
        self.usages: list[Usage] = []               # of the requests that are done

    def put(self, number: int, event: Event) -> None:
        """Called by the engine thread. Wakes the reader only if the box was empty."""
        with self.lock:
            if self.closed:
                return
            wake = not self.waiting
            self.add(number, event)
            if wake:
                self.loop.call_soon_threadsafe(self.arrived.set)

    def add(self, number: int, event: Event) -> None:
        key = (number, event.index) if isinstance(event, Delta) else (number, type(event))
        place = self.last.get(key)
        if place is not None and isinstance(event, Progress):
            self.waiting[place] = (number, event)
            return
        if place is not None and isinstance(event, Delta):
            before = self.waiting[place][1]
            if len(before.text) < MERGE and len(before.tokens) < MERGE:
                self.waiting[place] = (number, merge(before, event))
                return
        self.last[key] = len(self.waiting)
        self.waiting.append((number, event))

    async def take(self, timeout: float) -> list[tuple[int, Event]]:
        """Everything that waits, as soon as there is something; [] if nothing came for `timeout` seconds (or math.inf)."""
        try:
            async with asyncio.timeout(None if timeout == math.inf else timeout):
                await self.arrived.wait()
        except TimeoutError:
            return []
        with self.lock:
            taken, self.waiting = self.waiting, []
            self.last.clear()
            self.arrived.clear()
        done = [event.usage for _, event in taken if isinstance(event, Done)]
        self.open_requests -= len(done)
        self.usages += done
        return taken

    def close(self) -> None:
        """Later events are dropped: nobody reads them."""
        with self.lock:
            self.closed = True
            self.waiting.clear()


def merge(before: Delta, after: Delta) -> Delta:
    return replace(before, text=before.text + after.text, tokens=before.tokens + after.tokens)


class Run:
    """Some requests in the engine, seen as one stream of events that lasts `limit` seconds at most (0: for ever)."""

    def __init__(self, mailbox: Mailbox, limit: float = 0.0):
        self.mailbox, self.limit = mailbox, limit
        self.end = mailbox.loop.time() + limit if limit else math.inf

    async def take(self, timeout: float = math.inf) -> list[tuple[int, Event]]:
        """Everything that waits, as soon as there is something; [] if nothing came for `timeout` seconds. Raises TookTooLong
        when the limit is reached."""
        left = self.end - self.mailbox.loop.time()
        if left <= 0:
            raise TookTooLong(self.limit)
        return await self.mailbox.take(min(left, timeout))

    @property
    def open(self) -> bool:
        """Is a Done still to come?"""
        return self.mailbox.open_requests > 0

    @property
    def usages(self) -> list[Usage]:
        """Of the requests whose Done was taken."""
        return self.mailbox.usages

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Every (number of the request, event), to the last Done."""
        while self.open:
            for pair in await self.take():
                yield pair


@asynccontextmanager
async def open_run(engine, requests: list[GenerateRequest], limit: float = 0.0) -> AsyncIterator[Run]:
    """Submit the requests, all or none, and yield their Run, which may take `limit` seconds (0: for ever).

    Raises what Engine.submit raises. On the way out whatever has not ended is cancelled.
    """
    mailbox = Mailbox(asyncio.get_running_loop(), len(requests))
    submitted = []
    try:
        for number, request in enumerate(requests):
            engine.submit(request, lambda event, number=number: mailbox.put(number, event))
            submitted.append(request.id)
        yield Run(mailbox, limit)
    finally:
        unfinished = mailbox.open_requests
        mailbox.close()
        if unfinished:
            for request_id in submitted:        # cancelling one that has ended changes nothing
                engine.cancel(request_id)
