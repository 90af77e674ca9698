"""Which step of which job runs next, within budgets: a pure state machine.

A *job* is one chunk on its way through an ordered list of *stages* (capture, hash, write; or read,
scatter). A stage runs in a *lane* (``cpu``, ``io``) of limited width. A job holds its bytes of host
memory from the start of its first stage to the end of its last.

Events come in as method calls, instructions go out as return values. No I/O, no threads, no clock,
no asyncio: every order of completion can be played in a test. ``executor.py`` is the shell that
performs what is said here.

Rules, in this order:

1. Nothing starts after a failure; the machine is finished when what was running has ended.
2. A lane never runs more than its width; memory in use never exceeds the budget, except that one
   job larger than the whole budget runs when nothing else holds memory (so nothing deadlocks).
3. Jobs are admitted in the order of submission. A job that does not fit holds back those behind it
   (none starves). So is a stage that is ``in_order`` begun: a job that is early waits, without a
   place in the lane, for those before it.
4. Between stages waiting for one lane, ``drain=True`` prefers the later stage (memory is freed
   soonest), ``drain=False`` the earlier one (the trainer is freed soonest).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Budget", "Instruction", "Release", "Scheduler", "Stage", "Start"]


@dataclass(frozen=True, slots=True)
class Budget:
    """What a pipeline may use: ``memory_nbytes`` of host memory, and per lane so many stages at a
    time."""

    memory_nbytes: int
    lanes: Mapping[str, int]

    def __post_init__(self) -> None:
        if self.memory_nbytes <= 0 or any(width <= 0 for width in self.lanes.values()):
            raise ValueError(f"a budget must allow something: {self}")


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of every job; ``lane`` names the resource that it occupies. ``in_order``: jobs begin
    it in the order of submission, though they may overlap in it."""

    name: str
    lane: str
    in_order: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Begin stage ``stage`` (an index) of ``job``; report its end with ``done`` or ``failed``."""

    job: int
    stage: int


@dataclass(frozen=True, slots=True)
class Release:
    """``job`` holds no memory any more."""

    job: int


Instruction = Start | Release


class Scheduler:
    """The state of one pipeline run. Jobs are numbered in the order of submission, from 0."""

    def __init__(self, stages: Sequence[Stage], budget: Budget, *, drain: bool = True) -> None:
        if not stages:
            raise ValueError("a pipeline has at least one stage")
        self.stages = tuple(stages)
        self.budget = budget
        self.memory_in_use_nbytes = 0
        self.failed = False
        self._nbytes: list[int] = []
        self._holding: dict[int, int] = {}  # job -> the stage that it runs, or waits for
        self._running: set[int] = set()
        self._lane_use = dict.fromkeys(budget.lanes, 0)
        self._waiting: list[deque[int]] = [deque() for _ in stages]
        self._turn = [0] * len(stages)  # per stage, how many jobs have begun it
        self._order = range(len(stages) - 1, -1, -1) if drain else range(len(stages))

    @property
    def finished(self) -> bool:
        """Nothing runs, and nothing can start without another event."""
        return not self._running and (self.failed or not any(self._waiting))

    def submit(self, nbytes: Sequence[int]) -> list[Instruction]:
        """Add one job per entry, of that many bytes each."""
        first = len(self._nbytes)
        self._nbytes.extend(nbytes)
        self._waiting[0].extend(range(first, len(self._nbytes)))
        return self._next()

    def done(self, job: int) -> list[Instruction]:
        """The stage that ``job`` was running has ended well."""
        stage = self._end(job)
        if stage + 1 < len(self.stages) and not self.failed:
            self._holding[job] = stage + 1
            self._queue(stage + 1, job)
            return self._next()
        return [self._release(job), *self._next()]

    def fail(self, job: int) -> list[Instruction]:
        """The stage that ``job`` was running has failed: nothing new starts."""
        self._end(job)
        self.failed = True
        waiting = [j for stage in self._waiting[1:] for j in stage]
        for queue in self._waiting:
            queue.clear()
        return [self._release(j) for j in (job, *waiting)]

    def _queue(self, stage: int, job: int) -> None:
        if self.stages[stage].in_order:
            insort(self._waiting[stage], job)
        else:
            self._waiting[stage].append(job)

    def _end(self, job: int) -> int:
        self._running.remove(job)
        stage = self._holding[job]
        self._lane_use[self.stages[stage].lane] -= 1
        return stage

    def _release(self, job: int) -> Release:
        del self._holding[job]
        self.memory_in_use_nbytes -= self._nbytes[job]
        return Release(job)

    def _next(self) -> list[Instruction]:
        out: list[Instruction] = []
        if not self.failed:
            for stage in self._order:
                while self._waiting[stage] and self._may_start(stage):
                    out.append(self._start(stage))
        return out

    def _may_start(self, stage: int) -> bool:
        lane = self.stages[stage].lane
        if self._lane_use[lane] >= self.budget.lanes[lane]:
            return False
        if self.stages[stage].in_order and self._waiting[stage][0] != self._turn[stage]:
            return False
        if stage > 0:
            return True
        needed = self.memory_in_use_nbytes + self._nbytes[self._waiting[0][0]]
        return needed <= self.budget.memory_nbytes or not self._holding

    def _start(self, stage: int) -> Start:
        job = self._waiting[stage].popleft()
        self._turn[stage] += 1
        if stage == 0:
            self.memory_in_use_nbytes += self._nbytes[job]
        self._holding[job] = stage
        self._running.add(job)
        self._lane_use[self.stages[stage].lane] += 1
        return Start(job, stage)
