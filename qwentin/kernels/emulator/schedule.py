"""Which threads run next: convergence, barriers, waits and deadlock.

While all living threads are at one block of code they run together, at no cost. When a branch splits them, each has a
block number of its own, and the lowest runs first (see blocks.py for why that reconverges a warp). bar.sync parks
threads until their barrier is full; a failed mbarrier test parks them until an mbarrier changes, a second look at global
memory that nobody wrote to since the first until somebody writes, or nobody else can go on.

A seed shuffles: warps are dealt into cohorts, anew at every barrier, and one cohort runs as far as it can before the
next. What a missing barrier leaves to chance then also comes out different.
"""
import numpy as np

from .blocks import BRANCH, EXIT, JUMP
from .errors import Fault
from .operands import Sink
from .spaces import WARP, WARPGROUP

DONE = 1 << 30
BARRIERS = 16                         # that a block has
COHORTS = 3
PATIENCE = 64                         # rounds of failed tests with no event in between: a deadlock
REDEAL = 512                          # turns until cohorts are dealt anew, barrier or not
FAIRNESS = 64                         # every so many turns, those that have waited longest go first


class Scheduler:
    """Runs one group to its end. limit: blocks of code executed before it counts as stuck."""

    def __init__(self, group, seed, limit):
        self.group, self.program, self.threads, self.order = group, group.program, group.threads, group.order
        self.blocks, self.limit, self.steps, self.turn = group.program.blocks, limit, 0, 0
        self.rng = None if seed is None else np.random.default_rng(seed)
        n = self.threads.count
        self.at = np.zeros(n, int)                                       # [threads] block number, or DONE
        self.waiting, self.barrier_id = np.zeros(n, bool), np.zeros(n, int)
        self.barrier_count, self.barrier_block = np.zeros(n, int), np.zeros(n, int)
        self.arrived = {}                                                # (block, id) -> threads of bar.arrive
        self.predicates = np.zeros(n, bool)                              # operands of bar.red
        self.unit = self.threads.index // (WARPGROUP if self.program.warpgroups else WARP)
        self.ran = np.zeros(self.unit[-1] + 1, int)                      # [units] when it last had a turn
        self.events = self.rounds = 0
        self.polled, self.looked_at = np.zeros(n, bool), np.full((n, 2), -1)     # parked; last look: block, memory's writes
        self.exits = [i for i, b in enumerate(self.blocks) if b.kind == EXIT and not b.code]
        self.cohort = np.zeros(n, int)
        self.deal()

    def deal(self):
        if self.rng is not None:
            self.cohort = self.rng.integers(0, COHORTS, len(self.ran))[self.unit]

    def run(self):
        if self.threads.real is not None:
            self.at[~self.threads.real] = DONE
        number = 0
        while number is not None:
            if self.rng is not None or not self.together(number):
                number = self.apart()
            else:
                number = None
        if left := self.group.copies.unfinished():
            raise Fault(f"the kernel ends with {left[0]} [{self.threads.name(left[1])}]")

    def count_step(self, number):
        self.steps += 1
        if self.steps > self.limit:
            last = self.blocks[number].last or (self.blocks[number].code or [None])[-1]
            raise Fault(f"stuck: {self.limit} blocks of code were executed; still running [group of blocks "
                        f"{self.threads.ids[0]} ..]", last.text if last else "", last.place if last else "")

    # ---- all threads at one block
    def together(self, number):
        """Run from block `number` until the kernel ends (True) or the threads part (False; `at` is then set)."""
        group, registers, live = self.group, self.group.registers, self.threads.live
        alive = self.threads.count if live is None else int(np.count_nonzero(live))
        while True:
            block = self.blocks[number]
            result = self.program.function(number, False)(group, registers, live)
            self.count_step(number)
            if block.kind == JUMP:
                number = block.next
            elif block.kind == BRANCH:
                yes = int(np.count_nonzero(result if live is None else result & live))
                if yes not in (0, alive):
                    self.set_at(np.where(result, block.taken, block.next))
                    return False
                number = block.taken if yes else block.next
            elif block.kind == EXIT:
                return True
            elif result[1] is None and result[2] is None and isinstance(result[0], int) and result[0] < BARRIERS:
                self.order.whole_block()
                number = block.next
            else:
                self.set_at(number)
                self.arrive(self.threads.active(None), number, result)
                return False
            if group.mbarriers is not None and group.mbarriers.stalled.any():
                self.set_at(number)
                return False

    def set_at(self, where):
        self.at = np.where(self.at == DONE, DONE, where)

    # ---- threads at different blocks
    def apart(self):
        """Run until all living threads meet (-> their block) or have left (-> None)."""
        self.take_exits()
        while (self.at != DONE).any():
            ready = self.ready()
            number, mask = self.choose(ready)
            if self.rng is None and (mask == (self.at != DONE)).all():
                return number
            self.turn += 1
            self.ran[self.unit[mask]] = self.turn
            self.run_block(number, mask)
        return None

    def choose(self, ready):
        """(block, mask) of the next turn."""
        if self.rng is not None:
            if self.turn % REDEAL == 0:                                  # a cohort may be waiting for another
                self.deal()
            ready = ready & (self.cohort == self.cohort[ready].min())
        elif self.turn % FAIRNESS == FAIRNESS - 1:                       # nobody waits for ever
            units = np.unique(self.unit[ready])
            ready = ready & (self.unit == units[self.ran[units].argmin()])
        number = int(self.at[ready].min())
        return number, ready & (self.at == number)

    def ready(self):
        """Who can run; nobody being able to is a deadlock."""
        blocked = self.waiting | (self.at == DONE)
        if blocked.all():
            self.deadlock()
        mbarriers, writes = self.group.mbarriers, self.group.access.writes
        stalled = self.polled if mbarriers is None else self.polled | mbarriers.stalled
        if not stalled.any():
            return ~blocked
        events = writes if mbarriers is None else writes + mbarriers.events
        if events == self.events and not (blocked | stalled).all():
            return ~(blocked | stalled)
        if events != self.events:
            self.events, self.rounds = events, 0
        elif not self.polled.any():                                      # a poll may be one of a counted number
            self.rounds += 1
            if self.rounds > PATIENCE:
                self.deadlock()
        self.polled[:] = False
        if mbarriers is not None:
            mbarriers.stalled[:] = False
        return ~blocked

    def look(self, number, mask):
        """Threads read global memory for what others write: park those that looked and would see the same again."""
        now = number, self.group.access.writes
        self.polled |= mask & (self.looked_at == now).all(1)
        self.looked_at[mask] = now

    def run_block(self, number, mask):
        block = self.blocks[number]
        if number in self.program.polls:
            self.look(number, mask)
        result = self.program.function(number, True)(self.group, self.group.registers, mask)
        self.count_step(number)
        if block.kind in (BRANCH, JUMP):
            self.at[mask] = np.where(result[mask], block.taken, block.next) if block.kind == BRANCH else block.next
            self.take_exits()
        elif block.kind == EXIT:
            self.leave(mask)
        else:
            self.arrive(mask, number, result)

    def take_exits(self):
        """Threads at a bare `ret` leave at once: nobody must wait for them."""
        for number in self.exits:
            if (gone := (self.at == number) & ~self.waiting).any():
                self.leave(gone)

    def leave(self, mask):
        """Threads have left: nobody waits for them, but a barrier must not lose part of a warp that stands at it."""
        self.at[mask] = DONE
        self.threads.live = self.at != DONE
        if self.waiting.any():
            split = self.waiting & self.threads.any_warp(mask)[self.threads.warp]
            for thread in np.flatnonzero(split):
                if self.is_aligned(thread):
                    self.diverged(thread)
            self.release()

    # ---- barriers
    def arrive(self, mask, number, result):
        """Threads reach the barrier at the end of block `number`."""
        full = lambda x: np.broadcast_to(0 if x is None else x, mask.shape)
        barrier, count, predicate = full(result[0]), full(result[1]), result[2]
        block = self.blocks[number]
        self.at[mask], self.barrier_block[mask] = block.next, number
        first = int(np.flatnonzero(mask)[0])
        if not 0 <= barrier[first] < BARRIERS or count[first] % WARP:
            self.fault(f"barrier {barrier[first]} gathering {count[first]} threads, wanted one of {BARRIERS} barriers "
                       f"and a multiple of {WARP}", first)
        if "arrive" in block.last.mods:
            for b in np.unique(self.threads.block[mask]).tolist():
                here = np.flatnonzero(mask & (self.threads.block == b))
                for i in np.unique(barrier[here]).tolist():
                    self.arrived.setdefault((b, i), []).extend(here[barrier[here] == i].tolist())
        else:
            self.waiting |= mask
            self.barrier_id[mask], self.barrier_count[mask] = barrier[mask], count[mask]
            if predicate is not None:
                self.predicates[mask] = predicate[mask]
        self.release()

    def release(self):
        """Let go of every barrier that is full."""
        for b in np.unique(self.threads.block[self.waiting]).tolist():
            mine = slice(b * self.threads.per, (b + 1) * self.threads.per)
            for i in np.unique(self.barrier_id[mine][self.waiting[mine]]).tolist():
                here = b * self.threads.per + np.flatnonzero(self.waiting[mine] & (self.barrier_id[mine] == i))
                others = np.array(self.arrived.get((b, i), []), int)
                alive = np.flatnonzero(self.at[mine] != DONE) + b * self.threads.per
                count = int(self.barrier_count[here].max())
                come = (WARP * len(np.unique(self.threads.warp[np.concatenate([here, others])])) if count
                        else len(here))
                if count and come > count:
                    self.fault(f"{come} threads at barrier {i}, which gathers {count}", here[0])
                if come < (count or len(alive)):
                    continue
                self.check_aligned(here)
                self.arrived.pop((b, i), None)
                self.pass_barrier(here, others, len(here) + len(others) == len(alive) and not len(others))

    def pass_barrier(self, here, others, whole):
        """All that a full barrier does: order, a reduction's result, and the threads go on."""
        if whole:
            mask = np.zeros(self.threads.count, bool)
            mask[here] = True
            self.order.whole_block(mask)
        else:
            self.order.meeting(np.concatenate([here, others]), here)
        for number in np.unique(self.barrier_block[here]).tolist():
            ins = self.blocks[number].last
            if "red" in ins.mods and not isinstance(ins.args[0], Sink):
                yes = self.predicates[here]
                value = yes.sum() if "popc" in ins.mods else yes.all() if "and" in ins.mods else yes.any()
                register = self.group.registers[ins.args[0].index].copy()
                register[here[self.barrier_block[here] == number]] = value
                self.group.registers[ins.args[0].index] = register
        self.waiting[here] = False
        self.deal()

    def is_aligned(self, thread):
        """bar.sync is barrier.sync.aligned: a warp comes to it whole, and at one place."""
        ins = self.blocks[int(self.barrier_block[thread])].last
        return ins.base == "bar" or "aligned" in ins.mods

    def check_aligned(self, here):
        for warp in np.unique(self.threads.warp[here]):
            first = int(here[self.threads.warp[here] == warp][0])
            lanes = slice(warp * WARP, (warp + 1) * WARP)
            alive = self.at[lanes] != DONE
            together = self.waiting[lanes] & (self.barrier_block[lanes] == self.barrier_block[first])
            if self.is_aligned(first) and not together[alive].all():
                self.diverged(first)

    # ---- what can be wrong
    def diverged(self, thread):
        self.fault("divergent barrier: some lanes of the warp are here, others are elsewhere", thread)

    def fault(self, message, thread):
        ins = self.blocks[int(self.barrier_block[thread])].last
        raise Fault(f"{message} [{self.threads.name(int(thread))}]", ins.text, ins.place)

    def deadlock(self):
        """Say what the first of the stuck threads waits for."""
        mbarriers = self.group.mbarriers
        if mbarriers is not None and mbarriers.stalled.any():
            thread = int(np.flatnonzero(mbarriers.stalled)[0])
            self.group.fault(int(mbarriers.tested[thread]), "deadlock: waits for an mbarrier phase that never "
                             f"completes ({mbarriers.describe(thread)})", thread)
        thread = int(np.flatnonzero(self.waiting)[0])
        same = self.waiting & (self.barrier_id == self.barrier_id[thread])
        here = int(np.count_nonzero(same & (self.threads.block == self.threads.block[thread])))
        gathers = f", which gathers {self.barrier_count[thread]}" if self.barrier_count[thread] else ""
        self.fault(f"deadlock: {here} threads wait at barrier {self.barrier_id[thread]}{gathers}, and nobody else will "
                   f"come", thread)
