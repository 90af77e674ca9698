"""Measures: phases in turn, round after round, each beside its limit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import holdfast

from ...drivers.uri import Uri, join
from ..clearing import clear
from ..contest import Contestant, contest
from ..machine import describe, drop_caches, processor_s, read_from_device_nbytes
from ..report import Series
from ..states import State, nbytes_of, zero
from ..workloads.materialised import materialise
from .alone import Alone
from .comparability import mlperf_notes
from .plan import Plan, local_folder
from .result import Measurement, Phase
from .validity import reasons_against

__all__ = ["measured"]

LOOK_S = 0.5
"""How long the machine is watched before, to see what else it does."""
SAVED = "saved"
STORED = "stored"
"""Checkpoints below the place: one that comes and goes, and one that is replaced and read."""

Say = Callable[[str], None]


def measured(plan: Plan, say: Say = lambda line: None) -> Measurement:
    """Measure a storage, for which :func:`.plan.check` has found nothing against it; ``say`` is
    told of each round.

    All is written to a folder of its own below the URI, which is deleted again, also when it is
    interrupted. Raises what saves and loads raise."""
    busy_before = _busy()
    place = plan.new_place()
    began_s = time.time()
    try:
        state = materialise(plan.saved.specs(0, 1), 0, 1, content=plan.content)
        run = _Run(place, state, plan, say)
        phases = [*run.writing(), *run.reading(), run.deleting()]
    finally:
        clear(place)
        holdfast.release_memory()
    reasons = reasons_against(phases, busy_before=busy_before, cold_shares=run.cold_shares)
    return Measurement(
        uri=plan.parsed.redacted,
        created_s=began_s,
        config={
            "workload": plan.saved.name,
            "content": plan.content.name,
            "nbytes": nbytes_of(state),
            "runs": plan.runs,
            "settle_s": plan.settle_s,
        },
        machine=describe(Path(local_folder(plan.parsed) or ".")),
        phases=tuple(phases),
        invalid=reasons,
        notes=mlperf_notes(plan),
    )


class _Run:
    """``cold_shares``: of phases that read from a file system of this host, the smallest part that
    came from the device in any round."""

    def __init__(self, place: Uri, state: State, plan: Plan, say: Say) -> None:
        self.cold_shares: dict[str, float] = {}
        self._place = place
        self._state = state
        self._plan = plan
        self._say = say
        self._nbytes = nbytes_of(state)
        self._alone = Alone(place, self._nbytes)
        self._folder = local_folder(place)
        self._retries: dict[str, int] = {}

    def writing(self) -> list[Phase]:
        """The phases that write."""
        holdfast.save(self._uri(STORED), self._state)  # and what is imported and started once
        return self._contest(
            [
                Contestant("write alone", self._alone.write),
                Contestant(
                    "save",
                    lambda: self._save("save", SAVED),
                    after=lambda: clear(join(self._place, SAVED)),
                ),
                Contestant("overwrite", lambda: self._save("overwrite", STORED)),
            ]
        )

    def reading(self) -> list[Phase]:
        """The phases that read what those have written."""
        return self._contest(
            [
                self._cold("read alone", self._alone.read),
                self._cold("load", self._load),
                self._cold("verify", lambda: _verify(self._uri(STORED))),
            ]
        )

    def deleting(self) -> Phase:
        """The end: a checkpoint is deleted, once."""
        began_s = time.perf_counter()
        clear(join(self._place, STORED))
        return Phase("delete", self._nbytes, (max(time.perf_counter() - began_s, 1e-9),))

    def _uri(self, name: str) -> str:
        return str(join(self._place, name))

    def _save(self, phase: str, name: str) -> None:
        self._count(phase, holdfast.save(self._uri(name), self._state))

    def _load(self) -> None:
        holdfast.load(
            self._uri(STORED),
            into=self._state,
            on_report=lambda report: self._count("load", report),
        )

    def _count(self, phase: str, report: holdfast.SaveReport | holdfast.LoadReport) -> None:
        again = sum(stage.retries + stage.hedges for stage in report.stages.values())
        self._retries[phase] = self._retries.get(phase, 0) + again

    def _cold(self, name: str, run: Callable[[], None]) -> Contestant:
        """Reads from the device, where this host can see to that; how far it did is noted."""
        folder = self._folder
        if folder is None:
            return Contestant(name, run)
        before_nbytes = 0

        def before() -> None:
            nonlocal before_nbytes
            if name == "load":
                zero(self._state)
            drop_caches(Path(folder))
            before_nbytes = read_from_device_nbytes()

        def after() -> None:
            share = (read_from_device_nbytes() - before_nbytes) / self._nbytes
            self.cold_shares[name] = min(share, self.cold_shares.get(name, share))

        return Contestant(name, run, before, after)

    def _contest(self, contestants: Sequence[Contestant]) -> list[Phase]:
        found = contest(contestants, self._plan.runs, self._plan.settle_s, self._say)
        return [self._phase(series) for series in found]

    def _phase(self, series: Series) -> Phase:
        alone = series.name.endswith("alone")
        return Phase(
            name=series.name,
            nbytes=self._alone.nbytes if alone else self._nbytes,
            seconds=tuple(series.seconds),
            cpu_s=tuple(series.own_processor_s),
            peak_nbytes=tuple(series.peak_nbytes),
            retries=self._retries.get(series.name, 0),
        )


def _verify(uri: str) -> None:
    with holdfast.open(uri) as checkpoint:
        found = checkpoint.verify()
    if not found.ok:
        raise AssertionError(f"{uri} is damaged: {found.damages}")


def _busy() -> float:
    """The part of all processors that is busy now."""
    _, before_s = processor_s()
    time.sleep(LOOK_S)
    _, after_s = processor_s()
    return (after_s - before_s) / (LOOK_S * (os.cpu_count() or 1))
