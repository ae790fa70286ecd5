"""Speculation: the rounds of an engine that guesses ahead. It never changes what is generated (tree.py says why).

    a round    draft     each decoding choice gets a tree from the drafters, as large as it pays      (treeplan.py)
               verify    the scheduler lays the trees into the step, the tower runs it
               walk      the engine chooses tokens as always, along the rows that hold them           (tree.py)
               keep      the rows walked through are named to the tower with the next step, or by settle()

The draft head's cache is filled as the prompt is read and follows the text with the main model's own hiddens. What goes
wrong in drafting ends drafting for that request, in a step with trees it has the choices computed again, plainly; each says
so in the answer's x_qwentin. A round that takes over HANG seconds is reported and given up (watchdog.py).

Who calls: engine.py. Proven by tests/test_speculation.py: every drafter, shape and mix leaves ids and state as plain
decoding does.
"""
import logging
from collections.abc import Callable

import numpy as np

from .drafter import Draft, Drafter, HeadDrafter, LookupDrafter
from .drafting import Tally
from .kvpool import PAGE
from .request import Speculated
from .scheduler import Part, Plan, Scheduler
from .sequence import Sequence
from .step import Output, Row
from .tree import DraftTree, walk
from .treeplan import Plan as TreePlan, clock_of
from .watchdog import Alarm, where

log = logging.getLogger("qwentin.engine")

HANG = 10.0             # seconds that a round may take, and
HANG_STEPS = 50         # plain steps, if those are slow
MOST_ROWS = 32          # of a tree: what a tower verifies at once
LAG = 16                # rows that the draft head's cache may lack while nothing is drafted


class RoundHung(Exception):
    """The round is over after all, but its requests were given up."""


class Speculation:
    """The drafters of `engine`, their odds and costs. `config` says which of them and how large a tree may get."""

    def __init__(self, engine, config, has_head: bool, plan: TreePlan | None = None):
        self.engine, self.vocabulary = engine, engine.tokenizer.size
        self.plan = plan or TreePlan(config.draft_depth, min(config.draft_guesses, MOST_ROWS - 1))
        self.head = self.lookup = None
        if config.draft in ("auto", "lookup"):
            self.lookup = LookupDrafter(self.plan)
        if has_head and config.draft in ("auto", "head"):
            self.head = HeadDrafter(engine, self.plan, self.vocabulary, config.draft_window)
        self.drafters: list[Drafter] = [d for d in (self.lookup, self.head) if d and config.draft_depth]
        self.alarm = Alarm(self.ring)
        self.tally = Tally()                # of choices that ended
        self.begun = self.verifying = 0.0   # when the round began, and its step
        self.current: Plan | None = None    # of the round
        self.hiddens: np.ndarray | None = None
        self.hang_s = HANG

    def plan_step(self, picked: dict[Sequence, int], scheduler: Scheduler) -> Plan:
        """The step of the picked choices, with a tree where one pays."""
        self.current, self.begun = None, clock_of(self.engine.tower)()
        trees = self.draft(picked, scheduler) if self.drafters else {}
        hidden = self.head is not None and any(self.follows(sequence, count) for sequence, count in picked.items())
        self.current = scheduler.build(picked, trees, hidden)
        self.verifying = clock_of(self.engine.tower)()
        return self.current

    # ------------------------------------------------------------------ draft
    def wants(self, sequence: Sequence) -> bool:
        """Whether anything may be drafted for this choice, now or later."""
        return bool(self.drafters) and not sequence.drafting.off and sequence.limit > 1

    def follows(self, sequence: Sequence, count: int) -> bool:
        """Whether the draft head follows the text so far: not in a prompt's rows that lie before its window."""
        window, end = self.head.window, -(-(sequence.table.length + count) // PAGE) * PAGE
        return self.wants(sequence) and not (window and end + window <= sequence.prompt_tokens)

    def draft(self, picked: dict[Sequence, int], scheduler: Scheduler) -> dict[Sequence, DraftTree]:
        """Trees for those of the picked choices that decode and whom a tree pays; pages are reserved for them."""
        ready = [s for s in picked if s.pending == 1 and s.generated and self.wants(s)]
        drafts = [draft for s in ready if (draft := self.open(s, scheduler))]
        if not drafts or not self.plan.begin(len(drafts)) and not any(d.sequence.drafting.ladder.trial for d in drafts):
            return {}
        self.alarm.begin(max(self.hang_s, HANG_STEPS * self.plan.costs.plain(len(picked))), list(picked))
        try:
            for drafter in self.drafters:
                drafter.extend(drafts)
        except Exception as error:          # no state of the main model was touched: the choices go on plainly
            log.exception("drafting failed")
            for draft in drafts:
                self.turn_off(draft.sequence, f"drafting failed: {error}")
            self.alarm.end()
            return {}
        return self.worthwhile(drafts, len(picked))

    def open(self, sequence: Sequence, scheduler: Scheduler) -> Draft | None:
        """A draft within the ladder's size, the tokens that may still come, the context and the pages; None for none."""
        ladder = sequence.drafting.ladder
        if ladder is None:
            ladder = sequence.drafting.ladder = self.plan.ladder()
        depth, guesses = ladder.size
        length = sequence.table.length
        depth = min(depth, sequence.limit - sequence.generated - 1, self.engine.max_model_len - length - 1)
        guesses = min(guesses, self.engine.max_model_len - length - 1)
        if min(depth, guesses) < 1:
            return None
        guesses = scheduler.make_space(sequence, 1 + guesses) - 1
        return Draft(sequence, min(depth, guesses), guesses) if guesses >= 1 else None

    def worthwhile(self, drafts: list[Draft], sequences: int) -> dict[Sequence, DraftTree]:
        """The trees cut to the rows that pay, and of these all that pay together, the least promising left out first."""
        least = self.plan.least(sequences)
        trees = {d.sequence: d.tree.best(d.guesses, least, d.depth) for d in drafts}
        trees = {s: t for s, t in trees.items() if len(t) > 1}
        for sequence in sorted(trees, key=lambda s: trees[s].expected):
            rows = sequences + sum(len(t) - 1 for t in trees.values())
            expected = sequences + sum(t.expected - 1 for t in trees.values())
            if sequence.drafting.ladder.trial or self.plan.pays(expected, rows, sequences):
                break
            del trees[sequence]
        return trees

    # ------------------------------------------------------------------ after the step
    def ran(self, plan: Plan, output: Output) -> None:
        """The tower ran the step: learn what it cost, keep the hiddens of committed rows, fill the draft head's cache."""
        seconds, self.hiddens = clock_of(self.engine.tower)() - self.verifying, output.hidden
        if self.alarm.end():
            raise RoundHung(f"a round took over {self.alarm.limit:.0f} s")
        if not self.drafters:
            return
        trees = [part for part in plan.parts if part.tree]
        if all(part.decodes for part in plan.parts):
            if trees:
                self.plan.costs.verify.add(plan.step.rows, seconds)
            else:
                self.plan.costs.add_plain(len(plan.parts), seconds)
        for part in plan.parts:
            part.sequence.drafting.tally.plain += part.decodes and not part.tree
        if self.head:
            self.read(plan, output.hidden, output.seeded)

    def read(self, plan: Plan, hidden: np.ndarray | None, seeded: np.ndarray | None) -> None:
        """Take the hiddens of rows that are committed for good; run the draft head where it lags, as far as tokens go."""
        behind, ahead = [], []
        for r, part in enumerate(plan.parts):
            if part.tree or not self.wants(part.sequence):
                continue
            head, end, rows = part.sequence.drafting.head, part.start + part.count, plan.step.span(r)
            if not self.follows(part.sequence, part.count):
                head.skip(part.count)
                continue
            if seeded is not None and seeded[r]:            # by the tower, but for the rows before and the last
                if head.lacks(part.start):
                    behind.append((part.sequence, part.start))
                ahead.append((head, part.count, int(seeded[r]), hidden[rows.stop - 1:rows.stop]))
                continue
            head.push(hidden[rows])
            known = min(end, len(part.sequence.ids) - 1)
            if known > head.seeded and (known == end or known - head.seeded >= LAG):
                behind.append((part.sequence, known))
        try:
            self.head.seed(behind)
        except Exception as error:
            log.exception("the draft head failed")
            for sequence, _ in behind:
                self.turn_off(sequence, f"the draft head failed: {error}")
        for head, *rows in ahead:
            head.feed(*rows)

    def walk(self, part: Part, rows: list[Row], proceed: Callable[[Row], object]) -> None:
        """Choose tokens along the tree of a part; proceed(its row) chooses one as in plain decoding.

        Each row is committed as the walk enters it, so the choice may end at any token."""
        sequence, tree, before = part.sequence, part.tree, len(part.sequence.ids)
        drafting = sequence.drafting
        first = self.current.step.starts[self.current.parts.index(part)]

        def choose(row: int) -> int | None:
            self.engine.scheduler.keep_row(sequence, row)
            if self.hiddens is not None and not drafting.off:
                drafting.head.push(self.hiddens[first + row:first + row + 1])
            proceed(rows[row])
            return None if sequence.finished else sequence.ids[-1]
        path = walk(tree, choose)
        chosen = sequence.ids[before:]
        for row, token in zip(path, chosen):
            for guess, child in tree.children[row].items():
                if tree.origins[child] is not None:
                    self.plan.acceptance.observe(*tree.origins[child], guess == token)
        drafting.tally.count(tree, path)

    def finish_round(self, plan: Plan) -> None:
        """All parts of a step were sampled: was it worth its time?"""
        seconds, self.current = clock_of(self.engine.tower)() - self.begun, None
        if not self.drafters or not all(part.decodes for part in plan.parts):
            return
        self.plan.observe_round(sum(part.given for part in plan.parts), seconds)
        plain = self.plan.costs.plain(len(plan.parts))
        for part in plan.parts:
            drafting = part.sequence.drafting
            if not part.tree:
                if drafting.ladder:
                    drafting.ladder.rest()
            elif plain:
                drafting.ladder.observe(part.given * plain / seconds)

    # ------------------------------------------------------------------ endings
    def settle(self, sequence: Sequence) -> None:
        """Commit the rows of a choice that no further step will name, so that its state can be kept."""
        table, accepted = sequence.table, np.array(sequence.drafting.accepted, np.int32)
        self.engine.tower.commit(sequence.slot, np.array(table.pages, np.int32), table.length - len(accepted), accepted)
        sequence.drafting.accepted = []

    def failed(self, error: Exception) -> bool:
        """A step failed. If it had trees, its choices are computed again and draft no more: True. Otherwise False."""
        plan, self.current = self.current, None
        hung = self.alarm.end() or isinstance(error, RoundHung)
        if hung or plan is None or not any(part.tree for part in plan.parts):
            return False
        for part in plan.parts:
            if part.tree:
                self.turn_off(part.sequence, f"a round failed: {error}")
        self.engine.scheduler.send_back([part.sequence for part in plan.parts])
        return True

    def ring(self, sequences: list[Sequence], limit: float) -> None:
        """A round hangs: called by the alarm's thread. Its requests are answered; the engine learns when it comes back."""
        log.error("a round takes over %.1f s; the engine is here:\n%s", limit, where(self.engine.thread))
        for request_id in {sequence.request.id for sequence in sequences}:
            if job := self.engine.jobs.get(request_id):
                job.abandon(f"internal error: a round took over {limit:.1f} s")

    def ended(self, sequence: Sequence) -> None:
        """A choice ended: its counts go to the engine's."""
        if sequence.drafting.ladder:
            sequence.drafting.tally.events += sequence.drafting.ladder.events
        self.tally.add(sequence.drafting.tally)
        if sequence.finished != "error" and sequence.drafting.accepted and self.engine.scheduler.cache.capacity:
            self.settle(sequence)

    def report(self, sequences: list[Sequence]) -> Speculated | None:
        """What became of a request's guesses; None if nothing guesses here."""
        if not self.drafters:
            return None
        total = Tally()
        for sequence in sequences:
            total.add(sequence.drafting.tally)
        return total.frozen()

    def counts(self) -> dict[str, int]:
        """Of choices that ended, for /metrics."""
        t = self.tally
        return {"draft_rounds": t.rounds, "draft_plain_steps": t.plain, "draft_guesses": t.guesses,
                "draft_accepted": t.accepted, "draft_lookup": t.lookup, "draft_events": t.happened} if self.drafters else {}

    def turn_off(self, sequence: Sequence, why: str) -> None:
        sequence.drafting.off = why
        sequence.drafting.tally.events.append(why)
