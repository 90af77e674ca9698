"""The skeleton of the doors for trainers: saves and loads, and the folder of a run's checkpoints.

A door translates a trainer's hooks and configuration. When saves are waited for, which checkpoint
is the newest, and which ones are deleted is decided here and in :mod:`.newest`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ...drivers.uri import join
from ..api import async_save, load, save
from ..format.packed import Compression
from ..operations.location import UriLike
from ..operations.maintenance.prune import remove
from ..operations.options import Lazy
from ..operations.saving.handle import SaveHandle
from .newest import as_path_or_uri, resumable

__all__ = ["Door", "RunFolder"]


class Door:
    """The saves and loads of one rank, and the actions to run once its saves have succeeded."""

    def __init__(
        self,
        storage_options: Mapping[str, object] | None = None,
        compression: Compression | None = None,
    ) -> None:
        self.storage_options = dict(storage_options or {})
        self._compression = compression
        self._in_flight: list[SaveHandle] = []
        self._afterwards: list[Callable[[], object]] = []

    def save(
        self,
        uri: UriLike,
        state: object,
        *,
        lazy: Lazy | None = None,
        storage_options: Mapping[str, object] | None = None,
        **options: Any,
    ) -> SaveHandle | None:
        """Save; return None once it is committed, or else the handle of a save in flight.

        ``lazy``: as in :func:`holdfast.async_save`; None if the save is not asynchronous.
        ``storage_options`` are added to those of the door; ``options`` as in
        :func:`holdfast.save`.
        """
        options["storage_options"] = self.storage_options | dict(storage_options or {})
        options["compression"] = self._compression
        if lazy is None:
            save(uri, state, **options)
            return None
        handle = async_save(uri, state, lazy=lazy, **options)
        self._in_flight.append(handle)
        return handle

    def load(self, uri: UriLike, **options: Any) -> Any:
        """Load, after the saves in flight. ``options`` as in :func:`holdfast.load`."""
        self.wait()
        return load(uri, storage_options=self.storage_options, **options)

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
        """Wait for the saves in flight, then run the actions.

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
        self, folder: UriLike, prefix: str, storage_options: Mapping[str, object] | None
    ) -> None:
        self.folder = folder
        self._prefix = prefix
        self._storage_options = storage_options

    def uri(self, step: int) -> str:
        """Return the path or URI of a step's checkpoint; options of a URI stay at its end."""
        return as_path_or_uri(join(self.folder, f"{self._prefix}{step}"))

    def steps(self) -> list[int]:
        """Return the steps that the run may resume from, in ascending order."""
        numbers = [
            path.removeprefix(self._prefix)
            for path in resumable(self.folder, self._storage_options)
            if path.startswith(self._prefix)
        ]
        return sorted(int(number) for number in numbers if number.isdecimal())

    def retain(
        self, count: int, *, also: Collection[int | None] = (), before: int | None = None
    ) -> None:
        """Delete all checkpoints of :meth:`steps` but ``also`` and the newest, ``count`` in all.

        The newest one always stays. ``before``: neither count nor delete this step and later ones.
        """
        steps = [step for step in self.steps() if before is None or step < before]
        kept = {*steps[-1:], *(step for step in steps if step in also)}
        for step in reversed(steps):
            if len(kept) < count:
                kept.add(step)
        for step in steps:
            if step not in kept:
                remove(self.uri(step), storage_options=self._storage_options)
