"""Stages that a save through a keeper reports, older steps that keepers retain, and runs that go
back to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kept_runs import keep, keepers_below_a_folder

import holdfast
from holdfast.errors import HoldfastError, SaveError, UsageError
from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.arenas.messages import Agreed, Event, Local, Protected, Sealed, Voided
from holdfast.storage.keeper.decisions.generations import Generations
from holdfast.storage.keeper.decisions.history import levels_of, retained
from holdfast.storage.keeper.decisions.slots import Grant
from holdfast.storage.operations.saving.handle import SaveHandle, StageHandle
from holdfast.storage.operations.saving.keeper_request import ByKeeper, Keeping
from holdfast.storage.training.epochs import Epochs

SIZE = 100
ID = GenerationId(0, 7)


@pytest.fixture(autouse=True)
def keepers() -> Iterator[None]:
    """End the keepers of each test."""
    with keepers_below_a_folder():
        yield


class Saved:
    """A save that waits for its stages."""

    def __init__(self, *, local: bool = True, protects: bool = False) -> None:
        self.handle = SaveHandle("a step", agreed=StageHandle("agreed"))
        if local:
            self.handle.local = StageHandle("local")
        if protects:
            self.handle.protected = StageHandle("protected")
        arena: Any = None
        by = ByKeeper(arena, protects=protects, local=local)
        self.keeping = Keeping(by, self.handle, self.handle.sealed.reach)

    @property
    def ended(self) -> dict[str, HoldfastError | None]:
        """The outcome of each stage."""
        ended: dict[str, HoldfastError | None] = {}
        for name in ("sealed", "agreed", "local", "protected"):
            stage: StageHandle = getattr(self.handle, name)
            if stage.status in ("reached", "failed"):
                ended[name] = None
                try:
                    stage.wait(0)
                except HoldfastError as error:
                    ended[name] = error
        return ended

    def hear(self, *events: Event) -> bool:
        """Pass events from the keeper; return whether the save waits for more."""
        return [self.keeping.tell(event) for event in events][-1]


def test_a_step_is_on_storage_of_the_host_once_the_keeper_says_so() -> None:
    """The agreement announces only that the step will be written there."""
    save = Saved()
    assert save.hear(Sealed(1, ID), Agreed(ID, local=True))
    assert "local" not in save.ended
    assert not save.hear(Local(ID))
    assert save.ended == {"sealed": None, "agreed": None, "local": None}


@pytest.mark.parametrize(
    ("event", "said"), [(Local(ID, "the disk is full"), "the disk is full"), (Voided(ID, "x"), "x")]
)
def test_a_step_that_could_not_be_written_there_says_why(event: Event, said: str) -> None:
    """A failed write to local storage reports its reason, or that the keeper is gone."""
    save = Saved()
    save.hear(Sealed(1, ID), Agreed(ID, local=True), event)
    assert isinstance(save.ended["local"], SaveError)
    assert said in str(save.ended["local"])


def test_protection_and_storage_of_the_host_are_waited_for_side_by_side() -> None:
    """A save waits for protection and local storage in any order."""
    save = Saved(protects=True)
    assert save.hear(Sealed(1, ID), Agreed(ID, local=True), Protected(ID))
    assert not save.hear(Local(ID))
    assert set(save.ended.values()) == {None}


def test_a_checkpointer_whose_keeper_writes_to_storage_of_the_host_says_when(
    tmp_path: Path,
) -> None:
    """Steps that are not due there say so, and so do saves without a keeper."""
    state = {"w": torch.arange(8)}
    keeper = holdfast.Keeper(
        local=tmp_path / "nvme", local_every=2, memory="64MiB", linger="60s", deadline_s=60
    )
    with holdfast.Checkpointer(tmp_path / "run", every=None, keeper=keeper) as run_:
        run_.resume(state)
        first = keep(run_, 1, state)
        second = keep(run_, 2, state)
        second.local.wait(60)
        assert "local reached" in repr(second)
        with pytest.raises(UsageError, match="is not written to the host's storage"):
            first.local.wait(60)
        assert first.local.done()
        (kept,) = (tmp_path / "nvme").iterdir()
        assert [path.name for path in kept.iterdir()] == ["0-2"]
    handle = holdfast.async_save(tmp_path / "c", state)
    with pytest.raises(UsageError, match="the host's storage"):
        handle.local.wait()
    with pytest.raises(UsageError, match="does not use a keeper"):
        handle.agreed.wait(1)
    handle.wait()


# Older steps.


def captured(
    generations: Generations,
    client: int,
    rank: int,
    step: int,
    ranks: int = 1,
    *,
    slots_max: int | None = None,
) -> bool:
    """Capture an image of a rank. Return False if the system has no memory for another slot."""
    grant = generations.fill(client, rank, step, SIZE, ranks)
    assert isinstance(grant, Grant), grant
    if grant.fresh and slots_max is not None and len(generations.slots) > slots_max:
        generations.unmade(grant.slot)
        return False
    if grant.fresh:
        generations.made(grant.slot)
    generations.captured(grant.slot)
    generations.sealed(grant.slot)
    return True


def kept_steps(steps: range, ranks: int, images: int, history: int) -> list[int]:
    """Return the steps that all ranks of a host can restore, newest first, after they have captured
    ``steps``. ``images``: how many fit in memory."""
    generations = Generations(images * SIZE)
    generations.history = history
    generations.every = steps.step
    for rank in range(ranks):
        assert generations.enter(rank, rank, 0, None) is None
    for step in steps:
        for rank in range(ranks):
            assert captured(generations, rank, rank, step, ranks)
        assert generations.agreed(GenerationId(0, step))
    return [
        held.generation.step
        for held in generations.restorable()
        if held.agreed and len(held.ranks) == ranks
    ]


@pytest.mark.parametrize("every", [1, 5])
def test_distances_between_older_steps_widen(every: int) -> None:
    """The spans are counted in kept steps, whatever their distance."""
    steps = range(0, 200 * every, every)
    held = kept_steps(steps, ranks=2, images=100, history=3)
    assert [step // every for step in held] == [199, 198, 197, 196, 192, 128]


def test_an_older_step_stays_until_a_wider_span_ends() -> None:
    """Without that, a level would have nothing to retain when the next span begins."""
    held: list[GenerationId] = []
    for step in range(1, 300):
        held.append(GenerationId(0, step))
        marks = retained(levels_of(held, 1), held[-1], 3)
        assert len(marks) == 3 or step < 22
        if step >= 256:
            assert [one.step for one in marks[1:]] == expected_marks(step)
        held = [*sorted(marks), held[-1]]


def expected_marks(step: int) -> list[int]:
    """Return the marks of the levels 2 and 3 if no step was ever dropped."""
    below = (step - 1) // 4 * 4
    second = (below - 1) // 16 * 16
    return [second, (second - 1) // 64 * 64]


@pytest.mark.parametrize("images", [6, 7, 9, 10])
def test_older_steps_give_way_to_newer_ones_where_memory_is_short(images: int) -> None:
    """Two ranks need six images, of which one of each is spare while steps are agreed at once."""
    held = kept_steps(range(1, 60), ranks=2, images=images, history=2)
    assert held[0] == 59
    assert 56 in held
    assert (48 in held) == (images > 7)


def test_the_history_leaves_memory_that_the_system_lacks() -> None:
    """If the system cannot give the memory that the budget allows, there is no history."""
    generations = Generations(100 * SIZE)
    generations.history = 3
    assert generations.enter(1, 0, 0, None) is None
    kept = 0
    for step in range(20):
        if captured(generations, 1, 0, step, slots_max=3):
            kept += generations.agreed(GenerationId(0, step))
    assert kept == 19


def test_a_history_outlives_its_keeper() -> None:
    """The next keeper knows only that the generations were agreed."""
    generations = Generations(100 * SIZE)
    generations.history = 2
    for step in (48, 56, 58, 59):
        assert isinstance(generations.recall(GenerationId(0, step), 0, 1, SIZE), int)
        generations.was_agreed(GenerationId(0, step))
    assert generations.enter(1, 0, 1, 59) is None
    for step in range(60, 64):
        assert captured(generations, 1, 0, step)
        assert generations.agreed(GenerationId(1, step))
    held = {one.generation.step for one in generations.restorable()}
    assert {63, 60, 48} <= held


def test_a_resume_goes_back_after_starts_without_a_newer_step() -> None:
    """It goes back further each time that as many starts have failed again."""
    epochs = Epochs()
    before: list[int | None] = []
    for number, step in enumerate([None, 6, 6, 6, 4, 6, 6, 2, 9, 9]):
        before.append(epochs.go_back_before(3))
        epochs = Epochs.decode(epochs.with_next(number, step).encode("job"))
    assert before == [None, None, None, None, 6, None, None, 4, None, None]
    assert epochs.with_next(10, 9, again=True).repeats == epochs.repeats
    assert epochs.with_next(10, 5, asked=True).with_next(11, 7).go_back_before(1) == 7


def train(uri: Path, until: int, **options: int) -> tuple[int | None, str]:
    """Train to a step that is kept in memory only. Return the step that it began at, and the
    problem of the resume."""
    state = {"w": torch.zeros(1000)}
    keeper = holdfast.Keeper(linger="60s", history=2, **options)
    with holdfast.Checkpointer(uri, every=None, keeper=keeper, grace_s=None) as run:
        begun = run.resume(state)
        assert run.resumed is not None
        assert state["w"][0] == begun
        for step in range(begun + 1, until + 1):
            state["w"] += 1
            keep(run, step, state)
        return run.resumed.step, run.resumed.problem


def test_a_job_that_fails_at_one_step_again_and_again_goes_back(tmp_path: Path) -> None:
    """It trains again from an older step in memory, and says so."""
    assert train(tmp_path, 7) == (None, "")
    for _ in range(2):
        assert train(tmp_path, 7, goes_back_after=2) == (7, "")
    step, problem = train(tmp_path, 12, goes_back_after=2)
    assert step == 6
    assert "one before step 7" in problem
    assert train(tmp_path, 12, goes_back_after=2) == (12, "")
