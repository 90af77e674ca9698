"""Checkpoints of Lightning's Trainer and Fabric: plugins that save and load what these put into a
checkpoint.

    Trainer(plugins=[HoldfastCheckpointIO()])

Scope: strategies in which one rank holds all that is saved, and hands it to a plugin, as DDP does.
Strategies that shard the state (FSDP, ModelParallel, DeepSpeed) save it by themselves, without
plugins.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from ...errors import UsageError
from ..api import async_save, load, save
from ..format.packed import Compression
from ..operations.handle import SaveHandle
from ..operations.options import Lazy
from ..operations.remove import remove
from .by_value import from_stored, to_stored

__all__ = ["HoldfastAsyncCheckpointIO", "HoldfastCheckpointIO"]

_PathLike = str | os.PathLike[str]


class HoldfastCheckpointIO(CheckpointIO):  # type: ignore[misc]  # its types are not installed
    """Saves a checkpoint of Lightning's at its path or URI, as a checkpoint of Holdfast's.

    ``storage_options`` and ``compression`` as in :func:`holdfast.save`. Values that cannot be saved
    without pickle are a StateError that names their path in the checkpoint.
    """

    def __init__(
        self,
        *,
        storage_options: Mapping[str, object] | None = None,
        compression: Compression | None = None,
    ) -> None:
        super().__init__()
        self._storage_options = dict(storage_options or {})
        self._compression = compression

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: _PathLike,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        """Save; return when the checkpoint is committed. Called by the first rank alone."""
        save(
            path,
            to_stored(checkpoint),
            step=_step_of(checkpoint),
            process_group="self",
            storage_options=self._options(storage_options),
            compression=self._compression,
        )

    def load_checkpoint(
        self, path: _PathLike, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint, with its tensors on the CPU. Called by every rank by itself. Nothing that
        is stored can run code, so ``weights_only`` changes nothing."""
        if map_location not in (None, "cpu"):
            raise UsageError(
                f"map_location={map_location!r}: checkpoints are loaded to the CPU",
                advice="Leave it out: Lightning copies from there.",
            )
        loaded: dict[str, Any] = from_stored(load(path, storage_options=self._storage_options))
        return loaded

    def remove_checkpoint(self, path: _PathLike) -> None:
        """Delete a checkpoint. Called by the first rank alone."""
        remove(path, storage_options=self._storage_options)

    def _options(self, storage_options: Mapping[str, object] | None) -> dict[str, object]:
        return self._storage_options | dict(storage_options or {})


class HoldfastAsyncCheckpointIO(HoldfastCheckpointIO):
    """As :class:`HoldfastCheckpointIO`; training goes on as soon as the checkpoint is copied to
    host memory, or, with ``lazy`` (see :func:`holdfast.async_save`), before that.

    A save waits for those of earlier steps, and so does the end of training. These raise the error
    of a save that has failed. What is to be deleted is deleted then, and only if the saves before
    it have succeeded: so at any moment there is a checkpoint that is whole.
    """

    def __init__(
        self,
        *,
        lazy: Lazy = False,
        storage_options: Mapping[str, object] | None = None,
        compression: Compression | None = None,
    ) -> None:
        super().__init__(storage_options=storage_options, compression=compression)
        self._lazy = lazy
        self._step: int | None = None
        """Of the saves that are under way."""
        self._saving: list[SaveHandle] = []
        self._outdated: list[_PathLike] = []

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: _PathLike,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        """Begin to save, when saves of earlier steps have ended. Called by the first rank
        alone."""
        step = _step_of(checkpoint)
        if step is None or step != self._step:
            self._finish()
        self._step = step
        handle = async_save(
            path,
            to_stored(checkpoint),
            step=step,
            lazy=self._lazy,
            process_group="self",
            storage_options=self._options(storage_options),
            compression=self._compression,
        )
        self._saving.append(handle)

    def load_checkpoint(
        self, path: _PathLike, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """As that of :class:`HoldfastCheckpointIO`, when the saves under way have ended."""
        self._finish()
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: _PathLike) -> None:
        """Delete a checkpoint, when the saves under way have succeeded."""
        self._outdated.append(path)
        if not self._saving:
            self._finish()

    def teardown(self) -> None:
        """Wait for the saves under way."""
        self._finish()
        super().teardown()

    def _finish(self) -> None:
        """Wait for the saves under way, and delete what they have made useless. Raises what the
        first one that failed raised."""
        saving = self._saving
        outdated = self._outdated
        self._saving = []
        self._outdated = []
        for handle in saving:
            handle.wait()
        for path in outdated:
            super().remove_checkpoint(path)


def _step_of(checkpoint: Mapping[str, Any]) -> int | None:
    """The step that the checkpoint is recorded with; Fabric's have none."""
    step = checkpoint.get("global_step")
    return step if type(step) is int else None
