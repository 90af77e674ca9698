"""Shards: parts of tensors that stand in a state where a tensor would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bits import difference, fresh_uri
from support.drivers import storage_at
from support.ranks import save_as_ranks

import holdfast
from holdfast import Shard
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.state.flattening.flatten import flatten

WHOLE = torch.arange(60.0).reshape(3, 4, 5)


def flat(start: int, stop: int, whole: torch.Tensor = WHOLE) -> Shard:
    """A range of a tensor."""
    part = whole.reshape(-1)[start:stop].clone()
    return Shard(part, shape=whole.shape, flat=(start, stop))


def job_driver() -> MemoryDriver:
    """A store in memory for the ranks of one process."""
    return storage_at(fresh_uri())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Shard(torch.ones(2), shape=(2,)), "a box or a flat range"),
        (lambda: Shard(torch.ones(3), shape=(2, 1), flat=(0, 3)), "not a range of the 2 elements"),
        (lambda: Shard(torch.ones(1), shape=(2,), flat=(-1, 0)), "not a range"),
        (lambda: Shard(torch.ones(4), shape=(2, 3), flat=(0, 3)), "3 elements, and the tensor"),
        (lambda: Shard(torch.ones(3, 1), shape=(2, 3), flat=(0, 3)), r"shape \[3, 1\].*view"),
        (lambda: Shard(torch.ones(2, 3), shape=(4, 3), offset=(3, 0)), "sticks out"),
        (lambda: Shard(torch.ones(2), shape=(4, 3), offset=(0,)), "numbers of dimensions differ"),
        (lambda: Shard(torch.ones(0), shape=(-1,), flat=(0, 0)), r"of shape \[-1\]"),
        (lambda: Shard([1.0], shape=(1,), flat=(0, 1)), "a Shard of a list"),
    ],
)
def test_what_is_no_part_is_refused_where_it_is_made(make: Callable[[], Any], text: str) -> None:
    """With what is wrong, and what to pass instead."""
    with pytest.raises(holdfast.UsageError, match=text):
        make()


def test_a_range_stands_anywhere_in_a_state() -> None:
    """Shards may stand anywhere in a state; loads without shards give whole tensors."""
    uri = fresh_uri()
    state = {"a": [flat(0, 60), (1, {"b": flat(0, 60)})], "c": torch.ones(2), "d": 3}
    holdfast.save(uri, state)
    expected = {"a": [WHOLE, (1, {"b": WHOLE})], "c": torch.ones(2), "d": 3}
    assert difference(expected, holdfast.load(uri)) is None
    into = {"a": [flat(7, 8), (0, {"b": flat(5, 49)})], "c": torch.zeros(2), "d": 0}
    for part in (into["a"][0], into["a"][1][1]["b"]):  # type: ignore[index]
        part.tensor.zero_()
    assert holdfast.load(uri, into=into) is into
    first, (value, second) = into["a"]  # type: ignore[misc]
    assert first.tensor.tolist() == [7.0]
    assert second["b"].tensor.tolist() == list(range(5, 49))
    assert (value, into["d"]) == (1, 3)


def test_elements_of_a_range_may_lie_apart() -> None:
    """Other values between them are neither saved nor touched."""
    uri = fresh_uri()
    rows = torch.stack([torch.arange(44.0), torch.full((44,), -1.0)], dim=1)
    part = Shard(rows[:, 0], shape=WHOLE.shape, flat=(5, 49))
    driver = storage_at(uri)
    save_as_ranks(driver, [{"w": flat(0, 5)}, {"w": part}, {"w": flat(49, 60)}])
    filled = torch.full((44, 3), -2.0)
    holdfast.load(uri, into={"w": Shard(filled[:, 1], shape=WHOLE.shape, flat=(5, 49))})
    assert filled[:, 1].tolist() == list(range(44))
    assert set(filled[:, 0].tolist() + filled[:, 2].tolist()) == {-2.0}


def test_a_part_that_cannot_be_filled_is_named() -> None:
    """Before anything is read: elements that share memory, another shape, another dtype."""
    uri = fresh_uri()
    holdfast.save(uri, {"w": flat(0, 60)})
    shared = torch.zeros(1).expand(60)
    for part, text in (
        (Shard(shared, shape=(3, 4, 5), flat=(0, 60)), r'state\["w"\].*share memory'),
        (
            Shard(torch.zeros(2), shape=(60,), flat=(0, 2)),
            r"shape \[3, 4, 5\].*\[60\] in the state",
        ),
        (Shard(torch.zeros(2).int(), shape=(3, 4, 5), flat=(0, 2)), "dtype float32"),
    ):
        with pytest.raises(holdfast.MismatchError, match=text):
            holdfast.load(uri, into={"w": part})


class Fused:
    """An optimizer of its own kind, which keeps the moments of all parameters in one flat buffer."""

    def __init__(self, fill: float) -> None:
        self.buffer = torch.arange(70.0) * fill
        self.given: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Moments by parameter, each a range of the buffer."""
        return {
            "w": Shard(self.buffer[:60], shape=(3, 4, 5), flat=(0, 60)),
            "b": Shard(self.buffer[60:], shape=(10,), flat=(0, 10)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """They are filled already."""
        self.given = state


def test_objects_may_give_parts() -> None:
    """The parts in an object's state are filled in place, and the object gets them back."""
    uri = fresh_uri()
    holdfast.save(uri, {"optim": Fused(1.0)})
    other = Fused(0.0)
    holdfast.load(uri, into={"optim": other})
    assert torch.equal(other.buffer, torch.arange(70.0))
    assert isinstance(other.given["w"], Shard)
    assert (
        difference({"optim": {"w": WHOLE, "b": torch.arange(60.0, 70)}}, holdfast.load(uri)) is None
    )


def test_a_state_of_parts_is_recognised() -> None:
    """A second save of the same layout need not be planned; other ranges are another layout."""
    first, again, other = (
        flatten({"w": flat(0, stop), "v": flat(stop, 60)}).layout_id for stop in (20, 20, 21)
    )
    assert first is not None
    assert first is again
    assert first is not other


def test_ranks_that_hold_the_same_part_are_replicas() -> None:
    """What two ranks hold is stored once, and each writes a share of it."""
    uri = fresh_uri()
    driver = storage_at(uri)
    whole = torch.arange(40_000.0).reshape(200, 200)
    ranges = [(0, 15_050), (15_050, 40_000), (0, 15_050), (15_050, 40_000)]
    save_as_ranks(driver, [{"w": flat(*ends, whole)} for ends in ranges])
    with holdfast.open(uri) as checkpoint:
        assert torch.equal(checkpoint.read("w"), whole)
        headers_nbytes = 3 * 4096
        for rank, nbytes in checkpoint.images.items():
            start, stop = ranges[rank]
            assert nbytes < 0.55 * (stop - start) * 4 + headers_nbytes
        assert sorted(checkpoint.images) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("parts", "error", "text"),
    [
        ([flat(0, 30), flat(31, 60)], holdfast.CoverageError, "missing"),
        ([flat(0, 31), flat(30, 60)], holdfast.CoverageError, "stored twice"),
        ([flat(0, 60), flat(0, 60, -WHOLE)], holdfast.SaveError, r"different values of 'w\[flat"),
        ([flat(0, 30), flat(30, 60, WHOLE.double())], holdfast.SaveError, "'w' has another.*dtype"),
        ([flat(0, 30), flat(30, 60, WHOLE.reshape(60))], holdfast.SaveError, "another shape"),
    ],
)
def test_ranks_that_disagree_are_told(
    parts: list[Shard], error: type[Exception], text: str
) -> None:
    """A gap, an overlap, replicas that differ, and other dtypes and shapes fail the save."""
    with pytest.raises(error, match=text):
        save_as_ranks(job_driver(), [{"w": part} for part in parts])


@pytest.mark.parametrize(("before", "after"), [("rows", "flat"), ("flat", "rows")])
def test_hardly_more_is_read_than_is_wanted(before: str, after: str) -> None:
    """At the sizes of real layers, from 4 ranks to 3 in ranges or rows, at most 5% more."""
    shape = (2048, 1000)
    whole = torch.arange(2_048_000).to(torch.int32).reshape(shape)

    def state(how: str, rank: int, world: int) -> dict[str, Any]:
        unit = 1000 if how == "rows" else 1
        n = whole.numel() // unit
        start = n * rank // world * unit
        stop = n * (rank + 1) // world * unit
        return {f"layer {i}": flat(start, stop, whole) for i in range(3)}

    uri = fresh_uri()
    driver = storage_at(uri)
    save_as_ranks(driver, [state(before, rank, 4) for rank in range(4)])
    for rank in range(3):
        reports: list[holdfast.LoadReport] = []
        into = state(after, rank, 3)
        expected = [shard.tensor.clone() for shard in into.values()]
        for shard in into.values():
            shard.tensor.zero_()
        holdfast.load(uri, into=into, on_report=reports.append)
        assert all(map(torch.equal, expected, [shard.tensor for shard in into.values()]))
        assert reports[0].bytes_read <= 1.05 * reports[0].bytes_wanted
