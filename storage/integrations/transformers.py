"""Checkpoints of Hugging Face's Trainer: one of Holdfast instead of the files of each part.

    class Trainer(HoldfastTrainerMixin, transformers.Trainer): ...

A checkpoint holds the model, the optimizer, the schedule, the scaler of losses, the random
generators of each rank, and the trainer's own state. The trainer reads the last of these from a
file; :meth:`HoldfastTrainerMixin.train` makes one in a temporary folder.

Models that DeepSpeed or FSDP have sharded are saved as such: each rank stores what it holds.

Scope: what Trainer saves to resume from. What ``save_model`` writes is what it ever was.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers.trainer_callback import ExportableState

from ...drivers.uri import join, parse
from ...errors import NotACheckpointError, UsageError
from ..api import async_save, load, save
from ..operations.listing import list_checkpoints
from ..operations.options import UriLike
from ..operations.remove import remove
from ..state.adapters.stateful import RNGState
from .engine_counters import counters_of, set_counters
from .newest import as_path_or_uri, newest_checkpoint
from .under_way import SavesUnderWay

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

__all__ = ["HoldfastTrainerMixin"]

_STATE_FILE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-([0-9]+)")


class HoldfastTrainerMixin(_Base):  # type: ignore[misc]  # its types are not installed
    """Stands before Trainer, or a class derived from it, among the bases of a class.

    ``checkpoints`` is the folder of the checkpoints, a path or a URI; by default, ``output_dir``.
    ``storage_options`` as in :func:`holdfast.save`.

    ``asynchronous``: training goes on as soon as a checkpoint is copied to host memory, or, if it
    is ``"lazy"`` (see :func:`holdfast.async_save`), before that. A save waits for the one before,
    and so do the end of training and whatever loads the best model. These raise the error of a save
    that has failed. Old checkpoints are deleted then, and only if that save has succeeded: so at
    any moment there is a checkpoint that is whole.
    """

    def __init__(
        self,
        *args: Any,
        checkpoints: UriLike | None = None,
        storage_options: Mapping[str, object] | None = None,
        asynchronous: bool | Literal["lazy"] = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._checkpoints = self.args.output_dir if checkpoints is None else checkpoints
        self._storage_options = storage_options
        self._asynchronous = asynchronous
        self._saves = SavesUnderWay()
        self._resumed_from = ""
        self._counters: Mapping[str, int] = {}
        self._refuse_what_is_not_known()

    def train(
        self, resume_from_checkpoint: UriLike | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As Trainer's; ``resume_from_checkpoint`` is the URI of a checkpoint, or True for the
        newest one that is whole. Raises NotACheckpointError where there is none."""
        self._saves.wait()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest()
        if resume_from_checkpoint:
            done = self._resume(resume_from_checkpoint, *args, **kwargs)
        else:
            done = super().train(None, *args, **kwargs)
        self._saves.wait()
        return done

    def _resume(self, checkpoint: UriLike, *args: Any, **kwargs: Any) -> Any:
        self._resumed_from = os.fspath(checkpoint)
        state = load(self._resumed_from, only="trainer", storage_options=self._storage_options)
        self._counters = state.get("counters", {})
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            Path(folder, _STATE_FILE).write_text(state["state"])
            return super().train(folder, *args, **kwargs)

    def init_hf_repo(self, token: str | None = None) -> None:
        """Raises UsageError. Trainer calls this where it is to push what it saves."""
        raise UsageError(
            "Trainer pushes files of its own, which are not there",
            advice="Leave push_to_hub out, and call push_to_hub() of the model when it is trained.",
        )

    def _save_checkpoint(self, model: object, trial: object) -> None:
        """Save; return when the checkpoint is committed, on all ranks, or, asynchronously, copied.
        Trainer calls this when a save is due."""
        if trial is not None:
            raise UsageError("the trials of a search would save over each other's checkpoints")
        self._saves.wait()
        self.store_flos()
        self._note_best()
        self._note_callbacks()
        trainer: dict[str, object] = {"state": json.dumps(dataclasses.asdict(self.state))}
        if self.is_deepspeed_enabled:
            trainer["counters"] = counters_of(self.deepspeed)
        state: dict[str, object] = {"model": self._what_holds_weights(), "trainer": trainer}
        if not self.args.save_only_model:
            state |= self._what_steps() | {"rng": RNGState()}
        self._begin_save(state)
        if self.args.should_save and self.args.save_total_limit:
            most = self.args.save_total_limit
            best = self.state.best_global_step
            self._saves.afterwards(partial(self._delete_old, most, best))

    def _begin_save(self, state: dict[str, object]) -> None:
        """Save ``state``, unless that is to be done asynchronously: then, begin to."""
        step = self.state.global_step
        options: dict[str, Any] = {"step": step, "storage_options": self._storage_options}
        if self._asynchronous:
            lazy = self._asynchronous == "lazy"
            self._saves.add(async_save(self._uri(step), state, lazy=lazy, **options))
        else:
            save(self._uri(step), state, **options)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        """Trainer's, without the checkpoint, which it would have DeepSpeed read from files; then
        the checkpoint is loaded here."""
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: object = None) -> None:
        """Nothing: the model is loaded with its optimizer, whose state goes by its names."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            into = {"model": self._what_holds_weights()} | self._what_steps()
            self._load(self._resumed_from, into)
            if self.is_deepspeed_enabled:
                set_counters(self.deepspeed, self._counters)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing: it is loaded with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._load(self._resumed_from, {"rng": RNGState()})

    def _load_best_model(self) -> None:
        self._saves.wait()
        self._load(self.state.best_model_checkpoint, {"model": self._what_holds_weights()})

    def _what_holds_weights(self) -> object:
        """The model, as it is sharded; of DeepSpeed, the engine."""
        return self.deepspeed if self.is_deepspeed_enabled else self.model

    def _what_steps(self) -> dict[str, object]:
        """What changes with each step, beside the model."""
        optimizer = self.deepspeed.optimizer if self.is_deepspeed_enabled else self.optimizer
        steps = {"optimizer": optimizer, "schedule": self.lr_scheduler}
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None:
            steps["scaler"] = scaler
        return steps

    def _load(self, uri: str, into: dict[str, object]) -> None:
        load(uri, into=into, strict="state", storage_options=self._storage_options)

    def _newest(self) -> str:
        newest = newest_checkpoint(self._checkpoints, storage_options=self._storage_options)
        if newest is None:
            raise NotACheckpointError(
                "there is no whole checkpoint to resume from",
                uri=parse(self._checkpoints).redacted,
                advice="Leave resume_from_checkpoint out for a run that begins.",
            )
        return newest

    def _uri(self, step: int) -> str:
        return as_path_or_uri(join(self._checkpoints, f"checkpoint-{step}"))

    def _note_best(self) -> None:
        """Where the best model is, by the metric of the arguments."""
        if self.state.best_global_step:
            self.state.best_model_checkpoint = self._uri(self.state.best_global_step)

    def _note_callbacks(self) -> None:
        """Record the present states of callbacks in the trainer's state: a list for each class of
        which there may be several."""
        states: dict[str, list[object]] = {}
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        self.state.stateful_callbacks.update(states)

    def _delete_old(self, most: int, best: int | None) -> None:
        """Delete checkpoints of Trainer's names beyond the newest ``most``, but for ``best``."""
        listed = list_checkpoints(self._checkpoints, storage_options=self._storage_options)
        steps = sorted(int(match[1]) for c in listed if (match := _NAME.fullmatch(c.path)))
        kept = {best, *steps[-1:]}
        for step in reversed(steps):
            if len(kept) < most:
                kept.add(step)
        for step in steps:
            if step not in kept:
                remove(self._uri(step), storage_options=self._storage_options)

    def _refuse_what_is_not_known(self) -> None:
        if self.is_fsdp_xla_enabled:
            raise UsageError(
                "fsdp_config has xla, and what torch_xla shards is not known",
                advice="Leave the mixin out there.",
            )
        if self.is_deepspeed_enabled and not hasattr(super(), "_prepare_for_training"):
            raise UsageError(
                "this release of transformers resumes under DeepSpeed from files alone",
                advice="Upgrade transformers.",
            )
