"""Checkpoints of Lightning's Trainer and Fabric: plugins that save and load what these put into a
checkpoint.

    Trainer(plugins=[HoldfastCheckpointIO()])

Where one rank holds all that is saved, as under DDP, Lightning hands it to the plugin there. The
strategies that shard the state save without plugins; those derived from them here save on all
ranks, through the plugin.

    Trainer(strategy=HoldfastModelParallelStrategy(), plugins=[HoldfastCheckpointIO()])

Scope: DeepSpeed's strategy is as it was.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from ...drivers.uri import parse
from ...errors import MismatchError, UsageError
from ..api import async_save, load, save
from ..format.packed import Compression
from ..operations.options import Lazy
from ..operations.remove import remove
from ..ranks.process_group import Group
from ..state.adapters.per_rank import PerRank
from .by_value import from_stored, to_stored
from .under_way import SavesUnderWay

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
"""Where all else of a checkpoint lies, which is not sharded."""


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
        checkpoint: dict[str, object],
        path: _PathLike,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        """Save; return when the checkpoint is committed. Called by the first rank alone."""
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
        """Save ``state``; return when it is committed. Called by every rank of the group."""
        save(
            path,
            state,
            step=step,
            process_group=process_group,
            storage_options=self._options(storage_options),
            compression=self._compression,
        )

    def load_checkpoint(
        self, path: _PathLike, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, object]:
        """The checkpoint, with its tensors on the CPU. Called by every rank by itself. Nothing that
        is stored can run code, so ``weights_only`` changes nothing."""
        if map_location not in (None, "cpu"):
            raise UsageError(
                f"map_location={map_location!r}: checkpoints are loaded to the CPU",
                advice="Leave it out: Lightning copies from there.",
            )
        self.wait()
        loaded = load(path, storage_options=self._storage_options)
        rest = loaded.pop(_REST, {})  # as the strategies below save it
        checkpoint: dict[str, object] = from_stored({**loaded, **rest})
        return checkpoint

    def load_state(
        self, path: _PathLike, into: dict[str, object], *, strict: bool
    ) -> dict[str, object]:
        """Fill ``into`` from what a strategy of this module has saved; return what else was saved,
        as Lightning made it. Called by every rank. Raises MismatchError where no such strategy has
        saved it."""
        self.wait()
        rest = PerRank(None)  # so that one load has both, on any number of ranks
        load(
            path,
            into={**into, _REST: rest},
            strict="state" if strict else False,
            storage_options=self._storage_options,
        )
        if rest.value is None:
            raise MismatchError(
                f"no strategy of {__name__} has saved it: it has no {_REST!r}",
                uri=parse(path).redacted,
                advice="Resume with the strategy that saved it.",
            )
        checkpoint: dict[str, object] = from_stored(rest.value)
        return checkpoint

    def remove_checkpoint(self, path: _PathLike) -> None:
        """Delete a checkpoint. Called by the first rank alone."""
        remove(path, storage_options=self._storage_options)

    def wait(self) -> None:
        """Nothing: a save that has returned is committed."""

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
        self._saves = SavesUnderWay()

    def save_state(
        self,
        state: dict[str, object],
        path: _PathLike,
        *,
        step: int | None,
        process_group: Group = None,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        """Begin to save, when saves of earlier steps have ended. Called by every rank of the
        group."""
        if step is None or step != self._step:
            self.wait()
        self._step = step
        handle = async_save(
            path,
            state,
            step=step,
            lazy=self._lazy,
            process_group=process_group,
            storage_options=self._options(storage_options),
            compression=self._compression,
        )
        self._saves.add(handle)

    def remove_checkpoint(self, path: _PathLike) -> None:
        """Delete a checkpoint, when the saves under way have succeeded."""
        self._saves.afterwards(partial(super().remove_checkpoint, path))

    def teardown(self) -> None:
        """Wait for the saves under way."""
        self.wait()
        super().teardown()

    def wait(self) -> None:
        """Wait for the saves under way, and delete what they have made useless. Raises what the
        first one that failed raised."""
        self._saves.wait()


class _SavesOnAllRanks(_Base):  # type: ignore[misc]  # its types are not installed
    """Stands before a strategy of Lightning's that shards the state: each rank saves the shards
    that it holds, through the Trainer's plugin, and any number of ranks loads them.

    Lightning's arguments that choose between sharded and full checkpoints change nothing.
    """

    _checkpoint_io: HoldfastCheckpointIO | None

    @property
    def checkpoint_io(self) -> HoldfastCheckpointIO:
        """The plugin that the Trainer was given; by default, one that saves synchronously."""
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
        """What hooks see of the model before a save, which saves the model itself."""
        return dict(self.model.named_parameters())

    def optimizer_state(self, optimizer: object) -> dict[str, object]:
        """Nothing: a save saves the optimizers themselves."""
        return {}

    def save_checkpoint(
        self,
        checkpoint: dict[str, object],
        filepath: _PathLike,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        """Save the model, the optimizers unless they are left out of ``checkpoint``, and what else
        is in it. Called by every rank. Raises UsageError if a hook has changed the model's state
        there."""
        rest = dict(checkpoint)
        self._refuse_changes(rest.pop(_MODEL))
        state: dict[str, object] = {_MODEL: self.model}
        if rest.pop(_OPTIMIZERS, None) is not None:
            state[_OPTIMIZERS] = list(self.optimizers)
        state[_REST] = to_stored(rest)
        self.checkpoint_io.save_state(
            state,
            self.broadcast(os.fspath(filepath)),
            step=_step_of(checkpoint),
            storage_options=storage_options,
        )

    def load_checkpoint(
        self, checkpoint_path: _PathLike, weights_only: bool | None = None
    ) -> dict[str, object]:
        """Load the model, and, for training, the optimizers; return what else was saved. Called by
        every rank. Nothing that is stored can run code, so ``weights_only`` changes nothing."""
        into: dict[str, object] = {_MODEL: self.model}
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            into[_OPTIMIZERS] = list(self.optimizers)
        return self.checkpoint_io.load_state(
            self.broadcast(os.fspath(checkpoint_path)),
            into,
            strict=self.lightning_module.strict_loading,
        )

    def teardown(self) -> None:
        """Wait for the saves under way."""
        try:
            self.checkpoint_io.teardown()
        finally:
            super().teardown()

    def _refuse_changes(self, given: object) -> None:
        ours = self.lightning_module_state_dict()
        found = dict(given) if isinstance(given, Mapping) else {}
        if found.keys() != ours.keys() or any(found[name] is not ours[name] for name in ours):
            raise UsageError(
                f'something has changed checkpoint["{_MODEL}"] before a save, in on_save_checkpoint'
                f" perhaps; {type(self).__name__} saves the model as it is",
                advice="Leave it as it is there, and put what else is to be saved beside it.",
            )


class HoldfastModelParallelStrategy(_SavesOnAllRanks, ModelParallelStrategy):  # type: ignore[misc]
    """Lightning's ModelParallelStrategy, FSDP2 and tensor parallelism, with checkpoints of
    Holdfast's."""


class HoldfastFSDPStrategy(_SavesOnAllRanks, FSDPStrategy):  # type: ignore[misc]
    """Lightning's FSDPStrategy, FSDP1, with checkpoints of Holdfast's."""


def _step_of(checkpoint: Mapping[str, object]) -> int | None:
    """The step that the checkpoint is recorded with; Fabric's have none."""
    step = checkpoint.get("global_step")
    return step if type(step) is int else None
