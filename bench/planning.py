"""What planning costs each rank of a large job, and the rank that commits: Llama-3 405B with Adam,
simulated.

The engine's own functions get what the ranks of such a job would have: tensors of the right names,
shapes and placements, whose memory is never touched. Ranks come one after the other, so a laptop
will do; what they would send is merged for all of them. Times are of the processor: on one core,
without what else the machine does meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..planner.layout import MeshLayout
from ..planner.loading import plan_load
from ..planner.placement import Replicated, Split, holders, local_pieces, local_shape
from ..storage.format.digest import digest
from ..storage.format.fragment import (
    Fragment,
    Group,
    StateLayout,
    decode_fragment,
    fragment_of,
    join,
)
from ..storage.format.manifest import Manifest, check_complete
from ..storage.format.merge import merge
from ..storage.format.tables import ImageTable
from ..storage.format.verified import VerifiedManifest
from ..storage.operations.global_plan import GlobalPlan, Route
from ..storage.operations.held import Held
from ..storage.operations.plan_leader import PlanLeader
from ..storage.operations.rounds import Findings, SaveStatement
from ..storage.ranks.messages import codec
from ..storage.runtime.engine import start
from ..storage.state.flat_state import FlatState
from ..storage.state.flatten import flatten
from ..storage.state.plan import Agreed, ImagePlan, plan_image, plan_save
from ..storage.state.targets import match
from .llama import KINDS, RNG_NBYTES, TINY, Job, Model, placement_of
from .machine import PeakMemory, describe
from .options import bare_parser
from .report import Report, Series, Target

__all__: list[str] = []

HEAD = ("20260101T000000-00000000", 100, 0.0)
URI = "s3://bucket/run/step-100"
DATA_PARALLEL = (8, 70, 128, 781)
"""Times TP 8 and PP 16: 1,024, 8,960, 16,384 and 99,968 ranks."""
TARGETS = 8960
MERGED_RANKS_MAX = 100_000
APART_RANKS_MAX = 8_960
"""In larger jobs not each rank plans by itself."""
HOST_RANKS = 8
SAMPLES = 5
REPEATS = 9
MIB = 1 << 20

_Kind = tuple[tuple[int, ...], tuple[Replicated | Split, ...]]


@dataclass
class _Found:
    """What was measured of one job; seconds of one processor, per rank or of the committing rank."""

    job: Job
    first_s: list[float] = field(default_factory=list)
    again_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    tensors: int = 0
    shards: list[int] = field(default_factory=list)
    fragment_nbytes: list[int] = field(default_factory=list)
    again_nbytes: list[int] = field(default_factory=list)
    host_nbytes: int = 0
    """What a host tells the leader at first."""
    stated_nbytes: tuple[int, int] = (0, 0)
    """What a rank says when a save begins, at first and again."""
    lead_s: tuple[float, float] = (0.0, 0.0)
    merge_s: float = 0.0
    merge_nbytes: int = 0
    decode_s: float = 0.0
    """To decode and check it: one rank of a host does."""
    verified_s: list[float] = field(default_factory=list)
    """To decode of it what a rank wants: the others do."""
    verified_nbytes: int = 0
    manifest_nbytes: int = 0
    stored: int = 0
    """Shards of all ranks."""

    @property
    def name(self) -> str:
        return f"{self.job.kind}, {self.job.world:,} ranks"

    def row(self) -> list[str]:
        stated = (f"{n / 1e3:.1f}" for n in self.stated_nbytes)
        lead = (f"{s:.2f}" for s in self.lead_s)
        if any(self.stated_nbytes):
            begun = [*stated, *lead]
        else:
            begun = ["–"] * 4
        whole = [
            f"{self.host_nbytes / 1e3:.0f}",
            f"{self.merge_s:.2f}",
            f"{self.merge_nbytes / MIB:,.0f}",
        ]
        whole += [f"{self.manifest_nbytes / 1e6:.1f}", f"{self.decode_s:.2f}"]
        whole += [
            f"{max(self.verified_s, default=0) * 1e3:.0f}",
            f"{self.verified_nbytes / MIB:.0f}",
        ]
        whole += [f"{max(self.load_s, default=0) * 1e3:.0f}"]
        return [
            self.name,
            f"{self.tensors}",
            f"{max(self.shards)}",
            f"{max(self.first_s) * 1e3:.1f}",
            f"{max(self.again_s) * 1e3:.1f}",
            f"{max(self.fragment_nbytes) / 1e3:.1f}",
            f"{max(self.again_nbytes) / 1e3:.1f}",
            *begun,
            *(whole if self.manifest_nbytes else ["–"] * len(whole)),
        ]


HEADER = ["", "tensors", "shards", "first ms", "again ms", "fragment kB", "again kB"]
HEADER += [
    "begin kB",
    "again kB",
    "leader s",
    "again s",
    "host kB",
    "merge s",
    "merge MiB",
    "manifest MB",
]
HEADER += ["checking it s", "of it ms", "of it MiB", "load plan ms"]


def _told(plan: ImagePlan, rank: int, flat: FlatState) -> Fragment:
    """What ``rank`` tells at commit, but for data."""
    digests = np.zeros((plan.layout.chunks, 16), np.uint8)
    images = ImageTable(np.array([rank]), np.array([plan.layout.hashed_end]), digests)
    return fragment_of(HEAD, rank, plan.reported, plan.shards, images, flat.tree)


def _agreed(flat: FlatState) -> Agreed:
    """What ranks agree on in such a job: all tensors lie as their mesh says, and the random state
    is each rank's own."""
    return Agreed({row: layout.holders or () for row, layout in enumerate(flat.layouts)}, {})


def _sample(found: _Found, rank: int) -> bytes:
    """Plan for one rank, from its state to its fragment, for the first time and again; return the
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
            agreed = _agreed(flat)
        told = _told(plan_save(flat, rank, agreed), rank, flat)
        data = told.encode()
        again_s.append(time.process_time() - began_s)
        tensors = len(flat.names)
        shards = len(told.groups[0].shards)
        nbytes = len(told.encode({told.groups[0].layout.key}))
        del (
            state,
            flat,
            told,
        )  # to let go of a state is no part of planning the next one: a training loop keeps it
    found.first_s.append(again_s.pop(0))
    found.again_s.append(statistics.median(again_s))
    found.tensors = max(found.tensors, tensors)
    found.shards.append(shards)
    found.fragment_nbytes.append(len(data))
    found.again_nbytes.append(nbytes)
    return data


def _given(kept: Any) -> Any:
    """What modules and optimizers give of a state: new containers each time, of the same tensors."""
    if isinstance(kept, dict):
        return {key: _given(item) for key, item in kept.items()}
    return kept


class _Stage:
    """The ranks of one pipeline stage, which hold the same tensors: flattened once, and moved from
    rank to rank."""

    def __init__(self, job: Job, rank: int) -> None:
        self._flat = flatten(job.state(rank))
        first = rank // (job.tp * job.dp) * job.tp * job.dp
        self._ranks = np.arange(first, first + job.tp * job.dp).reshape(job.shape)
        self._layout: StateLayout | None = None
        self._parts = dict[object, MeshLayout]()
        self._kinds = dict[_Kind, int]()  # layers repeat: of what is laid out alike, there are few
        self._kind = [self._kind_of(row) for row in range(len(self._flat.names))]
        self.kind = (tuple(self._kinds), tuple(self._kind))
        """What stages that differ in names alone have in common."""

    def _kind_of(self, row: int) -> int | None:
        flat = self._flat
        if flat.layouts[row].holders is None:
            return None
        placements = tuple(placement_of(p) for p in flat.origins[row].placements)  # type: ignore[union-attr]
        return self._kinds.setdefault((flat.shapes[row], placements), len(self._kinds))

    def at(self, rank: int) -> FlatState:
        """What ``rank`` has flattened."""
        at = tuple(int(n) for n in np.argwhere(self._ranks == rank)[0])
        layouts = [self._located(shape, at, placements) for shape, placements in self._kinds]
        moved = replace(
            self._flat,
            layouts=[
                known if kind is None else layouts[kind]
                for kind, known in zip(self._kind, self._flat.layouts, strict=True)
            ],
            layout_id=None,
        )
        for value in moved.tree.values:
            if value.key == "position":
                value.by_rank = [([0], 1000 + rank)]
        return moved

    def _located(
        self,
        shape: tuple[int, ...],
        at: tuple[int, ...],
        placements: tuple[Replicated | Split, ...],
    ) -> MeshLayout:
        """Where along an axis that replicates does not matter."""
        at = tuple(
            0 if isinstance(p, Replicated) else n for n, p in zip(at, placements, strict=True)
        )
        part = self._parts.get((shape, at, placements))
        if part is None:
            pieces = tuple(local_pieces(shape, self._ranks.shape, at, placements))
            local = local_shape(shape, self._ranks.shape, at, placements)
            part = MeshLayout(
                shape, pieces, local, holders(self._ranks, at, placements), self._ranks.size
            )
            self._parts[shape, at, placements] = part
        return part

    def told(self, rank: int, moved: FlatState) -> Fragment:
        """The fragment of ``rank``."""
        plan = plan_image(moved, rank, _agreed(moved))
        self._layout = self._layout or plan.reported
        return _told(
            replace(plan, reported=self._layout), rank, moved
        )  # whose layout is the same, and encoded once


def _commit(found: _Found, fragments: Sequence[bytes]) -> bytes:
    """Merge the fragments of all hosts, as the leader does; return the manifest."""
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


def _fragments(
    job: Job, expected: Mapping[int, bytes], stating: Callable[[int, FlatState], object]
) -> Iterator[Fragment]:
    """Those of all ranks, whose flat states are shown to ``stating``. Raises AssertionError where
    one is not as it should be."""
    for first in range(0, job.world, job.tp * job.dp):
        stage = _Stage(job, first)
        for rank in range(first, first + job.tp * job.dp):
            flat = stage.at(rank)
            told = stage.told(rank, flat)
            if rank in expected and told.encode() != expected[rank]:
                raise AssertionError(
                    "a rank that was moved tells something else than one that was made"
                )
            stating(rank, flat)
            yield told


class _Beginning:
    """What ranks say when a save begins, and what the leader does with it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.first: list[bytes] = []
        self._compared: list[bytes] = []
        self.again: list[bytes] = []
        self._statement = codec(SaveStatement)
        self._findings = codec(Findings)

    def state(self, rank: int, flat: FlatState) -> None:
        """At a first save, and at the next one. All but the random state lies on one mesh each."""
        held = Held.of(flat, rank, self._job.world)
        row = int(np.flatnonzero(held.mesh < 0)[0])
        fingerprint = digest(b"%d" % rank)
        route = Route([rank], [rank])
        plan = GlobalPlan(b"0" * 16, Agreed({}, {}), {}, {held.names[row]: row}, route)
        findings = Findings((row,), fingerprint, (RNG_NBYTES,), {})
        holdings = held.encode(f"host {rank // HOST_RANKS}")
        self.first.append(self._statement.encode(SaveStatement(URI, holdings=holdings)))
        self._compared.append(self._findings.encode(findings))
        followed = plan.followed({row: fingerprint})
        self.again.append(self._statement.encode(SaveStatement(URI, followed)))

    async def lead(self) -> tuple[float, float]:
        """Seconds of the leader, at a first save and at the next."""
        leader = PlanLeader()
        began_s = time.process_time()
        await leader.agree([self._statement.decode(data, "a statement") for data in self.first])
        await leader.decide([self._findings.decode(data, "findings") for data in self._compared])
        between_s = time.process_time()
        again = [self._statement.decode(data, "a statement") for data in self.again]
        if not (await leader.agree(again)).plan:
            raise AssertionError("the ranks do not follow their plan")
        return between_s - began_s, time.process_time() - between_s


def _fragments_by_twins(job: Job) -> Iterator[Fragment]:
    """Those of all ranks of a job that is too large to plan for each: stages of as many layers
    differ in names alone, so what was planned for the first of them is taken for the others. There,
    bytes may lie a page off: a header is longer."""
    size = job.tp * job.dp
    known = dict[object, list[Group]]()
    for first in range(0, job.world, size):
        stage = _Stage(job, first)
        one = stage.told(first, stage.at(first)).groups[0]
        if stage.kind not in known:
            known[stage.kind] = [
                stage.told(first + i, stage.at(first + i)).groups[0] for i in range(size)
            ]
        for i, group in enumerate(known[stage.kind]):
            ranks = np.array([first + i])
            values = [[([first + i], by[0][1])] for by in group.values]
            images = replace(group.images, rank=ranks)
            yield Fragment(
                HEAD, [replace(group, layout=one.layout, ranks=ranks, images=images, values=values)]
            )


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """It would go through hundreds of thousands of objects, over and over, that are here for all
    ranks at once."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _by_host(fragments: Iterator[Fragment]) -> Iterator[Fragment]:
    """Those of each host's ranks as one."""
    while host := list(itertools.islice(fragments, HOST_RANKS)):
        yield join(host)


def _load(found: _Found, data: bytes, target: Job) -> None:
    """Read the manifest, and plan loads of some ranks of another layout."""
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


def _measured(job: Job, target: Job, merged_max: int) -> _Found:
    found = _Found(job)
    beginning = _Beginning(job)
    told = {rank: _sample(found, rank) for rank in _samples(job.world)}
    if job.world <= merged_max:
        by_rank = job.world <= APART_RANKS_MAX
        if by_rank:
            fragments = _fragments(job, told, beginning.state)
        else:
            fragments = _fragments_by_twins(job)
        with _without_collector():
            data = [fragment.encode() for fragment in _by_host(fragments)]
        if by_rank:
            found.lead_s = start(beginning.lead()).result()
            found.stated_nbytes = max(map(len, beginning.first)), max(map(len, beginning.again))
        _load(found, _commit(found, data), target)
    print("  " + "  ".join(found.row()), flush=True)
    return found


def _targets(all_found: Sequence[_Found]) -> list[Target]:
    ours = [found for found in all_found if found.job.world == TARGETS]
    if not ours:
        figures = {}
    else:
        figures = {
            "first plan of a rank, s": (max(max(f.first_s) for f in ours), 1.0),
            "the same plan again, s": (max(max(f.again_s) for f in ours), 0.005),
            "merge, s": (max(f.merge_s for f in ours), 10.0),
            "manifest, MB": (max(f.manifest_nbytes for f in ours) / 1e6, 100.0),
            "load plan of a rank, s": (max(max(f.load_s) for f in ours), 1.0),
        }
    least = {f.job.kind: f for f in all_found if f.job.dp == min(o.job.dp for o in all_found)}
    grown = max(_per_row(f) / _per_row(least[f.job.kind]) for f in all_found)
    targets = [
        Target(f"{name}, {TARGETS:,} ranks", *figure, at_least=False)
        for name, figure in figures.items()
    ]
    most = max(f.job.world for f in all_found)
    growth = {"a first plan per tensor and shard": grown}
    growth |= {name: _growth(all_found, of) for name, of in PER_SHARD.items()}
    return targets + [
        Target(f"growth of {name}, to {most:,} ranks", n, 1.5, at_least=False)
        for name, n in growth.items()
    ]


PER_SHARD: dict[str, Callable[[_Found], float]] = {
    "merge per shard": lambda f: f.merge_s,
    "a merge's memory per shard": lambda f: f.merge_nbytes,
    "a manifest per shard": lambda f: f.manifest_nbytes,
}
"""What is to grow no faster than all shards, which each rank has a share of."""


def _growth(all_found: Sequence[_Found], of: Callable[[_Found], float]) -> float:
    """How much more it is per shard in some job than in the smallest of its kind."""
    merged = [f for f in all_found if f.manifest_nbytes]
    per_shard = {f.name: of(f) / f.stored for f in merged}
    least = {f.job.kind: per_shard[f.name] for f in sorted(merged, key=lambda f: -f.job.world)}
    return max((per_shard[f.name] / least[f.job.kind] for f in merged), default=0.0)


def _per_row(found: _Found) -> float:
    """Seconds of a first plan by what the rank has to plan."""
    return statistics.median(found.first_s) / (found.tensors + statistics.median(found.shards))


CURVES: dict[str, Callable[[_Found], float]] = {
    "first plan of a rank, ms": lambda f: max(f.first_s) * 1e3,
    "the same plan again, ms": lambda f: max(f.again_s) * 1e3,
    "what a rank tells, first, kB": lambda f: max(f.fragment_nbytes) / 1e3,
    "what a rank tells again, kB": lambda f: max(f.again_nbytes) / 1e3,
    "merge of all, s": lambda f: f.merge_s,
    "memory of the merge, MiB": lambda f: f.merge_nbytes / MIB,
    "manifest, MB": lambda f: f.manifest_nbytes / 1e6,
    "load plan of a rank, ms": lambda f: max(f.load_s) * 1e3,
}


def _draw(all_found: Sequence[_Found], file: Path) -> None:
    """Curves over the number of ranks. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, rows = plt.subplots(2, 4, figsize=(13, 6), layout="constrained")
    for axes, (title, of) in zip(rows.flat, CURVES.items(), strict=True):
        for kind in dict.fromkeys(f.job.kind for f in all_found):
            ours = [f for f in all_found if f.job.kind == kind and f.manifest_nbytes]
            axes.plot([f.job.world for f in ours], [of(f) for f in ours], marker="o", label=kind)
        axes.set_xscale("log")
        axes.set_xlabel("ranks")
        axes.set_title(title, fontsize="medium")
        axes.set_ylim(bottom=0)
    rows.flat[0].legend(fontsize="small")
    figure.savefig(file)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; raises AssertionError where a layout does not come together."""
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
    if given.tiny:
        model, tp, pp = (TINY, 2, 2)
    else:
        model, tp, pp = (Model(), 8, 16)
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
    report = Report(
        "planning",
        (
            "Planning of Llama-3 405B with Adam, TP 8 × PP 16 × DP; the slowest of some ranks, "
            "processor time"
        ),
        describe(given.dir),
        HEADER,
        [f.row() for f in found],
        [] if given.tiny else _targets(found),
        series=series,
    )
    report.emit(given.json)
    if given.svg:
        _draw(found, given.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
