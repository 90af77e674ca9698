"""Checkpoints of Lightning's Trainer and Fabric: plugins and strategies.

    Trainer(plugins=[HoldfastCheckpointIO()])

If one rank holds the whole state, as under DDP, Lightning passes it to the plugin on that rank.
Lightning's strategies that shard the state save without plugins; their subclasses here save on all
ranks, through the plugin.

    Trainer(strategy=HoldfastModelParallelStrategy(), plugins=[HoldfastCheckpointIO()])

Scope: DeepSpeed's strategy is unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from ...drivers.uri import parse
from ...errors import MismatchError, UsageError
from ..format.packed import Compression
from ..operations.options import Lazy
from ..ranks.process_group import Group
from ..state.adapters.per_rank import PerRank
from .doors import Door
from .newest import is_stock
from .value_conversion import from_stored, to_stored

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _Base
else:
    _Base = object

__all__ = [
    "HoldfastAsyncCheckpointIO",
    "HoldfastCheckpointIO",
    "HoldfastFSDPStrategy",
    "HoldfastModelParallelStrategy",
]

_PathLike = str | os.PathLike[str]
_MODEL = "state_dict"
_OPTIMIZERS = "optimizer_states"
_REST = "trainer"
"""The key of everything in a checkpoint that is not sharded."""
_STOCK_FILE = "meta.pt"
"""A file in each sharded checkpoint of Lightning itself."""


class HoldfastCheckpointIO(CheckpointIO):  # type: ignore[misc]  # its types are not installed
    """Saves a Lightning checkpoint at its path or URI, as a Holdfast checkpoint.

    ``storage_options`` and ``compression`` as in :func:`holdfast.save`. Values that cannot be saved
    without pickle raise StateError with their path in the checkpoint.
    """

    def __init__(
        self,
        *,
        storage_options: Mapping[str, object] | None = None,
        compression: Compression | None = None,
    ) -> None:
        super().__init__()
        self._door = Door(storage_options, compression)
        self._lazy: Lazy | None = None
        self._step: int | None = None
        """The step of the saves in flight."""

    def save_checkpoint(
        self,
        checkpoint: dict[str, object],
        path: _PathLike,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        """Save, as :meth:`save_state`. Called by the first rank only."""
        _make_way(path)
        self.save_state(
            to_stored(checkpoint),
            path,
            step=_step_of(checkpoint),
            process_group="self",
            storage_options=storage_options,
        )

    def save_state(
        self,
        state: dict[str, object],
        path: _PathLike,
        *,
        step: int | None,
        process_group: Group = None,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        """Save ``state``; return once it is committed, or in flight if this plugin is asynchronous.

        Waits for saves of earlier steps. Called by every rank of the group. ``path`` must not be a
        file or a link.
        """
        if step is None or step != self._step:
            self.wait()
        self._step = step
        uri = parse(path)
        if self._lazy is not None and uri.scheme == "file":
            os.makedirs(os.path.dirname(uri.location), exist_ok=True)  # Lightning may link to it
        self._door.save(
            path,
            state,
            step=step,
            lazy=self._lazy,
            process_group=process_group,
            storage_options=storage_options,
        )
        replaced = Path(_replaced(path))
        if replaced.exists():
            self._door.afterwards(partial(replaced.unlink, missing_ok=True))

    def load_checkpoint(
        self, path: _PathLike, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, object]:
        """Return the checkpoint, with its tensors on the CPU. Called by every rank independently.

        Stored data cannot run code, so ``weights_only`` has no effect. A file is loaded as by
        Lightning itself, without pickle unless ``weights_only=False``.
        """
        if os.path.isfile(path):
            load = TorchCheckpointIO().load_checkpoint
            return _without_pickle(load, os.fspath(path), weights_only, map_location=map_location)
        if map_location not in (None, "cpu"):
            raise UsageError(
                f"map_location={map_location!r}: checkpoints are loaded to the CPU",
                advice="Leave it out: Lightning copies from there.",
            )
        loaded = self._door.load_to_train(path)
        rest = loaded.pop(_REST, {})  # as saved by the strategies below
        checkpoint: dict[str, object] = from_stored({**loaded, **rest})
        return checkpoint

    def load_state(
        self, path: _PathLike, into: dict[str, object], *, strict: bool
    ) -> dict[str, object]:
        """Fill ``into`` from a checkpoint of a strategy in this module; return the rest of it.

        Called by every rank. Raises MismatchError if no such strategy saved it.
        """
        rest = PerRank(None)  # so that one load gets both, on any number of ranks
        into = {**into, _REST: rest}
        self._door.load_to_train(path, into=into, strict="state" if strict else False)
        if rest.value is None:
            raise MismatchError(
                f"no strategy of {__name__} has saved it: it has no {_REST!r}",
                uri=parse(path).redacted,
                advice="Resume with the strategy that saved it.",
            )
        checkpoint: dict[str, object] = from_stored(rest.value)
        return checkpoint

    def remove_checkpoint(self, path: _PathLike) -> None:
        """Delete a checkpoint, once the saves in flight have succeeded.

        Called by the first rank only.
        """
        is_file = os.path.isfile(path)
        if not is_file:
            self._door.remove(path)
        if is_file or os.path.isfile(os.path.join(path, _STOCK_FILE)):
            self._door.afterwards(partial(TorchCheckpointIO().remove_checkpoint, path))

    def wait(self) -> None:
        """Wait for the saves in flight, then run pending deletions.

        Raises the error of the first failed save.
        """
        self._door.wait()

    def teardown(self) -> None:
        """Wait for the saves in flight."""
        self.wait()
        super().teardown()


class HoldfastAsyncCheckpointIO(HoldfastCheckpointIO):
    """Like :class:`HoldfastCheckpointIO`, but saves asynchronously.

    Training continues once the checkpoint is copied to host memory; with ``lazy`` (see
    :func:`holdfast.async_save`), even before that. A save waits for saves of earlier steps, and so
    does the end of training; both raise the error of a failed save. Deletions happen then too, and
    only if the saves before them succeeded, so there is a whole checkpoint at any moment.
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


class _SavesOnAllRanks(_Base):  # type: ignore[misc]  # its types are not installed
    """A mixin for Lightning strategies that shard the state: each rank saves its shards.

    Saves go through the Trainer's plugin, and any number of ranks can load them. Lightning's
    arguments that choose between sharded and full checkpoints have no effect.
    """

    _checkpoint_io: HoldfastCheckpointIO | None

    @property
    def checkpoint_io(self) -> HoldfastCheckpointIO:
        """The Trainer's plugin; by default, one that saves synchronously."""
        if self._checkpoint_io is None:
            self._checkpoint_io = HoldfastCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if not isinstance(io, HoldfastCheckpointIO):
            raise UsageError(
                f"{type(self).__name__} cannot save through a {type(io).__name__}",
                advice="Give the Trainer a HoldfastCheckpointIO, or no such plugin.",
            )
        self._checkpoint_io = io

    def lightning_module_state_dict(self) -> dict[str, object]:
        """Return the parameters for hooks to look at; a save stores the model itself."""
        return dict(self.model.named_parameters())

    def optimizer_state(self, optimizer: object) -> dict[str, object]:
        """Return an empty dict: a save stores the optimizers themselves."""
        return {}

    def save_checkpoint(
        self,
        checkpoint: dict[str, object],
        filepath: _PathLike,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        """Save the model, the rest of ``checkpoint``, and the optimizers unless it lacks them.

        Called by every rank. Raises UsageError if a hook has changed the model's state in
        ``checkpoint``.
        """
        rest = dict(checkpoint)
        self._refuse_changes(rest.pop(_MODEL))
        state: dict[str, object] = {_MODEL: self.model}
        if rest.pop(_OPTIMIZERS, None) is not None:
            state[_OPTIMIZERS] = list(self.optimizers)
        state[_REST] = to_stored(rest)
        if self.is_global_zero:
            _make_way(filepath)  # before the other ranks know it
        self.checkpoint_io.save_state(
            state,
            self.broadcast(os.fspath(filepath)),
            step=_step_of(checkpoint),
            storage_options=storage_options,
        )

    def load_checkpoint(
        self, checkpoint_path: _PathLike, weights_only: bool | None = None
    ) -> dict[str, object]:
        """Load the model and, for training, the optimizers; return the rest of the checkpoint.

        Called by every rank. Stored data cannot run code, so ``weights_only`` has no effect. A
        checkpoint of Lightning itself is loaded by Lightning, without pickle unless
        ``weights_only=False``.
        """
        path = self.broadcast(os.fspath(checkpoint_path))
        if os.path.isfile(path) or is_stock(path, _STOCK_FILE):
            return _without_pickle(super().load_checkpoint, path, weights_only)
        into: dict[str, object] = {_MODEL: self.model}
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            into[_OPTIMIZERS] = list(self.optimizers)
        strict = self.lightning_module.strict_loading
        return self.checkpoint_io.load_state(path, into, strict=strict)

    def teardown(self) -> None:
        """Wait for the saves in flight."""
        try:
            self.checkpoint_io.teardown()
        finally:
            super().teardown()

    def _refuse_changes(self, given: object) -> None:
        ours = self.lightning_module_state_dict()
        found = dict(given) if isinstance(given, Mapping) else {}
        if found.keys() != ours.keys() or any(found[name] is not ours[name] for name in ours):
            raise UsageError(
                f'checkpoint["{_MODEL}"] was changed before a save, perhaps in on_save_checkpoint; '
                f"{type(self).__name__} saves the model itself",
                advice="Leave it unchanged, and add other values to the checkpoint next to it.",
            )


class HoldfastModelParallelStrategy(_SavesOnAllRanks, ModelParallelStrategy):  # type: ignore[misc]
    """Lightning's ModelParallelStrategy (FSDP2, tensor parallelism) with Holdfast checkpoints."""


class HoldfastFSDPStrategy(_SavesOnAllRanks, FSDPStrategy):  # type: ignore[misc]
    """Lightning's FSDPStrategy (FSDP1) with Holdfast checkpoints."""


def _make_way(path: _PathLike) -> None:
    """Rename a file of Lightning itself until the checkpoint that replaces it is committed; delete
    a link, so that a save never replaces the checkpoint that it leads to."""
    if os.path.islink(path):
        os.unlink(path)
    elif os.path.isfile(path):
        os.replace(path, _replaced(path))


def _replaced(path: _PathLike) -> str:
    return f"{os.fspath(path)}.replaced"


def _without_pickle(
    load: Callable[..., dict[str, object]], path: str, weights_only: bool | None, **others: object
) -> dict[str, object]:
    """Load a checkpoint of Lightning itself, without pickle unless the caller allows it."""
    try:
        return load(path, weights_only=weights_only is not False, **others)
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":
            raise
        raise UsageError(
            f"Lightning has saved {path}, with objects that need pickle",
            advice="If you trust the file, pass weights_only=False to fit().",
        ) from error


def _step_of(checkpoint: Mapping[str, object]) -> int | None:
    """Return the step to record in the checkpoint; Fabric's checkpoints have none."""
    step = checkpoint.get("global_step")
    return step if type(step) is int else None
