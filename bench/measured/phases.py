"""The phases of checkpoints, as each rank runs them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import holdfast

from ...drivers.uri import Uri, join
from ...errors import HoldfastError
from ..clearing import clear
from ..contest import Contestant
from ..machine import drop_caches, read_from_device_nbytes
from ..states import State, zero
from .course import Course, Noted
from .layouts import in_another_layout
from .plan import Plan, local_folder
from .ranks import LEAVE_S, Ranks

__all__ = ["Phases"]

RUN = "run"
STORED = f"{RUN}/first"
SAVED = f"{RUN}/second"
STEP = 1
"""Checkpoints below the place: one that is replaced and read, and one that is saved and deleted
again."""


class Phases:
    """Phases of one rank, which holds ``nbytes`` of ``state``. ``cold_shares`` maps phases that
    read from a local file system to the smallest share that came from the device in any round."""

    def __init__(
        self, place: Uri, state: State, nbytes: int, plan: Plan, ranks: Ranks, course: Course
    ) -> None:
        self.cold_shares: dict[str, float] = {}
        self._place = place
        self._state = state
        self.nbytes = nbytes
        self._plan = plan
        self._ranks = ranks
        self._course = course
        self._folder = local_folder(place)

    def prepare(self) -> None:
        """Save the checkpoint that later phases replace and read. This also moves imports and
        start-up costs out of the phases."""
        self._save(STORED)

    def writing(self) -> Iterator[Contestant]:
        """Yield the phases that write."""
        yield Contestant("save", lambda: self._saving("save", SAVED), after=self._clear_saved)
        yield Contestant("async save", self._save_in_background, after=self._clear_saved)
        yield Contestant("overwrite", lambda: self._saving("overwrite", STORED))

    def reading(self) -> Iterator[Contestant]:
        """Yield the phases that read."""
        yield self._loading("load", self._state)
        if self._ranks.world > 1:
            yield self._loading("reshard", in_another_layout(self._state))
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

    def _save(self, name: str, step: int = STEP) -> holdfast.SaveReport:
        return holdfast.save(
            self._uri(name), self._state, step=step, compression=self._plan.compression
        )

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
        self._ranks.meet()  # no rank may still be saving
        if self._ranks.rank == 0:
            clear(join(self._place, SAVED))

    def _loading(self, phase: str, into: State) -> Contestant:
        def load() -> None:
            noted = self._course.note(phase)
            holdfast.load(
                self._uri(STORED), into=into, on_report=lambda report: _count(noted, report)
            )

        return Contestant(phase, load, before=lambda: zero(self._state))

    def _verify(self) -> None:
        if self._ranks.rank:
            return  # one process verifies everything
        with holdfast.open(self._uri(STORED)) as checkpoint:
            found = checkpoint.verify()
        if not found.ok:
            raise AssertionError(f"{self._uri(STORED)} is damaged: {found.damages}")

    def cold(self, contestant: Contestant) -> Contestant:
        """Return a contestant that reads from the device, if this host can drop its caches, and
        records the share that did."""
        folder = self._folder
        if folder is None:
            return contestant
        name = contestant.name
        before_nbytes = 0

        def before() -> None:
            nonlocal before_nbytes
            contestant.before()
            drop_caches(Path(folder))
            before_nbytes = read_from_device_nbytes()

        def after() -> None:
            read_nbytes = read_from_device_nbytes() - before_nbytes
            told = self._ranks.gather([read_nbytes, self.nbytes])
            share = sum(read for read, _ in told) / sum(nbytes for _, nbytes in told)
            self.cold_shares[name] = min(share, self.cold_shares.get(name, share))
            contestant.after()

        return replace(contestant, before=before, after=after)


def _count(noted: Noted, report: holdfast.SaveReport | holdfast.LoadReport) -> None:
    noted.retries += sum(stage.retries + stage.hedges for stage in report.stages.values())
