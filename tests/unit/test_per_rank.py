"""Each rank's own values after a change of the number of ranks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bits import difference, fresh_uri
from support.effort import examples

import holdfast
from holdfast.storage.state.adapters.per_rank import resharded

FOUR = [{"epoch": 3, "left": [10 * rank, 10 * rank + 1]} for rank in range(4)]


def spread(values: list[Any], rule: Any, world: int) -> list[Any]:
    """Return the value of each of ``world`` ranks."""
    return [resharded(values, rule, rank, world) for rank in range(world)]


def test_keep_and_broadcast_give_each_rank_the_value_of_one() -> None:
    """Rank r gets the value of rank r mod n, or of rank 0; other rules are refused at once."""
    assert spread(["a", "b", "c"], "keep", 2) == ["a", "b"]
    assert spread(["a", "b"], "keep", 3) == ["a", "b", "a"]
    assert spread(["a", "b"], "broadcast", 3) == ["a", "a", "a"]
    with pytest.raises(holdfast.UsageError, match="keep, broadcast, split, merge"):
        holdfast.PerRank([], "divide")  # type: ignore[arg-type]
    with pytest.raises(holdfast.UsageError, match="Linear"):
        holdfast.PerRank(torch.nn.Linear(2, 2))


def test_split_joins_and_cuts_evenly() -> None:
    """This holds for lists, tuples, arrays and tensors, at any depth. Other values are the same on
    all ranks."""
    halves = spread(FOUR, "split", 2)
    assert halves == [{"epoch": 3, "left": [0, 1, 10, 11]}, {"epoch": 3, "left": [20, 21, 30, 31]}]
    assert [len(part["left"]) for part in spread(halves, "split", 3)] == [2, 3, 3]
    tensor = torch.arange(6.0).reshape(3, 2)
    values = [{"a": np.arange(3) + rank, "t": tensor, "p": (rank,)} for rank in range(2)]
    expected = {"a": np.array([0, 1, 2, 1, 2, 3]), "t": tensor.repeat(2, 1), "p": (0, 1)}
    assert difference(expected, resharded(values, "split", 0, 1)) is None


def test_merge_joins_and_never_cuts() -> None:
    """Neighbours are joined. If there are more ranks than values, some ranks get nothing."""
    thirds = spread(FOUR, "merge", 3)
    assert [part["left"] for part in thirds] == [[0, 1], [10, 11], [20, 21, 30, 31]]
    assert spread([["a"], ["b", "c"]], "merge", 4) == [[], ["a"], [], ["b", "c"]]


def test_a_function_is_told_all_values() -> None:
    """It gets the values in order of rank, and returns the rank's value."""
    found = spread([1, 2, 4], lambda values, rank, world: sum(values) + 10 * rank + world, 2)
    assert found == [9, 19]


@pytest.mark.parametrize("rule", ["split", "merge"])
@pytest.mark.parametrize(
    ("values", "where"),
    [
        ([{"step": 1}, {"step": 2}], "value['step']"),
        ([{"a": 1}, {"b": 1}], "value"),
        ([[1], (1,)], "value"),
        ([torch.tensor(1), torch.tensor(2)], "value"),
        ([1, True], "value"),
    ],
)
def test_what_cannot_be_joined_is_refused_by_name(rule: Any, values: list[Any], where: str) -> None:
    """The error says what to do instead."""
    with pytest.raises(holdfast.StateError, match="function") as raised:
        resharded(values, rule, 0, 3)
    assert raised.value.message.startswith(f"{where} of a PerRank")


@examples(60)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=5),
    st.lists(
        st.tuples(st.sampled_from(["split", "merge"]), st.integers(1, 6)), min_size=1, max_size=4
    ),
)
def test_nothing_is_lost_or_doubled_over_any_changes(
    start: list[list[int]], changes: list[tuple[Any, int]]
) -> None:
    """Through any numbers of ranks, by either rule, all items remain exactly once, in order."""
    values: list[list[int]] = start
    for rule, world in changes:
        values = spread(values, rule, world)
        assert len(values) == world
    assert list(itertools.chain(*values)) == list(itertools.chain(*start))


def test_an_object_gets_its_state_back_and_a_value_is_replaced() -> None:
    """A job of one rank gets its own value back, bit for bit."""
    generator = torch.Generator().manual_seed(5)
    uri = fresh_uri()
    own = [1, torch.ones(2)]
    holdfast.save(uri, {"g": holdfast.PerRank(generator), "v": holdfast.PerRank(own, "split")})
    other, value = torch.Generator(), holdfast.PerRank(None, "split")
    holdfast.load(uri, into={"g": holdfast.PerRank(other), "v": value})
    assert torch.equal(other.get_state(), generator.get_state())
    assert difference(own, value.value) is None
    assert difference({"world": 1, "of": {"0": own}}, holdfast.load(uri)["v"]) is None
