"""Measures the planning of a large simulated job on each rank and on the leader: Llama-3 405B with
Adam.

The engine's own functions get the input of that job's ranks: tensors of the right names, shapes
and placements, whose memory is never touched. Ranks run one after the other, so a laptop is enough;
the messages of all ranks are merged. Times are processor times on one core.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..planner.loading import plan_load
from ..storage.format.fragment import StateLayout, decode_fragment
from ..storage.format.manifest import Manifest, VerifiedManifest, check_complete
from ..storage.format.merge import merge
from ..storage.state.filling.targets import match
from ..storage.state.flattening.flatten import flatten
from ..storage.state.plan import Agreed, plan_save
from .llama import KINDS, MODEL, TINY, Job, agreed_by_mesh, fragments
from .machine import PeakMemory, map_large_blocks
from .program import Options, Program
from .report import Report, Series, Target
from .simulated.fleet import by_host, fragment_told

__all__: list[str] = []

DATA_PARALLEL = (8, 70, 128, 781)
"""Data-parallel sizes. With TP 8 and PP 16: 1,024, 8,960, 16,384 and 99,968 ranks."""
MERGED_RANKS_MAX = 100_000
JUDGED_RANKS = 8_960
"""Size of the jobs with targets."""
SAMPLES = 5
REPEATS = 9
MIB = 1 << 20


@dataclass
class Found:
    """Result for one job. Times are seconds of one processor, per rank or on the leader."""

    job: Job
    first_s: list[float] = field(default_factory=list)
    again_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    tensors: int = 0
    shards: list[int] = field(default_factory=list)
    fragment_nbytes: list[int] = field(default_factory=list)
    again_nbytes: list[int] = field(default_factory=list)
    host_nbytes: int = 0
    """First message of a host to the leader."""
    merge_s: float = 0.0
    merge_nbytes: int = 0
    decode_s: float = 0.0
    """Decoding and checking the manifest, which one rank per host does."""
    verified_s: list[float] = field(default_factory=list)
    """Decoding the rows that a rank wants, which the other ranks do."""
    verified_nbytes: int = 0
    manifest_nbytes: int = 0
    stored: int = 0
    """Shards of all ranks."""

    @property
    def name(self) -> str:
        return f"{self.job.kind}, {self.job.world:,} ranks"

    def row(self) -> list[str]:
        """Return the columns; zeros are of parts that were not run."""
        figures = [figure for _, figure in self.figures()]
        return [self.name, *(f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in figures)]

    def figures(self) -> list[tuple[str, float]]:
        """Return the figures with their names and units."""
        return [
            ("tensors", self.tensors),
            ("shards", max(self.shards)),
            ("first ms", max(self.first_s) * 1e3),
            ("again ms", max(self.again_s) * 1e3),
            ("fragment kB", max(self.fragment_nbytes) / 1e3),
            ("again kB", max(self.again_nbytes) / 1e3),
            ("host kB", self.host_nbytes / 1e3),
            ("merge s", self.merge_s),
            ("merge MiB", self.merge_nbytes / MIB),
            ("manifest MB", self.manifest_nbytes / 1e6),
            ("checking it s", self.decode_s),
            ("of it ms", max(self.verified_s, default=0) * 1e3),
            ("of it MiB", self.verified_nbytes / MIB),
            ("load plan ms", max(self.load_s, default=0) * 1e3),
        ]


GROWING: dict[str, Callable[[Found], float]] = {
    "a first plan per tensor and shard": lambda f: (
        statistics.median(f.first_s) / (f.tensors + statistics.median(f.shards))
    ),
    "merge per shard": lambda f: f.merge_s / f.stored,
    "a merge's memory per shard": lambda f: f.merge_nbytes / f.stored,
    "a manifest per shard": lambda f: f.manifest_nbytes / f.stored,
}
"""Figures that should hardly grow with the number of ranks."""


def _targets(all_found: Sequence[Found]) -> list[Target]:
    """Return the targets of the jobs with :data:`JUDGED_RANKS`, and the limits of growth, each
    relative to the smallest job of the same kind."""
    out = []
    judged = [found for found in all_found if found.job.world == JUDGED_RANKS]
    if judged:
        bounds = {
            "first ms": 1000.0,
            "again ms": 5.0,
            "merge s": 10.0,
            "manifest MB": 100.0,
            "load plan ms": 1000.0,
        }
        for name, bound in bounds.items():
            worst = max(dict(found.figures())[name] for found in judged)
            title = f"{name}, {JUDGED_RANKS:,} ranks"
            out.append(Target(title, worst, bound, at_least=False))
    merged = sorted((found for found in all_found if found.stored), key=lambda f: -f.job.world)
    least = {found.job.kind: found for found in merged}
    for name, of in GROWING.items():
        grown = max((of(found) / of(least[found.job.kind]) for found in merged), default=1.0)
        out.append(Target(f"growth of {name} with the ranks", grown, 1.5, at_least=False))
    return out


def _sample(found: Found, rank: int) -> None:
    """Plan for one rank, from its state to its fragment, a first time and again."""
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


def _given(kept: Any) -> Any:
    """Return new containers of the same tensors, as modules and optimizers do on each call."""
    if isinstance(kept, dict):
        return {key: _given(item) for key, item in kept.items()}
    return kept


def _commit(found: Found, told: Sequence[bytes]) -> bytes:
    """Merge the fragments of all hosts, as the leader does, and return the manifest."""
    known: dict[bytes, StateLayout] = {}
    with PeakMemory() as memory:
        began_s = time.process_time()
        merged = merge([decode_fragment(data, "a fragment", known) for data in told])
        data = merged.encode()
        found.merge_s = time.process_time() - began_s
    found.merge_nbytes = memory.nbytes
    found.manifest_nbytes = len(data)
    found.host_nbytes = max(map(len, told))
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
    for rank in _samples(job.world):
        _sample(found, rank)
    if job.world <= merged_max:
        with _without_collector():
            told = [fragment.encode() for fragment in by_host(fragments(job))]
        _load(found, _commit(found, told), target)
    print("  " + "  ".join(found.row()), flush=True)
    return found


def _report(given: Options, folder: Path) -> Report:
    map_large_blocks()
    model, tp, pp, sizes = MODEL, 8, 16, given.own.dp
    if given.tiny:
        model, tp, pp, sizes = TINY, 2, 2, (4, 16)
    found = [
        _measured(
            Job(model, kind, tp, pp, dp),
            Job(model, "ZeRO-3", tp, pp // 2, dp),
            given.own.merged_ranks_max,
        )
        for kind in given.own.kinds
        for dp in sizes
    ]
    return Report(
        "Planning of Llama-3 405B with Adam, TP 8 × PP 16 × DP; the slowest of some ranks, "
        "processor time",
        ["", *(name for name, _ in found[0].figures())],
        [f.row() for f in found],
        _targets(found),
        series=[
            Series(f"{f.name}: {what}", s)
            for f in found
            for what, s in (("first", f.first_s), ("again", f.again_s))
        ],
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dp", type=int, nargs="+", default=DATA_PARALLEL, help="data-parallel ranks of each job"
    )
    parser.add_argument(
        "--merged-ranks-max", type=int, default=MERGED_RANKS_MAX, help="larger jobs are not merged"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="what data parallelism splits"
    )


main = Program("planning", __doc__, _report, own=_add_options)


if __name__ == "__main__":
    sys.exit(main())
