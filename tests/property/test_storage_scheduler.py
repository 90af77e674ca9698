"""The scheduler keeps its rules in whatever order stages end, and whatever fails."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.effort import examples

from holdfast.storage.runtime.scheduler import (
    Budget,
    Instruction,
    Release,
    Scheduler,
    StageSpec,
    Start,
)


@dataclass
class World:
    """The history of events, checked against the rules at each step."""

    scheduler: Scheduler
    sizes: list[int] = field(default_factory=list)
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
                assert told.job not in self.running, "a buffer in use is not released"
                self.holding.remove(told.job)
                self.released.append(told.job)
            else:
                self.start(told)

    def start(self, told: Start) -> None:
        assert not self.failed, "nothing starts after a failure"
        assert told.job not in self.running
        assert told.stage == self.next_stage.setdefault(told.job, 0), "stages in order, each once"
        if told.stage == 0:
            self.admitted.append(told.job)
            self.holding.add(told.job)
        assert told.job in self.holding, "a stage runs on memory that the job holds"
        if self.scheduler.stages[told.stage].in_order:
            begun = [job for job, stage in self.next_stage.items() if stage > told.stage]
            assert begun == list(range(told.job)), "begun in the order of submission"
        self.next_stage[told.job] += 1
        self.running[told.job] = told.stage

    def submit(self, sizes: list[int]) -> None:
        self.sizes += sizes
        self.obey(self.scheduler.submit(sizes))

    def end(self, job: int, *, well: bool) -> None:
        self.running.pop(job)
        self.failed = self.failed or not well
        self.obey(self.scheduler.done(job) if well else self.scheduler.fail(job))

    def in_lane(self, lane: str) -> int:
        return sum(self.scheduler.stages[stage].lane == lane for stage in self.running.values())

    def check_budget(self) -> None:
        s = self.scheduler
        in_use = sum(self.sizes[job] for job in self.holding)
        assert s.memory_in_use_nbytes == in_use
        assert in_use <= s.budget.memory_nbytes or len(self.holding) == 1, (
            "an oversize job is alone"
        )
        assert all(self.in_lane(lane) <= width for lane, width in s.budget.lanes.items())
        assert self.admitted == list(range(len(self.admitted))), (
            "jobs are admitted in the order of submission"
        )

    def check_nothing_waits_in_vain(self) -> None:
        """Check that each lane is full, or waits only for memory or for its turn."""
        s = self.scheduler
        if self.failed:
            assert self.holding == set(self.running), "after a failure only what runs holds memory"
            return
        for job in self.holding - set(self.running):
            stage = self.next_stage[job]
            early = s.stages[stage].in_order and any(
                self.next_stage.get(j, 0) <= stage for j in range(job)
            )
            assert (
                early or self.in_lane(s.stages[stage].lane) == s.budget.lanes[s.stages[stage].lane]
            )
        if len(self.admitted) < len(self.sizes):
            in_use, lane = s.memory_in_use_nbytes + self.sizes[len(self.admitted)], s.stages[0].lane
            fits = in_use <= s.budget.memory_nbytes or not self.holding
            assert not fits or self.in_lane(lane) == s.budget.lanes[lane]
        assert self.running or len(self.admitted) == len(self.sizes), (
            "something runs as long as something is left"
        )


LANES = ("cpu", "io", "write")
WIDTHS = st.fixed_dictionaries({lane: st.sampled_from([1, 1, 2, 4]) for lane in LANES})
PART_ORDERS = st.sampled_from(["any", "ascending", "serial"])
SIZES = st.lists(st.integers(0, 12) | st.integers(0, 60), max_size=8)


class Pipeline(RuleBasedStateMachine):
    """Jobs come, and stages end or fail, in any order; a cancellation fails all that run."""

    @initialize(
        lanes=st.lists(st.sampled_from(["cpu", "io"]), max_size=3), order=PART_ORDERS, memory_nbytes=st.sampled_from([1, 20, 60, 200]),
        widths=WIDTHS, drain=st.booleans(), early=st.booleans(), calm=st.none() | st.integers(0, 12), first=st.lists(st.integers(0, 12), max_size=12),
    )  # fmt: skip
    def begin(
        self,
        lanes: list[str],
        order: str,
        memory_nbytes: int,
        widths: dict[str, int],
        drain: bool,
        early: bool,
        calm: int | None,
        first: list[int],
    ) -> None:
        """Draw the stages of savers and copiers; nothing fails before ``calm`` stages ended."""
        write = StageSpec("write", "write" if order == "serial" else "io", in_order=order != "any")
        stages = [
            *(StageSpec(f"s{i}", lane) for i, lane in enumerate(lanes)),
            write,
            *[StageSpec("last", "cpu")] * early,
        ]
        self.left = float("inf") if calm is None else calm
        self.world = World(
            Scheduler(stages, Budget(memory_nbytes, widths | {"write": 1}), drain=drain)
        )
        self.world.submit(first)

    @rule(sizes=SIZES)
    def submit(self, sizes: list[int]) -> None:
        self.world.submit(sizes)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), count=st.integers(1, 4))
    def end_well(self, data: st.DataObject, count: int) -> None:
        """End some stages successfully, one after the other."""
        self.left -= count
        for _ in range(count):
            if self.world.running:
                self.world.end(data.draw(st.sampled_from(sorted(self.world.running))), well=True)
                self.rules_hold()

    @precondition(lambda self: self.left <= 0 and self.world.running)
    @rule(data=st.data())
    def fails(self, data: st.DataObject) -> None:
        self.world.end(data.draw(st.sampled_from(sorted(self.world.running))), well=False)

    @precondition(lambda self: self.left <= 0 and self.world.running)
    @rule(data=st.data())
    def is_cancelled(self, data: st.DataObject) -> None:
        """End all running stages after a failure; some of them still succeed."""
        for job in data.draw(st.permutations(sorted(self.world.running))):
            self.world.end(job, well=self.world.failed and data.draw(st.booleans()))

    @invariant()
    def rules_hold(self) -> None:
        if hasattr(self, "world"):
            self.world.check_budget()
            self.world.check_nothing_waits_in_vain()

    def teardown(self) -> None:
        """Check that everything ran unless a stage failed, and was released once."""
        if not hasattr(self, "world"):
            return
        world, s = self.world, self.world.scheduler
        while world.running:
            world.end(
                min(world.running, key=lambda job: hash((job, len(world.released)))), well=True
            )
            self.rules_hold()
        assert s.memory_in_use_nbytes == 0
        assert sorted(world.released) == world.admitted
        if not world.failed:
            assert world.admitted == list(range(len(world.sizes)))
            assert all(stage == len(s.stages) for stage in world.next_stage.values())


Pipeline.TestCase.settings = examples(60)
TestPipeline = Pipeline.TestCase
TestPipeline.__doc__ = """In no order of events a budget is exceeded, a job starved or stuck, or a buffer freed in use."""


@given(st.booleans(), st.integers(2, 10))
def test_drain_decides_which_stage_goes_first(drain: bool, jobs: int) -> None:
    """With one lane for both stages: drained job by job, or all first stages before any second one."""
    scheduler = Scheduler(
        [StageSpec("a", "cpu"), StageSpec("b", "cpu")], Budget(jobs, {"cpu": 1}), drain=drain
    )
    order = []
    todo = scheduler.submit([1] * jobs)
    while starts := [told for told in todo if isinstance(told, Start)]:
        (told,) = starts
        order.append((told.job, told.stage))
        todo = scheduler.done(told.job)
    by_job = [(job, stage) for job in range(jobs) for stage in (0, 1)]
    assert order == (by_job if drain else sorted(by_job, key=lambda item: item[1]))


def test_a_failure_frees_the_memory_of_jobs_that_wait() -> None:
    """Jobs between stages release their memory; a running one keeps it until it ends."""
    scheduler = Scheduler(
        [StageSpec("a", "io"), StageSpec("b", "cpu")], Budget(9, {"io": 3, "cpu": 1})
    )
    assert scheduler.submit([1, 1, 1]) == [Start(0, 0), Start(1, 0), Start(2, 0)]
    assert scheduler.done(0) == [Start(0, 1)]
    assert scheduler.done(1) == []
    assert scheduler.fail(2) == [Release(2), Release(1)]
    assert scheduler.done(0) == [Release(0)]
    assert scheduler.memory_in_use_nbytes == 0
