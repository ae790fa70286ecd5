"""The bridge alone: events cross from the engine's thread in order, slow readers cost little, leaving cancels."""
import asyncio
import threading

import numpy as np
import pytest

from fake_engine import FakeEngine, pieces, until
from qwentin.errors import ContextOverflow, EngineStopped, QueueFull
from qwentin.request import Delta, Done, Finish, GenerateRequest, Progress, Token
from qwentin.server.bridge import MERGE, Mailbox, open_run


def request(name="r", **more):
    return GenerateRequest(id=name, prompt=np.array([1, 2], np.int32), **more)


def started(script, **more):
    engine = FakeEngine(script, **more)
    engine.start()
    return engine


def test_events_arrive_in_order_and_end_with_done():
    engine = started(pieces("hello"), prefill_steps=2)

    async def main():
        async with open_run(engine, [request()]) as run:
            return [event async for _, event in run.events()]
    events = asyncio.run(main())
    assert "".join(e.text for e in events if isinstance(e, Delta)) == "hello"
    assert isinstance(events[-1], Done) and events[-2] == Finish(0, "stop")
    assert engine.did("cancel") == []


def test_two_requests_keep_their_numbers():
    engine = started(lambda request, index: pieces(request.id * 3))

    async def main():
        texts = {0: "", 1: ""}
        async with open_run(engine, [request("x"), request("y")]) as run:
            async for number, event in run.events():
                texts[number] += event.text if isinstance(event, Delta) else ""
        return texts
    assert asyncio.run(main()) == {0: "xxx", 1: "yyy"}


def test_leaving_early_cancels():
    engine = started([[b"x"]] * 10**6, step_s=0.001)

    async def main():
        async with open_run(engine, [request("a"), request("b")]) as run:
            await run.take()
    asyncio.run(main())
    assert until(lambda: not engine.jobs)
    assert engine.did("cancel") == ["a", "b"]


def test_a_cancelled_task_cancels_the_request():
    engine = started(pieces("x"))
    engine.gate.clear()

    async def reader():
        async with open_run(engine, [request("a")]) as run:
            async for _ in run.events():
                pass

    async def main():
        task = asyncio.create_task(reader())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    asyncio.run(main())
    assert engine.did("cancel") == ["a"] and until(lambda: not engine.jobs)


def test_all_or_none():
    """The second request does not fit, so the first one is taken back."""
    engine = started(pieces("x"), context=10)
    engine.gate.clear()

    async def main():
        async with open_run(engine, [request("a"), request("b", max_tokens=100)]):
            pass
    with pytest.raises(ContextOverflow):
        asyncio.run(main())
    assert engine.did("cancel") == ["a"]


@pytest.mark.parametrize("error", [QueueFull, EngineStopped])
def test_refusals_of_the_engine_come_through(error):
    engine = started([], max_seqs=0, max_queue=0)
    if error is EngineStopped:
        engine.stop(0.0)

    async def main():
        async with open_run(engine, [request()]):
            pass
    with pytest.raises(error):
        asyncio.run(main())


def boxed(events):
    """What a reader finds that comes after all of these."""
    async def main():
        box = Mailbox(asyncio.get_running_loop(), 1)
        thread = threading.Thread(target=lambda: [box.put(0, event) for event in events])
        thread.start()
        thread.join()
        return [event for _, event in await box.take(1.0)]
    return asyncio.run(main())


def test_waiting_deltas_merge():
    t = [Token(i, i) for i in range(3)]
    events = [Progress(1, 9), Progress(9, 9), Delta(0, "a", (t[0],)), Delta(1, "x"), Delta(0, "b", (t[1],)),
              Delta(1, "y"), Finish(1, "stop"), Delta(0, "c", (t[2],)), Finish(0, "stop"), Done()]
    assert boxed(events) == [Progress(9, 9), Delta(0, "abc", tuple(t)), Delta(1, "xy"), Finish(1, "stop"),
                             Finish(0, "stop"), Done()]


def test_merged_deltas_stay_bounded():
    found = boxed([Delta(0, "x" * 100) for _ in range(1000)])
    assert "".join(e.text for e in found) == "x" * 100000
    assert all(len(e.text) < MERGE + 100 for e in found) and len(found) < 30


def test_silence_is_an_empty_list():
    async def main():
        box = Mailbox(asyncio.get_running_loop(), 1)
        empty = await box.take(0.001)
        box.put(0, Delta(0, "a"))
        return empty, await box.take(1.0)
    assert asyncio.run(main()) == ([], [(0, Delta(0, "a"))])


def test_a_closed_box_drops_what_comes():
    """The engine may still speak when the reader, or even the loop, is gone."""
    async def main():
        box = Mailbox(asyncio.get_running_loop(), 1)
        box.close()
        return box
    box = asyncio.run(main())
    box.put(0, Done())
    assert box.waiting == []
