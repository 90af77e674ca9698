"""The skeleton of the doors for trainers: saves and loads, and the folder of a run's checkpoints.

A door translates a trainer's hooks and configuration. When saves are waited for, which checkpoint
is the newest, and which ones are deleted is decided here and in :mod:`.newest`, by the rules of
:mod:`..training`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeAlias

from ...drivers.uri import join
from ...errors import UriError
from ..api import begin, load, reach
from ..format.lineage import ROOT, Lineage
from ..format.packed import Compression
from ..operations.location import Place, UriLike
from ..operations.maintenance.listing import ListedCheckpoint, read_lineage
from ..operations.maintenance.prune import remove
from ..operations.options import Lazy, SaveOptions
from ..operations.saving.handle import SaveHandle
from ..ranks.process_group import Group, current_rank
from ..runtime.engine import check_may_wait, run
from ..training.retention import beyond
from ..training.run_lineage import RunLineage
from .newest import as_path_or_uri, is_resumable, listed_below

__all__ = ["Door", "RunFolder"]

_Options: TypeAlias = Mapping[str, object] | None


class _Lineage(RunLineage):
    """The lineage of the checkpoints in a folder, for a trainer that chooses by itself which of
    them it loads, and where it saves.

    A trainer that saves at a lower step than before has gone back: to the checkpoint that it loaded
    last, if it comes from this folder, else to the newest one before that step.
    """

    def __init__(self, root: Place) -> None:
        super().__init__(root)
        self._loaded: str | None = None
        self._last = -1

    def note_load(self, name: str) -> None:
        """Record that training continues from a checkpoint, if the next save is a later step."""
        self._loaded = name
        self._admits = False

    async def resume(self, name: str | None, step: int, *, goes_back: bool) -> None:
        """Record at once that training continues from ``step``: of the checkpoint ``name`` in this
        folder, or of one that is not ours. ``goes_back``: there are later ones that are not ours.
        """
        survey = await self.survey()
        found = next((c for c in survey.steps if c.path == name), None)
        if found is not None:
            await self.take_up(found, survey, record=not goes_back)
        live = [c for c in survey.steps if not c.abandoned]
        if goes_back or (found is None and live and (live[0].step or 0) > step):
            self._go_back(ROOT if found is None else found.branch, step)
            await self._record()
        self._admits = True

    async def admit_as(self, name: str, step: int | None) -> str:
        """Return the branch of a save at ``step`` as ``name``."""
        if step is not None:
            if step < self._last:
                self._admits = False
            self._last = step
        return await self._admit(name, step)

    async def _check_first(self, step: int | None) -> None:
        survey = await self.survey()
        loaded, self._loaded = self._loaded, None
        found = next((c for c in survey.steps if c.path == loaded), None)
        if step is not None and (found is None or (found.step or 0) > step):
            live = [c for c in survey.steps if not c.abandoned]
            found = None
            if any((c.step or 0) > step for c in live):
                earlier = [c for c in live if (c.step or 0) < step]
                if not earlier:
                    self._go_back(ROOT, -1)
                    return
                found = earlier[0]
        if found is not None:
            await self.take_up(found, survey, record=False)


class Door:
    """The saves and loads of one rank, and the actions to run once its saves have succeeded."""

    def __init__(
        self,
        storage_options: _Options = None,
        compression: Compression | None = None,
    ) -> None:
        self.storage_options = dict(storage_options or {})
        self._compression = compression
        self._in_flight: list[SaveHandle] = []
        self._afterwards: list[Callable[[], object]] = []
        self._lineages: dict[str, _Lineage] = {}

    def save(
        self,
        uri: UriLike,
        state: object,
        *,
        step: int | None = None,
        lazy: Lazy | None = None,
        overwrite: bool = True,
        storage_options: _Options = None,
        process_group: Group = None,
    ) -> SaveHandle:
        """Save; return once it is committed, or, if asynchronous, as :func:`holdfast.async_save`.

        The checkpoint continues the lineage of those in its folder. ``lazy``: None if the save is
        not asynchronous. ``storage_options`` extend the door's. Other arguments as in
        :func:`holdfast.save`.
        """
        options = SaveOptions(
            asynchronous=lazy is not None,
            lazy=lazy or False,
            compression=self._compression,
            overwrite=overwrite,
        )
        if not lazy:
            check_may_wait()
        lineage, name = self.lineage_of(uri, storage_options)
        admit = None if lineage is None else partial(lineage.admit_as, name, step)
        handle, future = begin(
            *(uri, state, step, options, self._storage(storage_options), process_group),
            admit=admit,
            logs_failure=lazy is not None,
        )
        if not lazy:
            reach(handle.durable if lazy is None else handle.captured, future)
        if lazy is not None:
            self._in_flight.append(handle)
        return handle

    def lineage_of(
        self, uri: UriLike, storage_options: _Options = None
    ) -> tuple[_Lineage | None, str]:
        """Return the lineage of the folder of a checkpoint, and its name there; None if the URI is
        invalid or has no folder."""
        try:
            folder, name = Place.of(uri, self._storage(storage_options)).divided()
        except UriError:
            return None, ""
        return self._lineages.setdefault(str(folder.uri), _Lineage(folder)), name

    def load(self, uri: UriLike, *, storage_options: _Options = None, **options: Any) -> Any:
        """Load, after the saves in flight. ``storage_options`` extend the door's; other ``options``
        as in :func:`holdfast.load`."""
        self.wait()
        return load(uri, storage_options=self._storage(storage_options), **options)

    def load_to_train(
        self, uri: UriLike, *, storage_options: _Options = None, **options: Any
    ) -> Any:
        """Load like :meth:`load`, to continue from there: the next save into the same folder
        abandons later checkpoints."""
        loaded = self.load(uri, storage_options=storage_options, **options)
        lineage, name = self.lineage_of(uri, storage_options)
        if lineage is not None:
            lineage.note_load(name)
        return loaded

    def _storage(self, options: _Options) -> dict[str, object]:
        return self.storage_options | dict(options or {})

    def remove(self, uri: UriLike) -> None:
        """Delete a checkpoint, once the saves in flight have succeeded."""
        self.afterwards(lambda: remove(uri, storage_options=self.storage_options))

    def afterwards(self, act: Callable[[], object]) -> None:
        """Call ``act`` once the saves in flight have succeeded: in the next wait(), or now if there
        are none.
        """
        self._afterwards.append(act)
        if not self._in_flight:
            self.wait()

    def wait_for_capture(self) -> None:
        """Wait until the saves in flight have captured their states."""
        for handle in self._in_flight:
            handle.captured.wait()

    def wait(self) -> None:
        """Wait for the saves in flight, then run the pending actions.

        Raises the error of the first failed save; then no action runs.
        """
        saves = self._in_flight
        afterwards = self._afterwards
        self._in_flight = []
        self._afterwards = []
        for handle in saves:
            handle.wait()
        for act in afterwards:
            act()


class RunFolder:
    """The checkpoints of a run below ``folder``: one per step, named ``prefix`` and the step."""

    def __init__(
        self, door: Door, folder: UriLike, prefix: str, storage_options: _Options = None
    ) -> None:
        """``storage_options`` extend the door's."""
        self.folder = folder
        self._door = door
        self._prefix = prefix
        self._storage = door.storage_options | dict(storage_options or {})

    def uri(self, step: int) -> str:
        """Return the path or URI of a step's checkpoint; options of a URI stay at its end."""
        return as_path_or_uri(join(self.folder, f"{self._prefix}{step}"))

    def steps(self, stock: Collection[int] = ()) -> list[int]:
        """Return the steps that the run may resume from, in ascending order. ``stock``: steps of
        checkpoints in the trainer's own format; the abandoned ones among them are left out."""
        found = {c.step for c in self._listed() if is_resumable(c) and c.step is not None}
        if stock:
            place = Place.of(self.folder, self._storage)
            lineage = run(_read_lineage(place))
            found |= {step for step in stock if lineage.is_live(ROOT, step)}
        return sorted(found)

    def uris(self) -> list[str]:
        """Return all checkpoints of the run, also abandoned and damaged ones."""
        return [self.uri(c.step or 0) for c in self._listed()]

    def _listed(self) -> list[ListedCheckpoint]:
        listed = listed_below(self.folder, self._storage)
        return [c for c in listed if c.path == f"{self._prefix}{c.step}"]

    def resumed(self, uri: UriLike | None, step: int, stock: Collection[int] = ()) -> None:
        """Record, on the first rank, that training continues from a checkpoint, so that later ones
        are abandoned. Does nothing for one in another folder. ``uri``: None for a checkpoint in the
        trainer's own format. ``stock`` as in :meth:`steps`."""
        lineage, name = self._door.lineage_of(self.uri(step))
        if uri is not None:
            found, name = self._door.lineage_of(uri)
            if found is not lineage:
                return
        if lineage is not None and current_rank() == 0:
            goes_back = max(stock, default=step) > step
            run(lineage.resume(name if uri is not None else None, step, goes_back=goes_back))

    def retain(
        self, count: int, *, also: Collection[int | None] = (), saving: int | None = None
    ) -> None:
        """Delete checkpoints by the rules of :func:`..training.retention.beyond`.

        ``saving``: a step in flight, neither to be counted nor deleted.
        """
        listed = [c for c in self._listed() if c.step != saving]
        for c in beyond(listed, count, also):
            uri = self.uri(c.step or 0)
            remove(uri, storage_options=self._storage)


async def _read_lineage(folder: Place) -> Lineage:
    async with folder.opened() as driver:
        return await read_lineage(driver)
