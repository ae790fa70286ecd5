"""Engine: the loop. Schedule a step, run it, sample, emit; one thread owns everything, the others leave notes for it.

    submit / cancel  ->  inbox  ->  [ engine thread: read inbox, plan, tower.forward, sample, emit to sinks ]  ->  events

A sink is a function of one event, called on the engine thread; it must return at once. Every accepted request ends with
exactly one `Done`, whatever happens. Proven by tests/test_engine.py.
"""
import logging
import threading
from time import monotonic
from typing import Callable

import numpy as np

from . import census
from .admission import admissible
from .chat_template import ChatTemplate
from .config import EngineConfig, ModelConfig
from .constraint import Grammars
from .errors import ConstraintFailed, EngineStopped, QueueFull
from .history import History
from .kvpool import KVPool
from .pace import Pace
from .prefix_store import PrefixStore, model_digest
from .request import Delta, Done, Finish, GenerateRequest, Progress, Usage
from .sampler import best, default_sampling, log_probabilities
from .scheduler import Plan, Scheduler
from .scoring import score_prompt
from .sequence import Job, Sequence, Sink
from .sleep import Sleeper
from .speculation import Speculation
from .step import Output, Row
from .tokenizer import Detokenizer, Tokenizer
from .towers import Placed, load_tower

log = logging.getLogger("qwentin.engine")


class Engine:
    """Everything between token ids in and events out. Build with `load`, then `start`."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, placed: Placed, tokenizer: Tokenizer,
                 chat_template: ChatTemplate):
        self.config, self.model_config = config, model_config
        self.tokenizer, self.chat_template = tokenizer, chat_template
        self.max_model_len = config.context_window(model_config)
        self.defaults = default_sampling(config.model)
        self.install(placed)
        self.speculation = Speculation(self, config, self.tower.mtp is not None)
        self.sleeper = Sleeper(self, config.sleep_idle_s, config.sleep_mib * 2**20)
        self.history, self.grammars = History(tokenizer), Grammars(tokenizer)
        self.store = PrefixStore(config.cache_dir, model_digest(config.model), config.cache_dir_mib * 2**20) \
            if config.cache_dir else None
        self.jobs: dict[str, Job] = {}
        self.served = {"requests": 0, "prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0,
                       "nonfinite": 0, "closed_budget": 0, "closed_loop": 0,
                       "evictions": 0}      # of schedulers before this one
        self.inbox: list[Callable[[], None]] = []
        self.wake = threading.Condition()
        self.accepted = 0                   # jobs in the inbox or in self.jobs
        self.closing: float | None = None   # when the grace period of stop() ends
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)

    @classmethod
    def load(cls, config: EngineConfig) -> "Engine":
        """Open the checkpoint and build the tower: seconds to minutes. Raises ConfigError or CheckpointError."""
        tokenizer = Tokenizer(config.model)
        template = ChatTemplate(config.model, {n: tokenizer.special(n) for n in ("bos_token", "eos_token", "pad_token")},
                                config.template_defaults)
        placed, model = load_tower(config, tokenizer.size)
        return cls(config, model, placed, tokenizer, template)

    def install(self, placed: Placed) -> None:
        """Work with this tower from now on; its pools are empty. Nothing may run."""
        self.placed, self.tower = placed, placed.tower
        self.scheduler = Scheduler(KVPool(placed.pages), self.config.max_seqs, placed.kept,
                                   Pace.of(self.config.prefill_chunk, placed.chunk))

    # ------------------------------------------------------------------ for other threads
    def start(self) -> None:
        self.thread.start()

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Queue a request, or refuse it at once: RequestError, ContextOverflow (admission.py), QueueFull, EngineStopped."""
        limit = admissible(request, self.tokenizer.size, self.max_model_len)
        stop_ids = frozenset(self.model_config.eos_token_id) if request.stop_ids is None else request.stop_ids
        job = Job(request, sink, lambda index: Sequence(request, index, self.tokenizer, stop_ids, limit),
                  Detokenizer(self.tokenizer, specials=True))
        with self.wake:
            if self.closing is not None or not self.thread.is_alive():
                raise EngineStopped("the server is shutting down; send the request again later.")
            if self.accepted >= self.config.max_queue + self.config.max_seqs:
                raise QueueFull(self.accepted - self.config.max_seqs)
            self.accepted += 1
            self.inbox.append(lambda: self.enter(job))
            self.wake.notify()

    def encode(self, stable: str, tail: str) -> tuple[np.ndarray, int | None]:
        """Prompt ids of a rendered conversation, replies of ours as they were generated, and how many of them are `stable`,
        the part that the conversation's next prompt will begin with too (None if no id ends there)."""
        return self.history.encode_parts(stable, tail)

    def cancel(self, request_id: str) -> None:
        """End a request within one step; unknown ids are ignored."""
        with self.wake:
            self.inbox.append(lambda: self.end(request_id, "cancel"))
            self.wake.notify()

    def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new requests, give the running ones `grace_s` seconds, cancel the rest, end the thread."""
        with self.wake:
            self.closing = monotonic() + grace_s
            self.wake.notify()
        if self.thread.is_alive():
            self.thread.join()

    def status(self) -> dict:
        return census.status(self)

    def slots(self) -> dict:
        return census.slots(self)

    # ------------------------------------------------------------------ the engine thread
    def run(self) -> None:
        self.tower.attach()
        self.serve()
        if self.store:
            self.do_chores()
            self.store.keep(self.scheduler.cache, self.tower)

    def serve(self) -> None:
        while self.read_inbox():
            picked = {}
            try:
                picked = self.scheduler.pick()
                if picked:
                    self.run_step(picked)
            except Exception as error:      # a fault in a step must not take the server along: its requests fail
                log.exception("a step failed")
                if not self.speculation.failed(error):
                    failed = [sequence.request.id for sequence in picked] or list(self.jobs)
                    for request_id in failed:
                        self.end(request_id, "error", f"internal error: {error}")

    def run_step(self, picked: dict[Sequence, int]) -> None:
        self.do_chores()
        for sequence in picked:
            clock = self.jobs[sequence.request.id].clock
            clock.started = clock.started or monotonic()
        plan = self.speculation.plan_step(picked, self.scheduler)
        begun = monotonic()
        output = self.tower.forward(plan.step)
        self.scheduler.pace.ran(sum(part.count for part in plan.parts if not part.decodes), monotonic() - begun)
        self.speculation.ran(plan, output)
        self.scheduler.commit(plan)
        self.accept(plan, output)
        self.speculation.finish_round(plan)

    def read_inbox(self) -> bool:
        """Run the notes that other threads left; sleep while there is nothing to do. False when it is time to leave."""
        while True:
            with self.wake:
                while not self.inbox and not self.jobs and self.closing is None:
                    if not self.wake.wait(self.sleeper.patience):
                        self.inbox.append(self.sleeper.doze)
                notes, self.inbox = self.inbox, []
            for note in notes:
                note()
            if self.closing is not None:
                if self.jobs and monotonic() >= self.closing:
                    for name in list(self.jobs):
                        self.end(name, "cancel")
                if not self.jobs:
                    return False
            if self.jobs:
                return True

    def enter(self, job: Job) -> None:
        """The first choice goes in line; the others fork from it when the prompt is read."""
        self.jobs[job.request.id] = job
        try:
            self.sleeper.rouse()
        except Exception as error:
            return self.end(job.request.id, "error", str(error))
        first = job.begin_choice()
        if self.store:
            self.do_chores()                # before anything that they read can be evicted
            self.store.fill(self.scheduler.cache, self.tower, first.reusable())
        self.scheduler.add(first)

    def do_chores(self) -> None:
        """What the scheduler counted, done to the tower's arrays, in order."""
        for chore in self.scheduler.chores:
            if chore.kind == "clear_slot":
                self.tower.clear_slot(chore.target)
            else:
                getattr(self.tower, chore.kind)(chore.source, chore.target)
        self.scheduler.chores.clear()

    def finite(self, job: Job, rows: list[Row]) -> bool:
        """Whether logits are numbers; if not, the request ends here."""
        if all(row.finite for row in rows):
            return True
        self.served["nonfinite"] += 1
        self.end(job.request.id, "error", "the model produced logits that are not finite")
        return False

    def accept(self, plan: Plan, output: Output) -> None:
        """Sample every sequence whose ids are all in the cache now; score prompts; emit what came of it."""
        for part in plan.parts:
            job = self.jobs.get(part.sequence.request.id)
            if job is None:                 # ended earlier in this loop
                continue
            sequence, rows = part.sequence, output.rows(part.outputs)
            if part.tree:
                self.speculation.walk(part, rows, lambda row: self.finite(job, [row])
                                      and self.continue_choice(job, sequence, row))
                self.close_finished(job, sequence)
                continue
            if not self.finite(job, rows):
                continue
            if sequence.index == 0 and part.start < sequence.prompt_tokens:
                score_prompt(job, sequence, part.start, part.count, rows, self.tokenizer.size)
                total, done = sequence.prompt_tokens, min(part.start + part.count, sequence.prompt_tokens)
                job.emit(Progress(done, total, self.scheduler.pace.left_s(total - done)))
            if sequence.pending or sequence.finished:
                continue
            if sequence.limit == 0:
                self.end(sequence.request.id, "length")
            else:
                self.continue_job(job, sequence, rows[-1])

    def continue_job(self, job: Job, sequence: Sequence, row: Row) -> None:
        """The sequence's next token; when its prompt was just read, also the first one of choices that fork from it."""
        forks = []
        if sequence.index == 0 and sequence.generated == 0:
            job.clock.answered = monotonic()
            while len(job.sequences) < job.request.n:
                other = job.begin_choice()
                if self.scheduler.fork(sequence, other):
                    forks.append(other)
                else:
                    self.scheduler.add(other)
        for each in (sequence, *forks):
            self.continue_choice(job, each, row)
            self.close_finished(job, each)

    def continue_choice(self, job: Job, sequence: Sequence, row: Row) -> None:
        try:
            token, count = sequence.sampler.choose(row), sequence.request.logprobs
        except ConstraintFailed as error:
            self.end(job.request.id, "error", str(error))
            return
        logprob, top = None, ()
        if count is not None:
            scores = log_probabilities(row.logits, self.tokenizer.size)
            logprob, top = float(scores[token]), best(scores, count)
        text, record = sequence.append(token, logprob, top)
        self.served["completion_tokens"] += 1
        job.emit(Delta(sequence.index, text, (record,)))

    def close_finished(self, job: Job, sequence: Sequence) -> None:
        if sequence.finished and sequence.slot is not None:     # else it was ended on the way
            self.close_choice(job, sequence)

    # ------------------------------------------------------------------ endings
    def close_choice(self, job: Job, sequence: Sequence, message: str = "") -> None:
        self.speculation.ended(sequence)
        self.scheduler.remove(sequence)
        if sequence.generated:
            self.history.remember(sequence.ids)
        if sequence.closed:
            self.served["closed_" + sequence.closed] += 1
        job.emit(Finish(sequence.index, sequence.finished, message, sequence.matcher.hit, sequence.closed))
        if len(job.sequences) == job.request.n and all(s.finished for s in job.sequences):
            self.close_job(job)

    def end(self, request_id: str, reason: str, message: str = "") -> None:
        """End all unfinished choices of a request, begun or not; it may be over already."""
        job = self.jobs.get(request_id)
        while job and len(job.sequences) < job.request.n:
            job.begin_choice()
        for sequence in job.sequences if job else ():
            if not sequence.finished:
                sequence.finished = reason
                self.close_choice(job, sequence, message)

    def close_job(self, job: Job) -> None:
        del self.jobs[job.request.id]
        with self.wake:
            self.accepted -= 1
        now, clock, first = monotonic(), job.clock, job.sequences[0]
        started = clock.started or now
        answered = clock.answered or now
        self.served["requests"] += 1
        self.served["prompt_tokens"] += first.prompt_tokens
        self.served["cached_tokens"] += first.cached
        job.emit(Done(Usage(
            first.prompt_tokens, sum(s.generated for s in job.sequences), first.cached, started - clock.arrived,
            answered - started, now - answered, self.speculation.report(job.sequences))))
