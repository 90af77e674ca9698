"""Incremental saves that learn from the kernel which memory was not written since the last save.

Whoever writes to the state, by any means and at any time: the checkpoint has the state's values.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.bits import difference, fresh_uri
from support.forked import in_a_fork

import holdfast
from holdfast.drivers.memory import STORES, _MemoryUpload
from holdfast.planner.image import BLOCK_NBYTES, CHUNK_NBYTES
from holdfast.storage.state.capture import unwritten
from holdfast.storage.state.capture.write_tracking import write_tracker
from holdfast.storage.state.source import ImageSource

pytestmark = [
    pytest.mark.skipif(write_tracker() is None, reason="writes cannot be tracked on this machine"),
    pytest.mark.usefixtures("no_write_history"),
]

NUMEL = 2 * CHUNK_NBYTES // 4
"""Each half of the memory has its own chunk."""
STEPS = 4
"""Saves before the examined one. After two, the state is known to be unchanged."""


class Run:
    """Saves of one state in one place in memory. The base of each is the previous one."""

    def __init__(self, lazy: bool) -> None:
        self.root = fresh_uri()
        self.lazy = lazy
        self.memory: Any = torch.ones(2 * NUMEL)
        self.state: dict[str, Any] = {
            "x": self.memory[:NUMEL],
            "y": self.memory[NUMEL:],
            "small": torch.ones(300),
        }
        self.done = 0
        for _ in range(STEPS):
            self.save()

    def uri(self, step: int) -> str:
        """Return the URI of a step."""
        return f"{self.root}/{step}"

    def save(self, base: int | None = None, *, overwrite: bool = True, to: str = "") -> None:
        """Save. ``base``: a step other than the newest."""
        step = self.done if base is None else base
        holdfast.async_save(
            to or self.uri(self.done + 1),
            self.state,
            lazy=self.lazy,
            base=self.uri(step) if self.done else None,
            overwrite=overwrite,
        ).wait(60)
        holdfast.fence()
        self.done += not to


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    """Free the many checkpoints after each test."""
    yield
    STORES.clear()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of all copies out of the state from now on."""
    sizes: list[int] = []
    plain = ImageSource.copy

    def counted(self: ImageSource, start: int, stop: int, into: Any) -> None:
        sizes.append(stop - start)
        plain(self, start, stop, into)

    monkeypatch.setattr(ImageSource, "copy", counted)
    return sizes


@pytest.fixture(params=[False, True], ids=["eager", "lazy"])
def run(request: pytest.FixtureRequest) -> Run:
    """Return a run whose state has not changed for a few saves."""
    return Run(request.param)


def read_by(run: Run, copied: list[int]) -> int:
    """Save, compare, and return the number of bytes copied out of the state."""
    copied.clear()
    run.save()
    read = sum(copied)
    assert difference(run.state, holdfast.load(run.uri(run.done))) is None
    return read


def test_unwritten_memory_is_not_read(run: Run, copied: list[int]) -> None:
    """Only blocks that partly lie on other pages, and changed blocks, are read."""
    least = read_by(run, copied)
    assert least < 20 * BLOCK_NBYTES
    run.state["x"][NUMEL // 2] += 1
    assert least < read_by(run, copied) < least + 20 * BLOCK_NBYTES
    run.state["x"][: NUMEL // 4] += 1
    assert read_by(run, copied) >= NUMEL // 4 * 4


def test_a_dense_state_is_not_tracked(run: Run) -> None:
    """Changed memory does not stay armed: each write to it would cost a page fault."""
    tracker = write_tracker()
    assert tracker is not None
    assert tracker._retained
    for _ in range(2):
        for tensor in run.state.values():
            tensor.add_(1)
        run.save()
    for tensor in run.state.values():
        tensor.add_(1)
    run.save()
    assert not tracker._retained


def test_a_save_without_a_base_tracks_nothing() -> None:
    """It also keeps the knowledge of incremental saves."""
    run = Run(lazy=False)
    tracker = write_tracker()
    assert tracker is not None
    before = list(tracker._retained)
    holdfast.save(fresh_uri(), {"z": torch.ones(NUMEL)})
    assert tracker._retained == before
    assert run.state


def element(run: Run) -> None:
    """Write to one element."""
    run.state["y"][NUMEL // 2] += 1


def by_numpy(run: Run) -> None:
    """Write through an array."""
    run.state["x"].numpy()[NUMEL // 2] = 7


def through_data(run: Run) -> None:
    """Write without autograd's knowledge."""
    run.state["x"].data[3 * NUMEL // 4] = 7


def swapped(run: Run) -> None:
    """Exchange equal halves of the memory."""
    run.state["x"].fill_(2)
    for _ in range(4):
        run.save()
    run.state["x"], run.state["y"] = run.state["y"], run.state["x"]


def freed_and_allocated_again(run: Run) -> None:
    """Free the memory, and allocate other memory, probably at the same address."""
    run.state.update(x=None, y=None)
    run.memory = None
    gc.collect()
    run.memory = torch.full((2 * NUMEL,), 3.0)
    run.state.update(x=run.memory[:NUMEL], y=run.memory[NUMEL:])


def saved_elsewhere(run: Run) -> None:
    """Let another save arm the memory after a write."""
    element(run)
    holdfast.async_save(fresh_uri(), run.state, lazy=run.lazy).wait(60)
    holdfast.fence()


def another_run(run: Run) -> None:
    """Write, and save in another run. Only its checkpoints have the new value."""
    element(run)
    other = fresh_uri()
    for step in range(3):
        base = f"{other}/{step - 1}" if step else None
        holdfast.async_save(f"{other}/{step}", run.state, lazy=run.lazy, base=base).wait(60)
        holdfast.fence()


def failed_save(run: Run) -> None:
    """Write, and begin saves that fail."""
    element(run)
    for _ in range(2):
        with pytest.raises(holdfast.ExistsError):
            run.save(overwrite=False, to=run.uri(1))


def discarded(run: Run) -> None:
    """Let the kernel drop the pages: they read as zeros, and no write is seen."""
    address = run.state["x"].data_ptr() + (1 << 20)
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.madvise(address // 4096 * 4096, 1 << 20, 4) == 0


@pytest.mark.parametrize(
    "write",
    [
        element,
        by_numpy,
        through_data,
        swapped,
        freed_and_allocated_again,
        saved_elsewhere,
        another_run,
        failed_save,
        discarded,
    ],
)
def test_every_change_between_two_saves_is_stored(run: Run, write: Callable[[Run], None]) -> None:
    """The next save stores it, and later saves keep it."""
    write(run)
    for _ in range(3):
        run.save()
        assert difference(run.state, holdfast.load(run.uri(run.done))) is None


@pytest.mark.parametrize("works", [0, 1, 2])
def test_a_base_that_vanishes_during_the_copies_costs_nothing(
    run: Run, works: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that were to be borrowed are captured instead, also those next to changed ones."""
    element(run)
    by_numpy(run)
    left = works
    plain = _MemoryUpload.copy

    async def copy(self: _MemoryUpload, *arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise holdfast.StorageError("it is gone")
        await plain(self, *arguments)

    monkeypatch.setattr(_MemoryUpload, "copy", copy)
    run.save()
    assert left < 0
    assert difference(run.state, holdfast.load(run.uri(run.done))) is None


@pytest.mark.parametrize("base", [1, STEPS])
def test_marks_count_for_the_attempt_that_armed_them_only(run: Run, base: int) -> None:
    """After a step back, another checkpoint is the base, with other bytes in the same place."""
    element(run)
    for _ in range(3):
        run.save()
    run.save(base=base)
    assert difference(run.state, holdfast.load(run.uri(run.done))) is None


def test_two_saves_at_a_time_leave_each_other_their_marks() -> None:
    """The second save begins before the first has copied the memory that it has armed."""
    run = Run(lazy=True)
    handles = [
        holdfast.async_save(f"{run.root}/{name}", run.state, lazy=True, base=run.uri(STEPS))
        for name in "abc"
    ]
    for handle in handles:
        handle.wait(60)
        assert difference(run.state, holdfast.load(handle.uri)) is None


def test_a_forked_child_knows_nothing(run: Run) -> None:
    """Its memory is different, and so is its tracker."""

    def saves() -> None:
        element(run)
        run.save()
        assert difference(run.state, holdfast.load(run.uri(run.done))) is None

    assert in_a_fork(saves) == ""
    run.save()
    assert difference(run.state, holdfast.load(run.uri(run.done))) is None


@pytest.mark.parametrize("writes", [1, 2, 10])
def test_a_save_while_another_thread_writes_is_of_one_moment(
    run: Run, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread writes to memory that was examined, and then to memory that was not yet. The
    checkpoint has both writes or none, and the next one has both."""
    tracker = write_tracker()
    assert tracker is not None
    plain = type(tracker).clean
    left = writes

    def clean(self: Any, start: int, stop: int) -> Any:
        nonlocal left
        middle = min(max(start, run.state["y"].data_ptr() // 4096 * 4096), stop)
        found = plain(self, start, middle)
        if left:
            left -= 1
            for name in ("x", "y"):
                run.state[name][NUMEL // 2].add_(1)
        return found + plain(self, middle, stop)

    monkeypatch.setattr(type(tracker), "clean", clean)
    try:
        run.save()
    except holdfast.SaveError:
        left = 0
        run.save()
    monkeypatch.undo()
    found = holdfast.load(run.uri(run.done))
    assert found["x"][NUMEL // 2] == found["y"][NUMEL // 2]
    run.save()
    assert difference(run.state, holdfast.load(run.uri(run.done))) is None


def test_digests_count_once_their_copy_is_known_to_be_clean(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block may be written to while it is hashed to find out whether it has changed. Then the
    save fails, as if it had captured the block, and the next one stores the value."""
    plain = ImageSource.page
    writes = iter([lambda: run.state["x"][2000].add_(1)])

    def hashed(self: ImageSource, page: bytes, start: int, *given: Any) -> bytes:
        if start == 0:  # where the header ends within a block
            next(writes, lambda: None)()
        return plain(self, page, start, *given)

    monkeypatch.setattr(ImageSource, "page", hashed)
    with pytest.raises(holdfast.SaveError, match="changed while it was being copied"):
        run.save()
    for _ in range(3):
        run.save()
        assert difference(run.state, holdfast.load(run.uri(run.done))) is None


def test_memory_is_not_tracked_while_devices_have_some(
    monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    """A device writes unnoticed to memory that was pinned before it was armed."""
    monkeypatch.setattr(unwritten, "_has_pinned_memory", lambda: True)
    run = Run(lazy=False)
    assert read_by(run, copied) >= 2 * NUMEL * 4
