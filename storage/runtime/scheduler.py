"""Decides which stage of which job runs next, within a budget: a pure state machine.

A *job* is one chunk on its way through an ordered list of *stages* (capture, hash, write; or read,
deliver). A stage runs in a *lane* (``cpu``, ``io``) of limited width; each pipeline names its
lanes. A job holds its bytes of host memory from the start of its first stage to the end of its
last.

Events come in as method calls, instructions go out as return values. There is no I/O here, no
thread, no clock and no asyncio, so a test can play every order of completion. ``executor.py`` is
the shell that executes the instructions. The split follows the worker state machine of Dask's
``distributed``.

Rules, by priority:

1. Nothing starts after a failure. The machine is finished when everything that was running has
   ended.
2. A lane never runs more stages than its width. Memory in use never exceeds the budget, with one
   exception: a job larger than the whole budget runs when no other job holds memory, since it
   could never run otherwise.
3. Jobs are admitted in the order of submission. A job that does not fit holds back the jobs behind
   it, so none starves. A stage with ``in_order`` also begins in the order of submission: a job that
   arrives early waits for the jobs before it, without occupying the lane meanwhile.
4. Among stages that wait for one lane, ``drain=True`` prefers the later stage, which frees memory
   soonest; ``drain=False`` prefers the earlier one, which frees the trainer soonest.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a pipeline: ``memory_nbytes`` of host memory, and each lane's concurrent stages."""

    memory_nbytes: int
    lanes: Mapping[str, int]

    def __post_init__(self) -> None:
        if self.memory_nbytes <= 0 or any(width <= 0 for width in self.lanes.values()):
            raise ValueError(f"every limit of a budget must be positive: {self}")


@dataclass(frozen=True, slots=True)
class StageSpec:
    """The scheduler's view of one stage. ``lane`` names the resource it occupies. With
    ``in_order``, jobs begin the stage in the order of submission, though they may overlap in it."""

    name: str
    lane: str
    in_order: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Start:
    """Begin stage number ``stage`` of ``job``; report its end by ``done`` or ``fail``."""

    job: int
    stage: int


@dataclass(frozen=True, slots=True)
class Release:
    """Instruction to release ``job``, which no longer holds memory."""

    job: int


Instruction = Start | Release


class Scheduler:
    """The state of one pipeline run. Jobs are numbered in the order of submission, from 0."""

    def __init__(self, stages: Sequence[StageSpec], budget: Budget, *, drain: bool = True) -> None:
        if not stages:
            raise ValueError("a pipeline has at least one stage")
        self.stages = tuple(stages)
        self.budget = budget
        self.memory_in_use_nbytes = 0
        self.failed = False
        self._nbytes: list[int] = []
        self._holding: dict[int, int] = {}  # job -> the stage it runs or waits for
        self._running: set[int] = set()
        self._lane_use = dict.fromkeys(budget.lanes, 0)
        self._waiting: list[deque[int]] = [deque() for _ in stages]
        self._turn = [0] * len(stages)  # per stage, the number of jobs that have begun it
        self._order = range(len(stages) - 1, -1, -1) if drain else range(len(stages))

    def waiting(self, stage: int) -> int:
        """Return the number of jobs waiting for their turn in ``stage``."""
        return len(self._waiting[stage])

    def submit(self, nbytes: Sequence[int]) -> list[Instruction]:
        """Add one job per entry of ``nbytes``, of that size."""
        first = len(self._nbytes)
        self._nbytes.extend(nbytes)
        self._waiting[0].extend(range(first, len(self._nbytes)))
        return self._next()

    def done(self, job: int) -> list[Instruction]:
        """Record that the running stage of ``job`` has succeeded."""
        stage = self._end(job)
        if stage + 1 < len(self.stages) and not self.failed:
            self._holding[job] = stage + 1
            self._queue(stage + 1, job)
            return self._next()
        return [self._release(job), *self._next()]

    def fail(self, job: int) -> list[Instruction]:
        """Record that the running stage of ``job`` has failed: nothing starts from now on."""
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
        if self.failed:
            return []
        instructions: list[Instruction] = []
        for stage in self._order:
            while self._waiting[stage] and self._may_start(stage):
                instructions.append(self._start(stage))
        return instructions

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
