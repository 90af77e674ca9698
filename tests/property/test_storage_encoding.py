"""Values, columns and trees survive encoding; a flipped byte is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from support.bits import containers, difference, flipped_bits

import holdfast
from holdfast.errors import SaveError
from holdfast.storage.format.columns import decode_columns, encode_columns, narrowed
from holdfast.storage.format.tree import Tree, Value, merge_trees
from holdfast.storage.format.values import decode_value, encode_value

texts = st.text(st.characters(codec=None) | st.characters(categories=["Cs"]), max_size=8)
scalars = (
    npst.boolean_dtypes()
    | npst.integer_dtypes()
    | npst.floating_dtypes(sizes=(16, 32, 64))
    | npst.complex_number_dtypes(sizes=(64, 128))
)
values = (
    st.none() | st.booleans() | st.integers() | st.integers(-(10**400), 10**400) | st.floats() | st.complex_numbers(allow_nan=True)
    | texts | st.binary(max_size=20) | st.binary(max_size=5).map(bytearray)
    | scalars.flatmap(lambda dtype: npst.from_dtype(np.dtype(dtype).newbyteorder("=")))
    | texts.map(np.str_) | st.binary(max_size=5).map(np.bytes_)
)  # fmt: skip


@given(values)
def test_a_value_comes_back_from_json_equal_and_of_its_type(value: Any) -> None:
    """Every value survives JSON bit for bit, with its type."""
    decoded = decode_value(json.loads(json.dumps(encode_value(value, "state"))))
    assert difference([value], [decoded]) is None


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | texts | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    )
)
def test_decoding_any_json_is_a_value_or_damage(encoded: Any) -> None:
    """Any JSON is decoded or refused with DamagedError."""
    try:
        decode_value(encoded)
    except holdfast.DamagedError:
        pass


columns = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name not in ("__metadata__", "checksum")),
    npst.arrays(st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]), npst.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=6)),
    max_size=5,
)  # fmt: skip
metadata = st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3)


@given(columns, metadata)
def test_columns_come_back_as_they_were(
    there: dict[str, np.ndarray], texts: dict[str, str]
) -> None:
    """Columns of every unsigned type survive a round trip, even empty ones."""
    found, told = decode_columns(encode_columns(there, texts), "a file")
    assert told == texts
    assert difference(there, found) is None


@given(columns, st.data())
def test_columns_with_a_flipped_bit_are_refused(
    there: dict[str, np.ndarray], data: st.DataObject
) -> None:
    """A flipped bit anywhere, and a file cut short, are damage."""
    whole = encode_columns(there, {"a": "b"})
    for damaged in (
        data.draw(flipped_bits(whole)),
        whole[: data.draw(st.integers(0, len(whole) - 1))],
    ):
        with pytest.raises(holdfast.DamagedError, match="a file"):
            decode_columns(damaged, "a file")


@given(st.lists(st.integers(0, 2**63 - 1)))
def test_narrowing_keeps_every_number(numbers: list[int]) -> None:
    """Narrowing picks the smallest unsigned type that holds the numbers."""
    narrow = narrowed(np.array(numbers, np.int64))
    assert narrow.tolist() == numbers
    assert narrow.dtype.kind == "u"
    assert narrow.dtype == np.min_scalar_type(max(numbers, default=0))


keys = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.0, 1.0, 1.5])
    | st.sampled_from(["", "a", "0", "1", "a.b", "True"])
)
small = st.none() | st.booleans() | st.sampled_from([0, 1, 1.0, 0.0, -0.0, "1", b"1"])


states = st.dictionaries(keys, st.recursive(small, containers(keys), max_leaves=12), max_size=5)


def tree_of(state: Any, rank: int = 0) -> Tree:
    """Return a state without tensors as a tree, of one rank."""
    from holdfast.storage.state.flattening.flatten import flatten

    tree = flatten(state).tree
    for value in tree.values:
        value.by_rank = [([rank], value.by_rank[0][1])]
    return tree


def leaves(tree: Tree, rank: int) -> list[tuple[Any, Any]]:
    """Return the values of one rank with the keys that lead to them, types included."""
    paths = tree.paths()
    return [
        (tuple((type(k), k) for k in (*paths[v.container], v.key)), v.of(rank)) for v in tree.values
    ]


@given(states)
def test_a_tree_comes_back_from_json(state: Any) -> None:
    """Containers, keys and values survive JSON with their types."""
    tree = tree_of(state)
    found = Tree.from_json(json.loads(json.dumps(tree.to_json())))
    assert [(c.parent, type(c.key), c.key, c.kind) for c in found.containers] == [
        (c.parent, type(c.key), c.key, c.kind) for c in tree.containers
    ]
    assert difference(leaves(tree, 0), leaves(found, 0)) is None


@given(st.lists(states, min_size=1, max_size=4))
def test_merged_trees_give_each_rank_its_own_values(ranks: list[Any]) -> None:
    """Merged trees store equal values once, and give each rank its own, by value and type."""
    trees = [tree_of(state, rank) for rank, state in enumerate(ranks)]
    try:
        merged, numbers = merge_trees(trees)
    except SaveError:
        kinds: dict[Any, set[str]] = {}
        for tree in trees:
            for path, container in zip(tree.paths(), tree.containers, strict=True):
                kinds.setdefault(tuple((type(k), k) for k in path), set()).add(container.kind)
        assert any(len(kind) > 1 for kind in kinds.values())
        return
    merged = Tree.from_json(json.loads(json.dumps(merged.to_json())))
    for rank, tree in enumerate(trees):
        found = {repr(path): value for path, value in leaves(merged, rank)}
        for path, value in leaves(tree, 0):
            assert difference([value], [found[repr(path)]]) is None
        assert [merged.containers[n].kind for n in numbers[rank]] == [
            c.kind for c in tree.containers
        ]
        assert [merged.paths()[n] for n in numbers[rank]] == tree.paths()
    union = {repr(path) for tree in trees for path, _ in leaves(tree, 0)}
    assert sorted(union) == sorted(repr(path) for path, _ in leaves(merged, 0))
    for value in merged.values:
        encoded = [(type(e), repr(e)) for _, e in value.by_rank]
        assert len(set(encoded)) == len(encoded), "equal values are stored once"


def test_ranks_that_saved_no_value_get_one_of_those_that_did() -> None:
    """Ranks without a value get the values of the others in turn."""
    value = Value(0, "x", [([1, 4], "a"), ([2], "b")])
    assert [value.of(rank) for rank in range(7)] == ["a", "a", "b", "a", "a", "a", "a"]
