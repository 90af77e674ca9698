"""Checkpoints of torchtitan: a checkpoint manager that its configuration selects.

    Trainer.Config(..., checkpoint=HoldfastCheckpointManager.Config(enable=True, interval=500))

It makes the same decisions as torchtitan's own manager (when to save, what to save, what to load),
but saves with Holdfast instead of DCP. ``async`` saves copy the state to host memory first;
``async_with_pinned_mem`` saves are lazy, and need no accelerator.

Scope: torchtitan itself handles Hugging Face's format, since it knows the models' names there, and
loads checkpoints written by DCP.
"""

from __future__ import annotations

import copy
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import distributed as dist
from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager

from ...drivers.uri import divided, parse
from ...errors import HoldfastError, UsageError
from ..operations.saving.handle import SaveHandle
from .doors import Door, RunFolder
from .newest import is_stock, stock_steps

__all__ = ["HoldfastCheckpointManager"]

_PREFIX = "step-"
_STOCK_FILE = ".metadata"
"""A file in each checkpoint of DCP."""
_log = logging.getLogger(__name__)


class HoldfastCheckpointManager(CheckpointManager):  # type: ignore[misc]  # its types are not installed
    """Saves ``step-500`` and so on below the configured folder, a path or a URI."""

    save_future: SaveHandle | None = None
    """The save in flight."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's own options, and some of :func:`holdfast.save`."""

        storage_options: dict[str, str] = field(default_factory=dict)
        """Storage options by name."""

        compression: Literal["lz4"] | None = None
        """``"lz4"`` compresses blocks that shrink."""

    def __init__(self, config: Config, **parts: Any) -> None:
        # Configured for synchronous saves without deletion, torchtitan's manager starts neither a
        # process group nor a thread, which would only serve its own saves.
        unaided = copy.copy(config)
        unaided.async_mode = "disabled"
        unaided.keep_latest_k = 0
        super().__init__(unaided, **parts)
        if self.enable:
            self.async_mode = AsyncMode(config.async_mode)
            self.keep_latest_k = config.keep_latest_k
            self._door = Door(config.storage_options, config.compression)
            self._purging = ThreadPoolExecutor(1, "holdfast-purge")
            self._purged: Future[None] | None = None

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> SaveHandle | None:
        """Save, or start an asynchronous save and return its handle."""
        if to_hf:
            super().dcp_save(state_dict, checkpoint_id, async_mode, to_hf=True)
            return None
        lazy = None
        if async_mode != AsyncMode.DISABLED:
            lazy = async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
        _, name = divided(parse(checkpoint_id))
        step = int(name.removeprefix(_PREFIX))
        handle = self._door.save(checkpoint_id, state_dict, step=step, lazy=lazy)
        return None if lazy is None else handle

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load into ``state_dict``; all its names must be in the checkpoint."""
        if from_hf or is_stock(checkpoint_id, _STOCK_FILE):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        self._door.load(checkpoint_id, into=state_dict, strict="state")
        self.states[MODEL].load_state_dict(state_dict)

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save this step if it is due; the last step is committed on return."""
        if not self._should_save(curr_step, last_step):
            return False
        self.maybe_wait_for_saving()
        if last_step:
            self._save_last_step(curr_step)
        else:
            self.save_future = self.dcp_save(
                self._flattened_model_states_sd(),
                self._create_checkpoint_id(curr_step),
                self.async_mode,
            )
            self._start_purge(curr_step)
        return True

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Load ``step``, or the newest one; without any, the configured initial checkpoint.

        Return whether there was anything to load.
        """
        if step == -1:
            step = self._find_load_step()
        if step != -1:
            self.dcp_load(
                self._states_to_load(model_only=step == 0),
                self._create_checkpoint_id(step),
                from_hf=False,
                from_quantized=False,
            )
            self._note_resumed(step)
            return True
        return self._load_initial()

    def _note_resumed(self, step: int) -> None:
        uri = self._create_checkpoint_id(step)
        ours = None if is_stock(uri, _STOCK_FILE) else uri
        self._run().resumed(ours, step, self._stock_steps())

    def _load_initial(self) -> bool:
        source = self.initial_load_path
        if self.initial_load_in_hf and not source:
            source = getattr(self.sd_adapter, "hf_assets_path", None)
            if not source:
                raise UsageError(
                    "initial_load_in_hf is set, and there is nothing to load",
                    advice="Set initial_load_path, or the model's hf_assets_path.",
                )
        if not source:
            return False
        self.dcp_load(
            self._states_to_load(self.initial_load_model_only),
            source,
            self.initial_load_in_hf,
            self.initial_load_in_hf_quantized,
        )
        return True

    def _find_load_step(self, folder: str = "") -> int:
        """Return the newest whole step of Holdfast or torchtitan that training has not abandoned by
        going back; -1 without any."""
        return max(self._run(folder).steps(self._stock_steps(folder)), default=-1)

    def _stock_steps(self, folder: str = "") -> list[int]:
        """Return the steps of the checkpoints that torchtitan itself has saved."""
        return stock_steps(folder or self.folder, _PREFIX, _STOCK_FILE)

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        """Return the path or URI of a step's checkpoint; options at the end of a URI stay there."""
        return self._run(folder).uri(step)

    def _run(self, folder: str = "") -> RunFolder:
        return RunFolder(self._door, folder or self.folder, _PREFIX)

    def _maybe_wait_for_staging(self) -> None:
        self._door.wait_for_capture()

    def _wait_for_saving(self) -> None:
        self.save_future = None
        self._door.wait()

    def _close(self) -> None:
        try:
            self.maybe_wait_for_saving()
        finally:
            self._purging.shutdown()
        if self._purged is not None:
            self._purged.result()

    def _start_purge(self, saving: int) -> None:
        """Start deleting checkpoints that keep_latest_k does not keep; ``saving`` is in flight.

        Raises an error of the previous deletion, if that has ended.
        """
        if self.keep_latest_k and dist.get_rank() == 0:
            if self._purged is not None and self._purged.done():
                self._purged.result()
            self._purged = self._purging.submit(self._purge, saving)

    def _purge(self, saving: int) -> None:
        """Delete checkpoints. Errors are logged; the next save tries again."""
        try:
            self._run().retain(self.keep_latest_k - 1, saving=saving)
        except HoldfastError as error:
            _log.warning("old checkpoints could not be deleted: %s", error)
