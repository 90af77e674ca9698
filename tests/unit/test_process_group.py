"""Which ranks take part in a call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

import holdfast
from holdfast.errors import UsageError
from holdfast.storage.ranks.process_group import acting_in, current_rank, current_world


@pytest.fixture
def second_of_three() -> Iterator[None]:
    """Join a group of three ranks as the only rank that answers."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=3)
    yield
    dist.destroy_process_group()


def test_a_group_has_ranks_of_its_own(second_of_three: None) -> None:
    """Numbered as in the group; after the block, the thread acts in the job again."""
    with acting_in(dist.new_group([1, 2])):
        assert (current_rank(), current_world()) == (0, 2)
    with acting_in("self"):
        assert (current_rank(), current_world()) == (0, 1)
    assert (current_rank(), current_world()) == (1, 3)


def test_a_rank_alone_asks_no_other(second_of_three: None, tmp_path: Path) -> None:
    """A rank alone saves and loads without the other ranks."""
    state = {"w": torch.arange(10.0), "data": holdfast.PerRank({"at": 7})}
    holdfast.save(tmp_path / "c", state, process_group="self", deadline_s=5)
    into = {"w": torch.zeros(10), "data": holdfast.PerRank({"at": 0})}
    holdfast.load(tmp_path / "c", into=into, process_group="self", deadline_s=5)
    assert torch.equal(into["w"], state["w"])
    assert into["data"].value == {"at": 7}


def test_an_undecided_step_counts_as_one_failed_save(second_of_three: None, tmp_path: Path) -> None:
    """An undecided step counts as one failed save, by the clock and by steps."""
    for every in ("1h", 1):
        with holdfast.Checkpointer(tmp_path, every=every, deadline_s=0.05) as ckpt:
            assert ckpt.step(1, {"w": torch.ones(1)}) is None
        counters = ckpt.counters
        assert (counters.due, counters.failed, counters.in_flight) == (1, 1, 0)


def test_a_zero_optimizer_that_ddp_steps_is_refused(second_of_three: None, tmp_path: Path) -> None:
    """The error names the optimizer and the option that hides its state."""
    optim = ZeroRedundancyOptimizer(
        torch.nn.Linear(2, 2).parameters(), torch.optim.Adam, overlap_with_ddp=True
    )
    for call in (holdfast.save, holdfast.load):
        says = r'state\["optim"\] is a ZeroRedundancy.*overlap_with_ddp'
        with pytest.raises(holdfast.StateError, match=says):
            call(tmp_path / "c", {"optim": optim}, process_group="self")


@pytest.mark.parametrize("group", ["all", 3, dist.GroupMember.NON_GROUP_MEMBER])
def test_what_is_no_group_is_refused(group: Any, second_of_three: None, tmp_path: Path) -> None:
    """Every operation refuses an invalid process group before any I/O."""
    uri, state = tmp_path / "c", {"w": torch.ones(1)}
    calls: list[Any] = [partial(call, uri, state) for call in (holdfast.save, holdfast.async_save)]
    calls += [partial(holdfast.load, uri, into=state), partial(holdfast.Checkpointer, uri)]
    for call in calls:
        with pytest.raises(UsageError, match=r"process_group is|not in the process group"):
            call(process_group=group)
    assert not uri.exists()
