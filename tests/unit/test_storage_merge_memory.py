"""The leader of a large job merges within a few times the memory of the manifest's shards."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from holdfast.bench.simulated.fleet import FlatStates, by_host, fragment_told
from holdfast.bench.workloads.sized import sized
from holdfast.storage.format.fragment import Fragment, StateLayout, decode_fragment
from holdfast.storage.format.merge import merge
from holdfast.storage.state.plan import plan_image

WORLD = 256


def fragments() -> Iterator[Fragment]:
    """Yield the reports of all ranks of a job."""
    states, workload = FlatStates(WORLD), sized(64 << 20)
    for rank in range(WORLD):
        flat, agreed, _ = states.of(workload.specs(rank, WORLD), rank)
        yield fragment_told(plan_image(flat, rank, agreed), rank, flat)


@pytest.mark.nightly(11)
def test_a_merge_holds_shards_a_few_times() -> None:
    """The peak of a merge is a few times the shards' columns."""
    told = [fragment.encode() for fragment in by_host(fragments(), 8)]
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
    assert peak_nbytes / sum(column.nbytes for column in columns) < 4.4
