"""Test forked children of a rank: collective calls are refused, reading works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bits import difference, fresh_uri
from support.forked import in_a_fork
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend
from torch.utils.data import DataLoader, Dataset

import holdfast

pytestmark = [
    pytest.mark.clocked,
    pytest.mark.filterwarnings(
        "ignore:.*multi-threaded.*:DeprecationWarning"
    ),  # of Python 3.12 and newer
]

STATE = {"w": torch.arange(100.0), "step": 3}


@pytest.fixture
def uri() -> str:
    """A checkpoint."""
    uri = fresh_uri()
    holdfast.save(uri, STATE)
    return uri


@pytest.fixture
def group(uri: str) -> Iterator[dist.Store]:
    """This process is rank 1 of a job of two. Its store, where nobody else is."""
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=1, world_size=2)
    try:
        yield store
    finally:
        dist.destroy_process_group()


def calls(uri: str) -> list[Callable[[], Any]]:
    """Return the collective calls of a job."""
    return [
        lambda: holdfast.save(uri, STATE, deadline_s=5),
        lambda: holdfast.async_save(uri, STATE, deadline_s=5).wait(20),
        lambda: holdfast.load(uri, into={"w": torch.zeros(100), "step": 0}, deadline_s=5),
        lambda: holdfast.Checkpointer(uri, deadline_s=5).resume({"w": torch.zeros(100)}),
    ]


@pytest.mark.parametrize("number", range(4), ids=["save", "async_save", "load into", "resume"])
def test_a_child_is_refused_what_all_ranks_do_together(
    number: int, uri: str, group: dist.Store
) -> None:
    """A child is refused before it contacts any other rank."""
    keys = group.num_keys()

    def child() -> None:
        with pytest.raises(
            holdfast.UsageError, match="not rank 1 but was forked from it"
        ) as raised:
            calls(uri)[number]()
        assert "holdfast.open" in str(raised.value)
        assert group.num_keys() == keys

    assert in_a_fork(child) == ""


def test_a_child_reads_checkpoints_by_itself(uri: str, group: dist.Store) -> None:
    """It opens one, and loads a whole one."""

    def child() -> None:
        assert difference(holdfast.load(uri), STATE) is None
        with holdfast.open(uri) as checkpoint:
            assert checkpoint.read("w").sum() == STATE["w"].sum()
            assert checkpoint.verify().ok

    assert in_a_fork(child) == ""


def test_a_child_that_leaves_the_group_is_a_process_of_its_own(uri: str, group: dist.Store) -> None:
    """It saves and loads as any process that is alone; it may also join a group of its own."""

    def child() -> None:
        dist.destroy_process_group()
        holdfast.save(uri, STATE)
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
        holdfast.load(uri, into={"w": torch.zeros(100), "step": 0})

    assert in_a_fork(child) == ""


class Rows(Dataset):  # type: ignore[type-arg]
    """Rows of a checkpoint, read by a worker, which may also save."""

    def __init__(self, uri: str, saves: bool) -> None:
        self.uri, self.saves = uri, saves

    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> Any:
        if self.saves:
            holdfast.save(self.uri, STATE, deadline_s=5)
        with holdfast.open(self.uri) as checkpoint:
            return checkpoint.read("w")[row]


@pytest.mark.parametrize("saves", [False, True])
def test_a_worker_of_a_data_loader_reads_and_does_not_save(
    saves: bool, uri: str, group: dist.Store
) -> None:
    """As long as its parent is a rank."""
    rows = DataLoader(
        Rows(uri, saves), num_workers=1, batch_size=None, multiprocessing_context="fork", timeout=30
    )
    if saves:
        with pytest.raises(holdfast.UsageError, match="forked"):
            list(rows)
    else:
        assert [float(row) for row in rows] == [0.0, 1.0]
