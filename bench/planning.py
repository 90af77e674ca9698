"""Measures the planning of a large simulated job on each rank and on the leader: Llama-3 405B with
Adam.

The engine's own functions get the input of that job's ranks: tensors of the right names, shapes
and placements, whose memory is never touched. Ranks run one after the other, so a laptop is enough;
the messages of all ranks are merged. Times are processor times on one core.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..planner.loading import plan_load
from ..storage.format.fragment import StateLayout, decode_fragment
from ..storage.format.manifest import Manifest, check_complete
from ..storage.format.merge import merge
from ..storage.format.verified import VerifiedManifest
from ..storage.runtime.engine import start
from ..storage.state.filling.targets import match
from ..storage.state.flattening.flatten import flatten
from ..storage.state.plan import Agreed, plan_save
from .llama import KINDS, MODEL, TINY, Job
from .machine import PeakMemory, describe, map_large_blocks
from .options import bare_parser
from .planning_found import HEADER, Found, draw, targets_of
from .planning_ranks import (
    Beginning,
    agreed_by_mesh,
    fragments_by_twins,
    fragments_of,
)
from .report import Report, Series
from .simulated.fragments import by_host, fragment_told

__all__: list[str] = []

DATA_PARALLEL = (8, 70, 128, 781)
"""Data-parallel sizes. With TP 8 and PP 16: 1,024, 8,960, 16,384 and 99,968 ranks."""
MERGED_RANKS_MAX = 100_000
APART_RANKS_MAX = 8_960
"""Limit of jobs in which each rank plans for itself."""
SAMPLES = 5
REPEATS = 9


def _sample(found: Found, rank: int) -> bytes:
    """Plan for one rank, from its state to its fragment, a first time and again. Return the
    fragment."""
    job = found.job
    kept = job.state(rank)
    agreed = Agreed({}, {})
    again_s = list[float]()
    for attempt in range(1 + REPEATS):
        state = _given(kept)
        began_s = time.process_time()
        flat = flatten(state)
        if not attempt:
            agreed = agreed_by_mesh(flat)
        told = fragment_told(plan_save(flat, rank, agreed), rank, flat)
        data = told.encode()
        again_s.append(time.process_time() - began_s)
        tensors = len(flat.names)
        shards = len(told.groups[0].shards)
        nbytes = len(told.encode({told.groups[0].layout.key}))
        # Releasing the state is not part of planning: a training loop keeps it.
        del state, flat, told
    found.first_s.append(again_s.pop(0))
    found.again_s.append(statistics.median(again_s))
    found.tensors = max(found.tensors, tensors)
    found.shards.append(shards)
    found.fragment_nbytes.append(len(data))
    found.again_nbytes.append(nbytes)
    return data


def _given(kept: Any) -> Any:
    """Return new containers of the same tensors, as modules and optimizers do on each call."""
    if isinstance(kept, dict):
        return {key: _given(item) for key, item in kept.items()}
    return kept


def _commit(found: Found, fragments: Sequence[bytes]) -> bytes:
    """Merge the fragments of all hosts, as the leader does, and return the manifest."""
    known: dict[bytes, StateLayout] = {}
    with PeakMemory() as memory:
        began_s = time.process_time()
        merged = merge([decode_fragment(data, "a fragment", known) for data in fragments])
        data = merged.encode()
        found.merge_s = time.process_time() - began_s
    found.merge_nbytes = memory.nbytes
    found.manifest_nbytes = len(data)
    found.host_nbytes = max(map(len, fragments))
    return data


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Disable the garbage collector, which would repeatedly scan the hundreds of thousands of
    objects that exist here for all ranks at once."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _load(found: Found, data: bytes, target: Job) -> None:
    """Decode the manifest, and plan loads of some ranks of another layout."""
    began_s = time.process_time()
    whole = Manifest.decode(data)
    check_complete(whole, "the manifest")
    found.decode_s = time.process_time() - began_s
    found.stored = len(whole.shards)
    del whole
    for rank in _samples(target.world):
        state = target.state(rank)
        began_s = time.process_time()
        seen = VerifiedManifest.decode(data)
        seen_s = time.process_time()
        matched = match(flatten(state, loading=True), seen.manifest, rank, cast=False)
        wanted = matched.wanted.targets(seen.manifest.tensors.shape)
        matched_s = time.process_time()
        manifest = seen.with_shards_of(wanted.tensor)
        of_s = time.process_time()
        plan_load(manifest.tensors, manifest.shards, wanted, manifest.images.hashed_nbytes)
        found.load_s.append(time.process_time() - of_s + matched_s - seen_s)
        found.verified_s.append(seen_s - began_s + of_s - matched_s)
        if matched.missing or matched.mismatched:
            raise AssertionError(
                f"the other layout does not fit: {[*matched.missing, *matched.mismatched][:3]}"
            )
    with PeakMemory() as memory:
        VerifiedManifest.decode(data).with_shards_of(wanted.tensor)
    found.verified_nbytes = memory.nbytes


def _samples(world: int) -> list[int]:
    return sorted({int(at) for at in np.linspace(0, world - 1, SAMPLES)})


def _measured(job: Job, target: Job, merged_max: int) -> Found:
    found = Found(job)
    beginning = Beginning(job)
    told = {rank: _sample(found, rank) for rank in _samples(job.world)}
    if job.world <= merged_max:
        by_rank = job.world <= APART_RANKS_MAX
        if by_rank:
            fragments = fragments_of(job, told, beginning.state)
        else:
            fragments = fragments_by_twins(job)
        with _without_collector():
            data = [fragment.encode() for fragment in by_host(fragments)]
        if by_rank:
            found.lead_s = start(beginning.lead()).result()
            found.stated_nbytes = max(map(len, beginning.first)), max(map(len, beginning.again))
        _load(found, _commit(found, data), target)
    print("  " + "  ".join(found.row()), flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Raises AssertionError if a layout does not fit."""
    arguments = bare_parser("planning", __doc__, tiny="a small model on 16 and 64 ranks")
    arguments.add_argument(
        "--dp", type=int, nargs="+", default=DATA_PARALLEL, help="data-parallel ranks of each job"
    )
    arguments.add_argument(
        "--merged-ranks-max", type=int, default=MERGED_RANKS_MAX, help="larger jobs are not merged"
    )
    arguments.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="what data parallelism splits"
    )
    given = arguments.parse_args(argv)
    map_large_blocks()
    if given.tiny:
        model, tp, pp = (TINY, 2, 2)
    else:
        model, tp, pp = (MODEL, 8, 16)
    if given.tiny:
        sizes = (4, 16)
    else:
        sizes = given.dp
    found = [
        _measured(
            Job(model, kind, tp, pp, dp),
            Job(model, "ZeRO-3", tp, pp // 2, dp),
            given.merged_ranks_max,
        )
        for kind in given.kinds
        for dp in sizes
    ]
    series = [
        Series(f"{f.name}: {what}", s)
        for f in found
        for what, s in (("first", f.first_s), ("again", f.again_s))
    ]
    targets = targets_of(found)
    if given.tiny:
        targets = []
    report = Report(
        "planning",
        (
            "Planning of Llama-3 405B with Adam, TP 8 × PP 16 × DP; the slowest of some ranks, "
            "processor time"
        ),
        describe(given.dir),
        HEADER,
        [f.row() for f in found],
        targets,
        series=series,
    )
    report.emit(given.json)
    if given.svg:
        draw(found, given.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
