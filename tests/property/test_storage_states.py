"""Random states, saved and loaded, and the manifests in between."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.bits import (
    containers,
    difference,
    flipped_bits,
    fresh_uri,
    from_bytes,
    plain,
    raw,
)
from support.effort import examples
from support.ranks import load_as_ranks, save_as_ranks

import holdfast
from holdfast.core import safetensors as headers
from holdfast.drivers.memory import MemoryDriver
from holdfast.planner.image import BLOCKS_NAME
from holdfast.storage.format.fragment import Fragment, decode_fragment, fragment_of, join
from holdfast.storage.format.manifest import Manifest
from holdfast.storage.format.merge import merge
from holdfast.storage.format.tables import ImageTable
from holdfast.storage.state.fingerprint import unsure_rows
from holdfast.storage.state.flattening.flatten import flatten
from holdfast.storage.state.plan import Agreed, plan_save

DTYPES = [getattr(torch, name) for name in (*headers.DTYPES, "complex64", "complex128")]
NOT_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
few = examples(60, HealthCheck.data_too_large)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of any bits and any small shape, perhaps not contiguous."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    nbytes = math.prod(shape) * dtype.itemsize
    made = from_bytes(draw(st.binary(min_size=nbytes, max_size=nbytes)), dtype, shape)
    how = draw(st.sampled_from(["plain", "turned", "stepped", "array"]))
    if how == "turned":
        made = made.permute(tuple(reversed(range(made.ndim))))
    if how == "stepped" and made.ndim:
        made = made[::2]
    return made.contiguous().numpy() if how == "array" and dtype not in NOT_NUMPY else made


keys = st.sampled_from(["a", "b", "weight", "x/y", "é", "..", "__metadata__"]) | st.integers(0, 5)
leaves = (
    tensors()
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
)
states = st.dictionaries(keys, st.recursive(leaves, containers(keys), max_leaves=15), max_size=5)

ATTEMPT = "20200101T000000-00000000"


def blank(value: Any) -> Any:
    """Return a state of the same form, without any of the original's values."""
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
    """It comes back in new containers, and in another state of its form."""
    uri = fresh_uri()
    holdfast.save(uri, state, allow_empty=True)
    assert difference(state, holdfast.load(uri)) is None
    into = blank(state)
    assert difference(state, holdfast.load(uri, into=into)) is None


def fragments_of(states: list[Any]) -> list[Fragment]:
    """Return each rank's fragment, with all plain tensors its own."""
    made = []
    for rank, state in enumerate(states):
        flat = flatten(state)
        plan = plan_save(flat, rank, Agreed(dict.fromkeys(unsure_rows(flat, len(states)), ()), {}))
        wrote = len(plan.layout.start) > 0
        digests = np.full((plan.layout.chunks if wrote else 0, 16), rank, np.uint8)
        hashed = np.array([plan.layout.hashed_end] if wrote else [], np.int64)
        images = ImageTable(np.array([rank] if wrote else [], np.int64), hashed, digests)
        head = (ATTEMPT, 1, 1.5)
        made.append(fragment_of(head, rank, plan.reported, plan.shards, images, flat.tree))
    return made


@few
@given(st.lists(states, min_size=1, max_size=4), st.data())
def test_fragments_make_the_same_manifest_in_whichever_order_they_are_joined(
    ranks: list[Any], data: st.DataObject
) -> None:
    """Any tree of joins results in the same manifest."""
    told = fragments_of(ranks)
    try:
        expected = merge(told).encode()
    except holdfast.SaveError as error:
        assert "on one rank and a" in str(error)
        return
    while len(told) > 1:
        at = data.draw(st.integers(0, len(told) - 2))
        joined = join(told[at : at + 2]).encode()
        told[at : at + 2] = [decode_fragment(joined, "a fragment", {})]
    assert plain(Manifest.decode(merge(told).encode())) == plain(Manifest.decode(expected))


@few
@given(states, st.data())
def test_a_fragment_with_a_flipped_bit_is_refused(state: Any, data: st.DataObject) -> None:
    """Its checksum finds the bit, wherever it is."""
    whole = fragments_of([state])[0].encode()
    with pytest.raises(holdfast.DamagedError):
        decode_fragment(data.draw(flipped_bits(whole)), "a fragment", {})


@st.composite
def jobs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw states of ranks: some tensors shared, some own, some tied."""
    world = draw(st.integers(2, 3))
    pool = [torch.full((draw(st.integers(1, 5)), 3), float(i)) for i in range(3)]
    ranks: list[dict[str, Any]] = [{} for _ in range(world)]
    for name in draw(
        st.lists(st.sampled_from(["p", "q", "r", "s", "t", "u"]), unique=True, max_size=5)
    ):
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
    """Shared, own and tied tensors come back on every rank."""
    storage = MemoryDriver()
    save_as_ranks(storage, ranks)
    for rank, found in enumerate(load_as_ranks(storage, [blank(state) for state in ranks])):
        assert difference(ranks[rank], found) is None


def test_a_rank_with_more_of_its_own_writes_less_of_what_all_have() -> None:
    """Images are as even as the ranks' own tensors allow, also after shares change."""
    common = {"w": torch.arange(300_000.0).reshape(3000, 100), "b": torch.ones(100)}
    for own, expected in (
        (50_000, [350_000 / 3] * 3),
        (60_000, [120_000] * 3),
        (600_000, [600_000, 150_050, 150_050]),
    ):
        storage = MemoryDriver()
        ranks = [common | {"mine": torch.full((own,), 2.0)}, common, common]
        save_as_ranks(storage, ranks)
        manifest = Manifest.decode(asyncio.run(storage.get("manifest.safetensors")))
        nbytes = np.bincount(manifest.shards.image, manifest.shards.nbytes(manifest.tensors))
        assert nbytes.tolist() == pytest.approx([4 * n for n in expected], rel=0.02)
        for rank, found in enumerate(load_as_ranks(storage, [blank(state) for state in ranks])):
            assert difference(ranks[rank], found) is None


@few
@given(st.lists(states, min_size=1, max_size=3))
def test_safetensors_opens_every_image_of_any_states(ranks: list[Any]) -> None:
    """The safetensors library reads every stored tensor's dtype, shape and bits."""
    storage = MemoryDriver()
    try:
        save_as_ranks(storage, ranks)
    except holdfast.SaveError as error:
        assert "on one rank and a" in str(error)
        return
    manifest = Manifest.decode(asyncio.run(storage.get("manifest.safetensors")))
    t, s = manifest.tensors, manifest.shards
    images = [
        asyncio.run(storage.get(manifest.image_key(image))) for image in range(len(manifest.images))
    ]
    found = [by_start(image) for image in images]
    assert sum(map(len, found)) == len(s)
    flats = [flatten(state) for state in ranks]
    for shard, row in enumerate(s.tensor.tolist()):
        rank = max(0, int(t.owner[row]))
        original = next(
            f.locals[f.names.index(t.names[row])] for f in flats[rank:] if t.names[row] in f.names
        )
        tensor = found[s.image[shard]][int(s.start[shard])]
        assert raw(tensor) == raw(
            original[
                tuple(map(slice, s.offsets[shard], s.offsets[shard] + s.lengths[shard]))[
                    : original.ndim
                ]
            ]
        )
        if original.dtype not in (torch.complex64, torch.complex128):
            assert tensor.dtype == original.dtype


def by_start(image: bytes) -> dict[int, torch.Tensor]:
    """Return the tensors that safetensors reads, by the offset in the file."""
    first = 8 + int.from_bytes(image[:8], "little")
    header = json.loads(image[8:first])
    read = safetensors.torch.load(image)
    return {
        first + header[name]["data_offsets"][0]: tensor
        for name, tensor in read.items()
        if name != BLOCKS_NAME
    }
