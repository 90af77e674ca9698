"""Random states, saved and loaded, and the manifests in between."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.bits import difference, fresh_uri, from_bytes
from support.ranks import load_as_ranks, save_as_ranks

import holdfast
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.capture.fingerprint import fingerprints
from holdfast.storage.capture.plan import plan_save
from holdfast.storage.capture.state import flatten
from holdfast.storage.manifest import ImageTable, Manifest
from holdfast.storage.merge import merge

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.complex128,
]
few = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bits, any small shape; perhaps not contiguous."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    nbytes = math.prod(shape) * dtype.itemsize
    made = from_bytes(draw(st.binary(min_size=nbytes, max_size=nbytes)), dtype, shape)
    how = draw(st.sampled_from(["plain", "turned", "stepped", "array"]))
    if how == "turned":
        made = made.permute(tuple(reversed(range(made.ndim))))
    if how == "stepped" and made.ndim:
        made = made[::2]
    return made.contiguous().numpy() if how == "array" and dtype not in (torch.bfloat16, torch.float8_e4m3fn) else made


keys = st.sampled_from(["a", "b", "weight", "x/y", "é", "..", "__metadata__"]) | st.integers(0, 5)
leaves = (
    tensors() | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
)


def branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Containers of these."""
    return (
        st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple)
    )


states = st.dictionaries(keys, st.recursive(leaves, branches, max_leaves=15), max_size=5)


def blank(value: Any) -> Any:
    """A state of the same form, with nothing of the original in it."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value, memory_format=torch.preserve_format)
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(blank(item) for item in value)
    return "blank"


@few
@given(states)
def test_any_state_comes_back(state: Any) -> None:
    """Built anew, and loaded into another of its form."""
    uri = fresh_uri()
    holdfast.save(uri, state)
    assert difference(state, holdfast.load(uri)) is None
    into = blank(state)
    assert difference(state, holdfast.load(uri, into=into)) is None


def fragments_of(states: list[Any], attempt: str = "20200101T000000-00000000") -> list[Manifest]:
    """What each rank tells the leader, if plain tensors are all its own."""
    made = []
    for rank, state in enumerate(states):
        flat = flatten(state)
        plan = plan_save(flat, rank, dict.fromkeys(fingerprints(flat, len(states)), ()))
        wrote = len(plan.layout.start) > 0
        digests = np.full((plan.layout.chunks if wrote else 0, 16), rank, np.uint8)
        hashed = np.array([plan.layout.hashed_end] if wrote else [], np.int64)
        images = ImageTable(np.array([rank] if wrote else [], np.int64), hashed, digests)
        made.append(
            Manifest(attempt, rank, rank + 1, 1.5, flat.tree, plan.tensors, plan.container, plan.shards, images)
        )
    return made


def plain(value: Any) -> Any:
    """Columns and dataclasses as nested lists, for comparison."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {repr(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return sorted(value) if isinstance(value, set) else repr(value)


def without_padding(m: Manifest) -> Any:
    """As ``plain``; a table is as wide as its widest row needs, and before encoding perhaps wider."""
    return plain(m)


@few
@given(states)
def test_a_manifest_comes_back_from_its_encoding(state: Any) -> None:
    """Every column, every field, and the tree."""
    (fragment,) = fragments_of([state])
    assert plain(Manifest.decode(fragment.encode())) == plain(fragment)


@few
@given(states, st.data())
def test_a_manifest_with_a_flipped_bit_is_refused(state: Any, data: st.DataObject) -> None:
    """By its checksum, wherever it is."""
    whole = fragments_of([state])[0].encode()
    position, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    with pytest.raises(holdfast.DamagedError):
        Manifest.decode(whole[:position] + bytes([whole[position] ^ (1 << bit)]) + whole[position + 1 :])


@few
@given(st.lists(states, min_size=1, max_size=3))
def test_a_merged_manifest_has_what_its_fragments_have(ranks: list[Any]) -> None:
    """Each rank's tensors, by name and owner, with their shards and the images that hold them; nothing else."""
    fragments = fragments_of(ranks)
    try:
        merged = Manifest.decode(merge(fragments).encode())
    except holdfast.SaveError as error:
        assert "on one rank and a" in str(error)
        return
    expected = set()
    for rank, f in enumerate(fragments):
        expected |= set(rows_of(f, rank))
    assert set(rows_of(merged, None)) == expected
    assert merged.world == len(ranks)
    assert merged.images.rank.tolist() == [rank for rank, f in enumerate(fragments) if len(f.images)]
    assert merged.images.digests.tolist() == [row for f in fragments for row in f.images.digests.tolist()]


def rows_of(m: Manifest, rank: int | None) -> list[Any]:
    """Name, owner, dtype, shape, tie and shards of each tensor."""
    t, s, found = m.tensors, m.shards, []
    pointers = s.pointers(len(t)).tolist()
    for row, (a, b) in enumerate(itertools.pairwise(pointers)):
        n = int(t.ndim[row])
        shards = [
            (
                tuple(s.offsets[i][:n].tolist()),
                tuple(s.lengths[i][:n].tolist()),
                int(m.images.rank[s.image[i]]),
                int(s.start[i]),
            )
            for i in range(a, b)
        ]
        tie = None if t.alias[row] < 0 else t.names[t.alias[row]]
        found.append((t.names[row], int(t.owner[row]), t.dtypes[t.dtype[row]], t.shape_of(row), tie, tuple(shards)))
    return found


@st.composite
def jobs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """States of two or three ranks: some tensors alike on all or some ranks, some ranks' own, some tied here and there."""
    world = draw(st.integers(2, 3))
    pool = [torch.full((draw(st.integers(1, 5)), 3), float(i)) for i in range(3)]
    ranks: list[dict[str, Any]] = [{} for _ in range(world)]
    for name in draw(st.lists(st.sampled_from(["p", "q", "r", "s", "t", "u"]), unique=True, max_size=5)):
        for state in ranks:
            choice = draw(st.integers(-1, 4))
            if choice >= 0:
                state[name] = pool[choice] if choice < 3 else pool[choice - 3].clone()
    for rank, state in enumerate(ranks):
        state["value"] = draw(st.sampled_from([0, 1, True, rank]))
    return ranks


@few
@given(jobs())
def test_each_rank_of_a_job_gets_back_what_it_saved(ranks: list[dict[str, Any]]) -> None:
    """Whichever tensors ranks have alike, have alone, or have tied; and nothing that is alike everywhere is stored twice."""
    storage = MemoryDriver()
    save_as_ranks(storage, ranks)
    for rank, found in enumerate(load_as_ranks(storage, [blank(state) for state in ranks])):
        assert difference(ranks[rank], found) is None
