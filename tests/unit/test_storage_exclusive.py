"""Saves with overwrite=False: they never replace a checkpoint, whenever it appears."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import difference, fresh_uri
from support.copies import BUDGET_NBYTES, NEW, OLD, attempts, loaded, run
from support.drivers import HookedDriver, contents
from support.ranks import as_ranks

import holdfast
from holdfast.drivers.contract import Driver
from holdfast.drivers.memory import MemoryDriver
from holdfast.errors import ExistsError, HoldfastError, SupersededError, UsageError
from holdfast.storage.format.manifest import MANIFEST_KEY
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.ranks.store_team import StoreTeam
from holdfast.storage.ranks.team import Team
from holdfast.storage.state.flattening.flatten import flatten


async def save(driver: Driver, state: Any, *, overwrite: bool = False) -> None:
    """Save by a job of one rank."""
    await run_save(
        driver, Team(), SaveJob(flatten(state), None, BUDGET_NBYTES, overwrite=overwrite)
    )


def accesses() -> list[tuple[str, str]]:
    """Return the operations of an exclusive save, in order."""
    seen: list[tuple[str, str]] = []

    async def note(operation: str, key: str) -> None:
        seen.append((operation, key))

    run(save(HookedDriver(MemoryDriver(), before=note), NEW))
    return seen


ACCESSES = accesses()
COMMIT = ACCESSES.index(("put", MANIFEST_KEY))


@pytest.mark.parametrize("both", [True, False], ids=["both exclusive", "one exclusive"])
@pytest.mark.parametrize("n", range(len(ACCESSES)))
def test_of_overlapping_saves_an_exclusive_one_replaces_nothing(n: int, both: bool) -> None:
    """Another save that commits before any access of an exclusive one stays the checkpoint."""
    storage = MemoryDriver()
    seen = 0
    refused: HoldfastError | None = None

    async def meanwhile(operation: str, key: str) -> None:
        nonlocal seen, refused
        seen += 1
        if seen == n + 1:
            try:
                await save(storage, OLD, overwrite=not both)
            except HoldfastError as error:
                refused = error

    error: HoldfastError | None = None
    try:
        run(save(HookedDriver(storage, before=meanwhile), NEW))
    except HoldfastError as raised:
        error = raised
    assert seen > n
    if n <= COMMIT:
        assert isinstance(error, ExistsError | SupersededError)
        assert refused is None
    else:
        assert error is None
        assert isinstance(refused, ExistsError) == both
    winner = NEW if n > COMMIT and both else OLD
    assert difference(winner, loaded(storage)) is None
    if n < COMMIT:
        assert len(attempts(storage)) == 1


def saved(uri: Path, call: str) -> None:
    """Save with overwrite=False, in one of the ways; return once it is durable."""
    if call == "save":
        holdfast.save(uri, NEW, overwrite=False)
    else:
        holdfast.async_save(uri, NEW, lazy=call == "lazy", overwrite=False).wait()


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
@pytest.mark.parametrize("call", ["save", "async_save", "lazy"])
def test_an_existing_checkpoint_is_an_error_and_stays(
    call: str, damaged: bool, tmp_path: Path
) -> None:
    """Nothing is written or deleted, and the error says what to do; the default replaces it."""
    holdfast.save(tmp_path, OLD)
    if damaged:
        manifest = tmp_path / MANIFEST_KEY
        manifest.write_bytes(manifest.read_bytes()[:-1])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ExistsError, match=r"a checkpoint already exists.*overwrite=True"):
        saved(tmp_path, call)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    holdfast.save(tmp_path, NEW)
    assert difference(NEW, holdfast.load(tmp_path)) is None


def test_leftovers_of_a_dead_save_are_no_checkpoint(tmp_path: Path) -> None:
    """An exclusive save collects them, as any save does."""
    report = holdfast.save(tmp_path, OLD)
    (tmp_path / MANIFEST_KEY).unlink()
    (tmp_path / "data" / report.attempt / "fate").unlink()
    holdfast.save(tmp_path, NEW, overwrite=False)
    assert difference(NEW, holdfast.load(tmp_path)) is None
    assert len(list((tmp_path / "data").iterdir())) == 1


def test_two_saves_of_one_process_go_by_the_order_of_their_calls() -> None:
    """The second one begins after the first, and finds its checkpoint."""
    uri = fresh_uri()
    first = holdfast.async_save(uri, OLD, overwrite=False)
    second = holdfast.async_save(uri, NEW, overwrite=False)
    first.wait()
    with pytest.raises(ExistsError):
        second.wait()
    assert difference(OLD, holdfast.load(uri)) is None


@pytest.mark.parametrize("overwrite", [(False, False), (True, False)])
def test_all_ranks_raise_alike(overwrite: tuple[bool, bool]) -> None:
    """ExistsError on every rank; UsageError if they do not all give the same value."""
    storage = MemoryDriver()
    run(save(storage, OLD))
    before = run(contents(storage))

    async def task(team: StoreTeam) -> Any:
        job = SaveJob(
            flatten({"w": torch.ones(50)}), None, BUDGET_NBYTES, overwrite=overwrite[team.rank]
        )
        return await run_save(storage, team, job)

    for error in as_ranks(2, task):
        if overwrite[0]:
            assert isinstance(error, UsageError)
            assert "rank 1 saves with overwrite=False, rank 0 with True" in str(error)
        else:
            assert isinstance(error, ExistsError)
    assert run(contents(storage)) == before
