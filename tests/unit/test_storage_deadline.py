"""``timeout_s`` of saves, and how long the latency of the storage delays a trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.bits import fresh_uri
from support.clock import run_virtual
from support.drivers import Halting, HookedDriver, storage_at
from support.flaky import Flaky
from support.given import Serve
from support.inside import clean_up_within
from support.ranks import BUDGET_NBYTES, as_ranks, succeeded

import holdfast
from holdfast.drivers.memory import STORES, MemoryDriver
from holdfast.errors import DeadlineError, StorageDownError, UsageError
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.operations.saving.save_job import Deadline
from holdfast.storage.pipeline.image_writer import Callbacks
from holdfast.storage.ranks.store_team import StoreTeam
from holdfast.storage.ranks.team import Team
from holdfast.storage.runtime.engine import start
from holdfast.storage.state.flattening.flatten import flatten

pytestmark = pytest.mark.clocked

URI = "memory://deadline"
SLOWLY = f"{URI}?faults=delay:1,delay_s:600"
OLD, NEW = {"x": torch.arange(1000)}, {"x": torch.arange(1000) * 2}


@pytest.fixture(autouse=True)
def store() -> Iterator[dict[str, Any]]:
    """Yield the raw objects stored under the URI."""
    yield STORES.setdefault("deadline", {})
    STORES.pop("deadline", None)


def test_a_save_that_takes_too_long_fails(store: dict[str, Any]) -> None:
    """The error names time, URI and remedy; the old checkpoint is unchanged."""
    holdfast.save(URI, OLD)
    before, began_s = dict(store), time.monotonic()
    with pytest.raises(
        DeadlineError, match=r"not committed within 0\.3 s .*memory://deadline.* timeout_s"
    ) as caught:
        holdfast.save(SLOWLY, NEW, timeout_s=0.3)
    assert (caught.value.uri, caught.value.rank) == (URI, 0)
    assert time.monotonic() - began_s < 60
    assert store == before


def test_a_handle_tells(store: dict[str, Any]) -> None:
    """``wait()`` of an asynchronous save raises, and the next save to the URI works."""
    handle = holdfast.async_save(SLOWLY, NEW, lazy=True, timeout_s=0.3)
    with pytest.raises(DeadlineError, match="not committed"):
        handle.wait(60)
    assert handle.done()
    holdfast.save(URI, NEW, timeout_s=600)
    assert torch.equal(holdfast.load(URI)["x"], NEW["x"])
    with holdfast.open(URI) as checkpoint:
        assert {key.split("/")[1] for key in store if key.startswith("data/")} == {
            checkpoint.attempt
        }


def test_a_save_that_waits_for_another_has_its_time_too(serve: Serve) -> None:
    """A queued save times out; a third one still waits for the first."""
    storage = Halting(serve, "put")
    uri = storage.uri
    first = holdfast.async_save(uri, OLD)
    with pytest.raises(DeadlineError, match=r"within 0\.1 s"):
        holdfast.save(uri, NEW, timeout_s=0.1)
    third = holdfast.async_save(uri, NEW, lazy=True)
    assert not first.done()
    storage.go.set()
    third.wait(60)
    first.wait(60)
    assert torch.equal(holdfast.load(uri)["x"], NEW["x"])


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_what_is_no_time_is_refused(timeout_s: float) -> None:
    """Saves and Checkpointers refuse an invalid timeout before any I/O."""
    with pytest.raises(UsageError, match="timeout_s"):
        holdfast.save(URI, NEW, timeout_s=timeout_s)
    with pytest.raises(UsageError, match="timeout_s"):
        holdfast.Checkpointer(URI, timeout_s=timeout_s, grace_s=None)


def test_an_error_of_the_storage_is_no_deadline() -> None:
    """A storage error is raised as it is, even if a TimeoutError caused it."""
    down = StorageDownError("no answer")
    down.__cause__ = TimeoutError()

    async def run() -> None:
        driver = Flaky([None, None, down])
        await run_save(
            driver, Team(), SaveJob(flatten(NEW), 1, BUDGET_NBYTES, deadline=Deadline.of(600))
        )

    with pytest.raises(StorageDownError, match="no answer"):
        start(run()).result(60)


def hangs_at(n: int, deadline: Deadline) -> Iterator[float | None]:
    """Delay operation ``n`` by ten minutes if it comes before the deadline."""
    yield from [None] * n
    yield 600.0 if deadline.until_s is not None and time.monotonic() < deadline.until_s else None


@pytest.mark.nightly(4)
@pytest.mark.parametrize("n", range(20))
def test_wherever_it_hangs_it_ends(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that hangs anywhere fails in time, and leaves nothing unless it may be committed."""
    clean_up_within(monkeypatch, 0.2)

    async def run() -> tuple[Any, list[str], str]:
        deadline = Deadline.of(0.2)
        job = SaveJob(flatten(NEW), 1, BUDGET_NBYTES, deadline=deadline)
        driver = Flaky(hangs_at(n, deadline))
        (outcome,) = await asyncio.gather(run_save(driver, Team(), job), return_exceptions=True)
        keys = sorted([info.key async for info in driver.inner.list()])
        return outcome, keys, driver.tried[n][0] if n < len(driver.tried) else ""

    outcome, keys, hung = start(run()).result(90)
    if isinstance(outcome, tuple):  # (attempt, bytes)
        assert "manifest.safetensors" in keys
        assert hung in ("delete", "")
        return
    assert isinstance(outcome, DeadlineError)
    if "manifest.safetensors" in keys:
        assert hung in ("stat", "get")
    elif hung == "put" and keys:
        assert [key.partition("/")[0] for key in keys] == [
            "data"
        ] * 3  # marker, commit record, image
    else:
        assert keys == []


def test_one_rank_that_is_late_ends_the_save_on_all() -> None:
    """If one rank is late, the others raise its error, with its number, without waiting for it."""
    drivers = [Flaky(), Flaky([600.0])]
    drivers[1].inner = drivers[0].inner

    async def act(team: StoreTeam) -> None:
        job = SaveJob(flatten({"x": torch.full((8,), float(team.rank))}), None, BUDGET_NBYTES)
        if team.rank:
            job.deadline = Deadline.of(0.3)
        await run_save(drivers[team.rank], team, job)

    first, second = as_ranks(2, act)
    assert isinstance(second, DeadlineError)
    assert isinstance(first, DeadlineError)
    assert (first.rank, second.rank) == (1, 1)
    assert "not committed within 0.3 s" in first.message


class _Silent(MemoryDriver):
    """A storage that answers no write before ``answers`` is set."""

    def __init__(self, place: str, answers: asyncio.Event) -> None:
        super().__init__(place)
        self._answers = answers

    async def put(self, key: str, data: bytes | memoryview, *, exclusive: bool = False) -> None:
        await self._answers.wait()
        await super().put(key, data, exclusive=exclusive)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("alike", [True, False])
def test_every_rank_has_copied_its_state_before_the_storage_answers(
    world: int, alike: bool
) -> None:
    """Ranks agree and copy their states while the storage is silent."""
    place = fresh_uri().removeprefix("memory://")

    answers = asyncio.Event()
    copied: list[int] = []

    def captured(rank: int) -> None:
        copied.append(rank)
        if len(copied) == world:
            answers.set()

    async def save(team: StoreTeam) -> None:
        rank = team.rank
        w = torch.full((1000,), 0.0 if alike else float(rank))
        job = SaveJob(flatten({"w": w, "mine": torch.full((9,), rank)}), 7, 64 << 20)
        job.callbacks = Callbacks(lambda: captured(rank), lambda: None)
        await run_save(_Silent(place, answers), team, job)

    succeeded(as_ranks(world, save))
    assert sorted(copied) == [*range(world)]
    with holdfast.open(f"memory://{place}") as saved:
        assert saved.step == 7
        assert saved.verify().ok


def rounds_of_save(place: MemoryDriver) -> float:
    """Return how many sequential round trips a save needs, if each operation takes one."""
    job = SaveJob(flatten({"w": torch.ones(1000), "step": 1}), None, BUDGET_NBYTES)

    async def trip(operation: str, key: str) -> None:
        await asyncio.sleep(1.0)

    async def run() -> float:
        began_s = asyncio.get_running_loop().time()
        await run_save(HookedDriver(place, before=trip), Team(), job)
        return asyncio.get_running_loop().time() - began_s

    return run_virtual(run())


@pytest.mark.parametrize(("bounded", "begins"), [(False, 2), (True, 4)])
def test_requests_that_do_not_depend_on_each_other_are_under_way_at_once(
    bounded: bool, begins: int
) -> None:
    """A save waits for as few round trips as its order of requests allows."""
    place = storage_at(fresh_uri())
    place.traits = replace(place.traits, bounded=bounded)
    uploads = 4  # begun, written twice, ended
    ends = 6
    assert rounds_of_save(place) == begins + uploads + ends
    deletes = 4  # the end of the attempt, a list of what is left, its image and its fate
    assert rounds_of_save(place) == begins + uploads + ends + 1 + deletes
