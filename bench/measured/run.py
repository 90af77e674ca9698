"""Measures checkpoints on a storage: their phases take turns with their limits, round after round,
on all ranks at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

import holdfast

from ...drivers.uri import Uri, join
from ...errors import HoldfastError
from ..contest import Contestant
from ..place import clear
from ..states import State, zero
from ..workloads.changes import CHANGES
from ..workloads.materialised import materialise
from ..workloads.mlperf import Mlperf, deviations
from .beside import Beside
from .course import Course, Found, Noted, Say, measured_by
from .plan import Plan
from .ranks import LEAVE_S, Ranks
from .result import Measurement, Phase

RUN = "run"
STORED = f"{RUN}/first"
SAVED = f"{RUN}/second"
STEP = 1
"""Checkpoints below the place: one that is replaced and read, and one that is saved and deleted
again."""


def measured(
    plan: Plan, say: Say = lambda line: None, ranks: Ranks | None = None, place: Uri | None = None
) -> Measurement:
    """Measure according to a plan that :func:`.plan.check` has accepted. Every rank calls this;
    rank 0 calls ``say`` for each round. ``place`` is by default a new folder below the URI, and is
    deleted afterwards, also on interruption. Raises the errors of saves and loads."""
    place = place or plan.new_place()
    # The layer "metrics" counts storage operations.
    counting = replace(place, options={**place.options, "metrics": "true"})
    return measured_by(partial(_measured, plan), plan, say, ranks=ranks, place=counting)


def _measured(plan: Plan, course: Course, place: Uri) -> Found:
    ranks = course.ranks
    specs = plan.saved.specs(ranks.rank, ranks.world)
    state = materialise(specs, ranks.rank, ranks.world, content=plan.content)
    own = Phases(place, state, plan, course)
    beside = Beside(plan, place, state, own.nbytes, course)
    nbytes_of = _nbytes_of_phases(own, beside, ranks)
    own.prepare()
    phases = course.run(beside.writing(list(own.writing())), nbytes_of)
    reading = beside.reading(list(own.reading()))
    phases += course.run([course.cold(each, place, own.nbytes) for each in reading], nbytes_of)
    own.save_another()
    phases.append(course.once("prune", nbytes_of("prune"), own.prune))
    phases.append(course.once("delete", nbytes_of("delete"), own.delete))
    return Found(
        _config(plan, ranks, phases),
        phases,
        beside.limits,
        beside.invalid,
        mlperf_notes(plan, ranks.host_ranks) + own.incremental_notes(),
    )


def _nbytes_of_phases(own: Phases, beside: Beside, ranks: Ranks) -> Callable[[str], int]:
    """Return a function that maps a phase's name to the bytes that all ranks together move."""
    told = ranks.gather([own.nbytes, beside.nbytes])
    state_nbytes = sum(nbytes for nbytes, _ in told)

    def nbytes_of(name: str) -> int:
        return sum(nbytes[name] for _, nbytes in told if name in nbytes) or state_nbytes

    return nbytes_of


def _config(plan: Plan, ranks: Ranks, phases: Sequence[Phase]) -> Mapping[str, Any]:
    return {
        "workload": ", ".join(filter(None, (plan.saved.name, plan.change))),
        "content": plan.content.name,
        "nbytes": next(phase.nbytes for phase in phases if phase.name == "save"),
        "runs": plan.runs,
        "settle_s": plan.settle_s,
        "ranks": ranks.world,
        "hosts": len(ranks.host_ranks),
        "compression": plan.compression,
        "peers": plan.peers,
        "driver_alone": plan.driver_alone,
    }


def mlperf_notes(plan: Plan, host_processes: tuple[int, ...] = (1,)) -> tuple[str, ...]:
    """Return the departures from the rules of MLPerf Storage in words; none for other workloads."""
    if not isinstance(plan.saved, Mlperf):
        return ()
    found = deviations(plan.saved, host_processes, plan.runs, plan.settle_s)
    return tuple(f"MLPerf Storage: {sentence}" for sentence in found)


class Phases:
    """The phases of checkpoints, as each rank runs them. This rank holds ``nbytes`` of
    ``state``."""

    def __init__(self, place: Uri, state: State, plan: Plan, course: Course) -> None:
        self.nbytes = sum(_local(value).nbytes for value in state.values())
        self._incremental: holdfast.SaveReport | None = None
        self._place = place
        self._state = state
        self._plan = plan
        self._course = course

    def prepare(self) -> None:
        """Save the checkpoint that later phases replace and read. This also moves imports and
        start-up costs out of the phases."""
        self._save(STORED)

    def writing(self) -> Iterator[Contestant]:
        """Yield the phases that write."""
        yield Contestant("save", lambda: self._saving("save", SAVED), after=self._clear_saved)
        yield Contestant("async save", self._save_in_background, after=self._clear_saved)
        if self._plan.change is None:
            yield Contestant("overwrite", lambda: self._saving("overwrite", STORED))
        else:
            yield Contestant("incremental save", self._save_incrementally, self._change)

    def reading(self) -> Iterator[Contestant]:
        """Yield the phases that read."""
        yield self._loading("load", self._state)
        if self._course.ranks.world > 1:
            resharded = {key: _by_columns(value) for key, value in self._state.items()}
            yield self._loading("reshard", resharded)
        yield Contestant("verify", self._verify)

    def save_another(self) -> None:
        """Save a later step, so that the first one can be pruned."""
        self._save(SAVED, STEP + 1)

    def prune(self) -> None:
        """Delete all steps but the last."""
        found = holdfast.prune(self._uri(RUN), keep_last=1, idle_s=0)
        if len(found.checkpoints) != 1:
            raise AssertionError(f"{len(found.checkpoints)} checkpoints were pruned, not one")

    def delete(self) -> None:
        """Delete a checkpoint."""
        clear(join(self._place, SAVED))

    def _uri(self, name: str) -> str:
        return str(join(self._place, name))

    def _saving(self, phase: str, name: str) -> None:
        _count(self._course.note(phase), self._save(name))

    def _save(self, name: str, step: int = STEP, base: str | None = None) -> holdfast.SaveReport:
        compression = self._plan.compression
        return holdfast.save(
            self._uri(name), self._state, step=step, compression=compression, base=base
        )

    def _change(self) -> None:
        CHANGES[self._plan.change or ""]([*map(_local, self._state.values())])

    def _save_incrementally(self) -> None:
        """Replace the checkpoint that the changes began with."""
        self._incremental = self._save(STORED, base=self._uri(STORED))
        _count(self._course.note("incremental save"), self._incremental)

    def incremental_notes(self) -> tuple[str, ...]:
        """Return the bytes that all ranks wrote in the last incremental save, and why any rank
        wrote everything; nothing if the plan has no changes. Every rank calls this."""
        if self._incremental is None:
            return ()
        last = self._incremental
        told = self._course.ranks.gather([last.written_nbytes, last.stored_nbytes, last.why_whole])
        written, stored = (sum(each[i] for each in told) for i in (0, 1))
        notes = [f"the last incremental save wrote {written:,} of {stored:,} bytes"]
        notes += sorted({f"incremental saves were whole: {each[2]}" for each in told if each[2]})
        return tuple(notes)

    def _save_in_background(self) -> None:
        noted = self._course.note("async save")
        began_s = time.perf_counter()
        handle = holdfast.async_save(
            self._uri(SAVED), self._state, step=STEP, compression=self._plan.compression
        )
        try:
            noted.stall_s.append(time.perf_counter() - began_s)
            handle.wait()
        except KeyboardInterrupt:
            # The folder will be deleted next, and a save still running would report an error.
            with contextlib.suppress(HoldfastError):
                handle.wait(LEAVE_S)
            raise
        assert handle.report is not None
        _count(noted, handle.report)

    def _clear_saved(self) -> None:
        self._course.ranks.meet()  # no rank may still be saving
        if self._course.ranks.rank == 0:
            clear(join(self._place, SAVED))

    def _loading(self, phase: str, into: State) -> Contestant:
        def load() -> None:
            noted = self._course.note(phase)
            holdfast.load(
                self._uri(STORED), into=into, on_report=lambda report: _count(noted, report)
            )

        return Contestant(phase, load, before=lambda: zero(self._state))

    def _verify(self) -> None:
        if self._course.ranks.rank:
            return  # one process verifies everything
        with holdfast.open(self._uri(STORED)) as checkpoint:
            found = checkpoint.verify()
        if not found.ok:
            raise AssertionError(f"{self._uri(STORED)} is damaged: {found.damages}")


def _count(noted: Noted, report: holdfast.SaveReport | holdfast.LoadReport) -> None:
    noted.retries += sum(stage.retries + stage.hedges for stage in report.stages.values())


def _by_columns(value: torch.Tensor) -> torch.Tensor:
    """Return a row-sharded tensor sharded by columns if the ranks divide it evenly, and others
    unchanged. The result shares the memory of ``value``, so only one of the two holds meaningful
    values."""
    if not isinstance(value, DTensor) or value.ndim != 2 or tuple(value.placements) != (Shard(0),):
        return value
    rows, columns = value.shape
    world = value.device_mesh.size()
    if rows % world or columns % world:
        return value
    local = value.to_local().view(rows, columns // world)
    return DTensor.from_local(local, value.device_mesh, [Shard(1)], run_check=False)


def _local(value: torch.Tensor) -> torch.Tensor:
    """Return the part that this rank holds."""
    return value.to_local() if isinstance(value, DTensor) else value
