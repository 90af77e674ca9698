"""The leader of a large job merges within a few times the memory of the manifest's shards."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from holdfast.bench.llama import TINY, Job, fragments
from holdfast.bench.simulated.fleet import by_host
from holdfast.storage.format.fragment import StateLayout, decode_fragment
from holdfast.storage.format.merge import merge


@pytest.mark.nightly(11)
@pytest.mark.parametrize("kind", ["ZeRO-1", "ZeRO-3"])
def test_a_merge_holds_shards_a_few_times(kind: str) -> None:
    """The peak of a merge is 4.3 times the shards' columns."""
    told = [fragment.encode() for fragment in by_host(fragments(Job(TINY, kind, 2, 2, 64)))]
    known: dict[bytes, StateLayout] = {}
    gc.collect()
    tracemalloc.start()
    try:
        decoded = [decode_fragment(data, "a fragment", known) for data in told]
        tracemalloc.reset_peak()
        shards = merge(decoded).shards
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    columns = (shards.tensor, shards.offsets, shards.lengths, shards.image, shards.start)
    assert peak_nbytes / sum(column.nbytes for column in columns) < 4.8
