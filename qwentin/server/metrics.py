"""/metrics: what a Prometheus server scrapes.

    qwentin_requests_total{route="/v1/chat/completions",status="200"} 12.0      how requests ended, counted here
    qwentin_prefill_seconds_bucket{le="0.5"} 9.0                                where their time went, from their Usage
    qwentin_cached_tokens_total 51200.0                                         the engine's own counters, read at scraping

The status is the HTTP status, for a stream the one its error would have had, and 499 when the client left first (nginx's
number). Engine counters include requests whose client left. Proven by tests/test_metrics.py.
"""
import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..request import Usage
from .refusals import status_of
from .reply import Reply

CLIENT_LEFT = 499
# seconds; a decode step of the smallest model takes about a millisecond, a cold 262,144-token prompt minutes
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
# key of Engine.status() -> what it is
COUNTERS = {"requests": "Requests the engine has finished", "prompt_tokens": "Prompt tokens of finished requests",
            "cached_tokens": "Prompt tokens that came from the prefix cache", "completion_tokens": "Tokens generated",
            "evictions": "Entries that the prefix cache gave up for others",
            "nonfinite": "Requests ended because their logits were not finite",
            "sleeps": "Times that the model's memory was freed",
            "closed_budget": "Thoughts closed because their budget was spent",
            "closed_loop": "Thoughts closed because they only repeated themselves",
            "draft_rounds": "Steps of a choice that verified guesses",
            "draft_plain_steps": "Steps of a choice without guesses",
            "draft_guesses": "Guesses verified", "draft_accepted": "Guesses that the text ran through",
            "draft_lookup": "Of these, found in earlier text",
            "draft_events": "Changes of size of choices' trees, and failures"}
GAUGES = {"running": "Choices that run", "waiting": "Requests in the queue", "kv_pages": "Pages of the KV cache",
          "kv_pages_free": "Pages that no running request holds",
          "kv_pages_cached": "Pages that only the prefix cache holds",
          "prefixes": "Entries of the prefix cache", "state_slots": "Recurrent-state slots for running choices",
          "state_slots_free": "Of these, unused ones", "asleep": "1 while the model's memory is freed",
          "prefill_tokens_left": "Prompt tokens of running and waiting choices that are not read yet",
          "prefill_tokens_per_second": "Rate at which prompts were read lately",
          "prefill_seconds_left": "Seconds that these tokens will take at this rate",
          "parked_bytes": "Bytes of host memory that hold prefixes during sleep"}


@dataclass
class Record:
    """One request on its way: filled in by the handler, counted and logged when it is over."""
    route: str
    begun: float = field(default_factory=monotonic)
    reply: Reply | None = None          # None while the body is not understood
    usages: list[Usage] = field(default_factory=list)
    error: Exception | None = None
    left: bool = False

    @property
    def status(self) -> int:
        if self.left:
            return CLIENT_LEFT
        return 200 if self.error is None else status_of(self.error)


class Metrics:
    """The counts of one server. `status` is Engine.status, or a function that says {} while there is no engine."""

    def __init__(self, status: Callable[[], dict]):
        self.status = status
        self.registry = CollectorRegistry()
        self.registry.register(self)
        histogram = lambda name, text, labels=(): Histogram(f"qwentin_{name}_seconds", text, labels, buckets=SECONDS,
                                                            registry=self.registry)
        self.requests = Counter("qwentin_requests", "Requests by route and HTTP status", ("route", "status"),
                                registry=self.registry)
        self.whole = histogram("request", "From the request's arrival to the last byte of its answer", ("route",))
        self.dropped = Counter("qwentin_dropped_tool_calls", "Tool calls beyond what parallel_tool_calls allows",
                               registry=self.registry)
        self.queue = histogram("queue", "Waiting for a place in the engine")
        self.prefill = histogram("prefill", "Reading the part of the prompt that was not cached")
        self.first = histogram("time_to_first_token", "Queue and prefill together")
        self.decode = histogram("decode", "Generating, from the first token to the last")
        self.per_token = histogram("time_per_output_token", "Decode time by tokens after the first")

    @contextmanager
    def watch(self, route: str) -> Iterator[Record]:
        """Count one request of `route`, however the block ends."""
        record = Record(route)
        try:
            yield record
        except asyncio.CancelledError:
            record.left = True
            raise
        except Exception as error:
            record.error = error
            raise
        finally:
            self.requests.labels(route, str(record.status)).inc()
            self.whole.labels(route).observe(monotonic() - record.begun)
            if record.reply is not None:
                self.dropped.inc(record.reply.extras().get("x_qwentin", {}).get("dropped_calls", 0))
            for usage in record.usages:
                self.observe(usage)

    def observe(self, usage: Usage) -> None:
        self.queue.observe(usage.queue_s)
        self.prefill.observe(usage.prefill_s)
        self.first.observe(usage.queue_s + usage.prefill_s)
        self.decode.observe(usage.decode_s)
        if usage.completion_tokens > 1:
            self.per_token.observe(usage.decode_s / (usage.completion_tokens - 1))

    def collect(self) -> Iterator[Metric]:
        """The engine's own figures, as the registry asks for them."""
        status = self.status()
        for kind, table in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for key, text in table.items():
                name = "engine_requests" if key == "requests" else key
                if key in status:
                    yield kind(f"qwentin_{name}", text, value=status[key])
        parts = GaugeMetricFamily("qwentin_memory_bytes", "Memory that the model takes, by part", labels=("part",))
        for part, size in status.get("memory", {}).items():
            parts.add_metric((part,), size)
        yield parts

    def describe(self) -> list[Metric]:
        """Nothing to check at registration: names differ from all others."""
        return []

    def text(self) -> bytes:
        return generate_latest(self.registry)
