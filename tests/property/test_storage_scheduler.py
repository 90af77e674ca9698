"""The scheduler keeps its rules in whatever order stages end, and whatever fails."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.storage.scheduler import Budget, Instruction, Release, Scheduler, Stage, Start


@dataclass
class World:
    """Everything that has happened, checked against the rules at each step."""

    scheduler: Scheduler
    sizes: list[int]
    running: dict[int, int] = field(default_factory=dict)
    """job -> stage"""
    holding: set[int] = field(default_factory=set)
    released: list[int] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    next_stage: dict[int, int] = field(default_factory=dict)
    failed: bool = False

    def obey(self, instructions: list[Instruction]) -> None:
        for told in instructions:
            if isinstance(told, Release):
                assert told.job in self.holding
                assert told.job not in self.running
                self.holding.remove(told.job)
                self.released.append(told.job)
            else:
                self.start(told)
        self.check()

    def start(self, told: Start) -> None:
        assert not self.failed, "nothing starts after a failure"
        assert told.job not in self.running
        assert told.stage == self.next_stage.setdefault(told.job, 0), "stages in order, each once"
        if told.stage == 0:
            self.admitted.append(told.job)
            self.holding.add(told.job)
        if self.scheduler.stages[told.stage].in_order:
            begun = [job for job, stage in self.next_stage.items() if stage > told.stage]
            assert all(job < told.job for job in begun), "begun in the order of submission"
        self.next_stage[told.job] += 1
        self.running[told.job] = told.stage

    def check(self) -> None:
        s = self.scheduler
        in_use = sum(self.sizes[job] for job in self.holding)
        assert s.memory_in_use_nbytes == in_use
        assert in_use <= s.budget.memory_nbytes or len(self.holding) == 1, "an oversize job is alone"
        lanes = [s.stages[stage].lane for stage in self.running.values()]
        assert all(lanes.count(lane) <= width for lane, width in s.budget.lanes.items())
        assert self.admitted == sorted(self.admitted), "jobs are admitted in the order of submission"
        assert s.finished == (not self.running and (self.failed or len(self.admitted) == len(self.sizes)))

    def end(self, job: int, *, well: bool) -> None:
        self.running.pop(job)
        self.failed = self.failed or not well
        self.obey(self.scheduler.done(job) if well else self.scheduler.fail(job))


LANES = ("cpu", "io")


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A scheduler and sizes, some of them larger than the whole budget."""
    stages = [Stage(f"s{i}", draw(st.sampled_from(LANES)), draw(st.booleans())) for i in range(draw(st.integers(1, 4)))]
    budget = Budget(draw(st.integers(1, 40)), {lane: draw(st.integers(1, 4)) for lane in LANES})
    sizes = draw(st.lists(st.integers(0, 60), max_size=25))
    return World(Scheduler(stages, budget, drain=draw(st.booleans())), sizes)


def submit(world: World, data: st.DataObject) -> None:
    """Everything at once, or in two parts."""
    sizes, world.sizes = world.sizes, []
    cut = data.draw(st.integers(0, len(sizes)), label="submitted at first")
    for part in (sizes[:cut], sizes[cut:]):
        world.sizes = world.sizes + part
        world.obey(world.scheduler.submit(part))


@given(worlds(), st.data())
def test_every_job_runs_through_every_stage_in_any_order_of_completion(world: World, data: st.DataObject) -> None:
    """It finishes, no job starves, memory and lanes stay within bounds, and each job is released exactly once."""
    submit(world, data)
    while world.running:
        world.end(data.draw(st.sampled_from(sorted(world.running)), label="ends"), well=True)
    assert world.scheduler.finished
    assert sorted(world.released) == list(range(len(world.sizes)))
    assert all(stage == len(world.scheduler.stages) for stage in world.next_stage.values())
    assert world.scheduler.memory_in_use_nbytes == 0


@given(worlds(), st.data())
def test_after_a_failure_nothing_starts_and_everything_is_released(world: World, data: st.DataObject) -> None:
    """What runs may end well or badly; each job that was admitted is released exactly once, the others never."""
    submit(world, data)
    steps = data.draw(st.integers(0, 60), label="ends before the failure")
    while world.running:
        job = data.draw(st.sampled_from(sorted(world.running)), label="ends")
        steps -= 1
        world.end(job, well=data.draw(st.booleans(), label="well") if world.failed else steps > 0)
    assert world.scheduler.finished
    assert sorted(world.released) == sorted(world.admitted)
    assert world.scheduler.memory_in_use_nbytes == 0
    if world.failed:
        assert world.scheduler.submit([1, 1]) == []
        assert world.scheduler.finished


@given(worlds(), st.data())
def test_nothing_that_could_start_is_held_back(world: World, data: st.DataObject) -> None:
    """Whenever the machine waits, each lane is full, or has nothing to do but what memory does not allow."""
    submit(world, data)
    s = world.scheduler
    while world.running:
        lanes = [s.stages[stage].lane for stage in world.running.values()]
        for job in world.holding - set(world.running):
            stage = world.next_stage[job]
            lane = s.stages[stage].lane
            if s.stages[stage].in_order and any(world.next_stage.get(j, 0) <= stage for j in range(job)):
                continue  # it is not its turn
            assert lanes.count(lane) == s.budget.lanes[lane], "a waiting stage in a lane that has room"
        if len(world.admitted) < len(world.sizes):
            lane, needed = s.stages[0].lane, world.sizes[len(world.admitted)]
            in_use = s.memory_in_use_nbytes
            fits = in_use + needed <= s.budget.memory_nbytes or not world.holding
            assert not fits or lanes.count(lane) == s.budget.lanes[lane], "a job that fits, and a lane that has room"
        world.end(data.draw(st.sampled_from(sorted(world.running))), well=True)


@given(st.booleans(), st.integers(2, 10))
def test_drain_decides_which_stage_goes_first(drain: bool, jobs: int) -> None:
    """With one lane for both stages: drained job by job, or all first stages before any second one."""
    scheduler = Scheduler([Stage("a", "cpu"), Stage("b", "cpu")], Budget(jobs, {"cpu": 1}), drain=drain)
    order = []
    todo = scheduler.submit([1] * jobs)
    while starts := [told for told in todo if isinstance(told, Start)]:
        (told,) = starts
        order.append((told.job, told.stage))
        todo = scheduler.done(told.job)
    by_job = [(job, stage) for job in range(jobs) for stage in (0, 1)]
    assert order == (by_job if drain else sorted(by_job, key=lambda item: item[1]))


def test_an_oversize_job_runs_alone_and_holds_back_those_behind_it() -> None:
    """It is admitted when nothing else holds memory; what would fit beside it does not overtake it."""
    scheduler = Scheduler([Stage("a", "io")], Budget(10, {"io": 9}))
    assert scheduler.submit([4, 100, 1]) == [Start(0, 0)]
    assert scheduler.done(0) == [Release(0), Start(1, 0)]
    assert scheduler.done(1) == [Release(1), Start(2, 0)]


def test_nonsense_is_refused() -> None:
    """A pipeline without stages, and budgets that allow nothing."""
    with pytest.raises(ValueError, match="stage"):
        Scheduler([], Budget(1, {}))
    for memory_nbytes, width in ((0, 1), (-1, 1), (1, 0)):
        with pytest.raises(ValueError, match="allow"):
            Budget(memory_nbytes, {"io": width})
