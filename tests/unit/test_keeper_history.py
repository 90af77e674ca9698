"""Older steps that keepers retain, and going back to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.kept_runs import keepers_below_a_folder

import holdfast
from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.keeper.decisions.generations import Generations
from holdfast.storage.keeper.decisions.history import level_of, retained
from holdfast.storage.keeper.decisions.slots import Grant
from holdfast.storage.training.epochs import Epochs

SIZE = 100


@pytest.fixture(autouse=True)
def keepers() -> Iterator[None]:
    """End the keepers of each test."""
    with keepers_below_a_folder():
        yield


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
            grant = generations.fill(rank, rank, step, SIZE, ranks)
            assert isinstance(grant, Grant), grant
            if grant.fresh:
                generations.made(grant.slot)
            generations.captured(grant.slot)
            generations.sealed(grant.slot)
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
    levels: dict[GenerationId, int] = {}
    held: set[int] = set()
    for step in range(1, 300):
        id = GenerationId(0, step)
        levels[id] = level_of(step, step - 1 if step > 1 else None, 1)
        marks = retained(levels, id, 3)
        assert len(marks) == 3 or step < 22
        assert {one.step for one in marks} <= held | {step - 1}
        held = {one.step for one in marks}
        levels = {one: of for one, of in levels.items() if one in marks or one == id}


@pytest.mark.parametrize("images", [6, 7, 9, 10])
def test_older_steps_give_way_to_newer_ones_where_memory_is_short(images: int) -> None:
    """Two ranks need six images, of which one of each is spare while steps are agreed at once."""
    held = kept_steps(range(1, 60), ranks=2, images=images, history=2)
    assert held[0] == 59
    assert 56 in held
    assert (48 in held) == (images > 7)


def test_a_resume_goes_back_after_starts_without_a_newer_step() -> None:
    """Each time that as many starts have failed again, it goes back further."""
    epochs = Epochs()
    before: list[int | None] = []
    for number, step in enumerate([None, 6, 6, 6, 4, 6, 6, 2, 9, 9]):
        before.append(epochs.go_back_before(3))
        epochs = Epochs.decode(epochs.with_next(number, step).encode("job"))
    assert before == [None, None, None, None, 6, None, None, 4, None, None]
    assert epochs.with_next(10, 9, again=True).repeats == epochs.repeats


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
            handle = run.step(step, state)
            assert handle is not None
            handle.wait(20)
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
