"""Checkpoints of Hugging Face's Trainer: one Holdfast checkpoint instead of a file per component.

    class Trainer(HoldfastTrainerMixin, transformers.Trainer): ...

A checkpoint holds the model, the optimizer, the learning-rate schedule, the loss scaler, the random
generators of each rank, and the trainer's own state. The trainer reads the last of these from a
file, which :meth:`HoldfastTrainerMixin.train` creates in a temporary folder.

Models sharded by DeepSpeed or FSDP are saved sharded: each rank stores its own part.

Scope: the checkpoints that Trainer resumes from. ``save_model`` is unchanged.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers.trainer_callback import ExportableState

from ...drivers.uri import parse
from ...errors import NotACheckpointError, UsageError
from ..operations.location import UriLike
from ..state.adapters.deepspeed import engine_counters, set_engine_counters
from ..state.adapters.stateful import RNGState
from .doors import Door, RunFolder
from .newest import is_stock, stock_steps

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

__all__ = ["HoldfastTrainerMixin"]

_STATE_FILE = "trainer_state.json"
_PREFIX = "checkpoint-"


class HoldfastTrainerMixin(_Base):  # type: ignore[misc]  # its types are not installed
    """A mixin to place before Trainer, or a class derived from it, in a class's bases.

    ``checkpoints`` is the folder of the checkpoints, a path or a URI; by default, ``output_dir``.
    ``storage_options`` as in :func:`holdfast.save`.

    ``asynchronous``: training continues once a checkpoint is copied to host memory or, if it is
    ``"lazy"`` (see :func:`holdfast.async_save`), even before that. The next save waits for it, as
    do the end of training and the loading of the best model; they raise the error of a failed save.
    Old checkpoints are deleted then, and only if that save succeeded, so there is a whole
    checkpoint at any moment.
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
        folder = self.args.output_dir if checkpoints is None else checkpoints
        self._door = Door(storage_options)
        self._run = RunFolder(self._door, folder, _PREFIX)
        self._lazy = asynchronous == "lazy" if asynchronous else None
        self._resumed_from = ""
        self._is_stock = False
        """True if training resumes from a checkpoint of Trainer itself."""
        self._counters: Mapping[str, int] = {}
        self._refuse_what_is_not_known()

    def train(
        self, resume_from_checkpoint: UriLike | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as Trainer does.

        ``resume_from_checkpoint`` is the URI of a checkpoint, or True for the newest whole one that
        training has not abandoned by going back. It may be one that Trainer itself has saved:
        Trainer then loads it. Raises NotACheckpointError if none is whole.
        """
        self._door.wait()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest()
        checkpoint = resume_from_checkpoint or None
        self._is_stock = _is_stock(checkpoint)
        if checkpoint is None or self._is_stock:
            done = super().train(checkpoint, *args, **kwargs)
        else:
            done = self._resume(checkpoint, *args, **kwargs)
        self._door.wait()
        return done

    def _resume(self, checkpoint: UriLike, *args: Any, **kwargs: Any) -> Any:
        self._resumed_from = os.fspath(checkpoint)
        state = self._door.load(self._resumed_from, only="trainer")
        self._counters = state.get("counters", {})
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            Path(folder, _STATE_FILE).write_text(state["state"])
            return super().train(folder, *args, **kwargs)

    def init_hf_repo(self, token: str | None = None) -> None:
        """Raise UsageError. Trainer calls this if it is to push its saves to the Hub."""
        raise UsageError(
            "Trainer pushes its own files, which this mixin does not write",
            advice="Leave push_to_hub out, and call the model's push_to_hub() after training.",
        )

    def _save_checkpoint(self, model: object, trial: object) -> None:
        """Save; return once the checkpoint is committed on all ranks, or copied if asynchronous.

        Trainer calls this when a save is due.
        """
        if trial is not None:
            raise UsageError("the trials of a search would overwrite each other's checkpoints")
        self._door.wait()
        self.store_flos()
        self._note_best()
        self._note_callbacks()
        trainer: dict[str, object] = {"state": json.dumps(dataclasses.asdict(self.state))}
        if self.is_deepspeed_enabled:
            trainer["counters"] = engine_counters(self.deepspeed)
        state: dict[str, object] = {"model": self._what_holds_weights(), "trainer": trainer}
        if not self.args.save_only_model:
            state |= self._what_steps() | {"rng": RNGState()}
        step = self.state.global_step
        self._door.save(self._run.uri(step), state, step=step, lazy=self._lazy)
        if self.args.should_save and self.args.save_total_limit:
            best = (self.state.best_global_step,)
            self._door.afterwards(partial(self._run.retain, self.args.save_total_limit, also=best))

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        """Prepare as Trainer does, but without the checkpoint, then load the checkpoint.

        Trainer would have DeepSpeed read it from files.
        """
        if self._is_stock:
            return super()._prepare_for_training(
                max_steps, train_dataloader, resume_from_checkpoint
            )
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if self._is_stock:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            into = {"model": self._what_holds_weights()} | self._what_steps()
            self._load(self._resumed_from, into)
            if self.is_deepspeed_enabled:
                set_engine_counters(self.deepspeed, self._counters)
        self._note_resumed(Path(checkpoint))

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._is_stock:  # ours is loaded with the optimizer
            super()._load_scaler(checkpoint)

    def _note_resumed(self, folder: Path) -> None:
        """Record that training continues from the checkpoint whose state is in ``folder``."""
        step = json.loads((folder / _STATE_FILE).read_text())["global_step"]
        if not self._is_stock:
            self._run.resumed(self._resumed_from, step, self._stock_steps())
        elif folder.parent.resolve() == Path(self.args.output_dir).resolve():
            self._run.resumed(None, step, self._stock_steps())

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Finish as Trainer does: with a limit of one checkpoint, it deletes all but the best."""
        self._door.wait()
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        if self.args.should_save and limit == 1 and best is not None:
            for uri in self._run.uris():
                if uri != best:
                    self._door.remove(uri)
        self.args.save_total_limit = None  # Trainer would delete files of a checkpoint in any order
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: object = None) -> None:
        """Load a checkpoint of Trainer itself. Ours are loaded together with the optimizer, which
        needs the model's names."""
        if self._is_stock:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._is_stock:
            super()._load_rng_state(checkpoint)
        elif checkpoint is not None:
            self._load(self._resumed_from, {"rng": RNGState()})

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if _is_stock(best):
            super()._load_best_model()
        else:
            self._load(best, {"model": self._what_holds_weights()})

    def _what_holds_weights(self) -> object:
        """Return the model, as sharded; with DeepSpeed, the engine."""
        return self.deepspeed if self.is_deepspeed_enabled else self.model

    def _what_steps(self) -> dict[str, object]:
        """Return the objects besides the model that change at each step."""
        optimizer = self.deepspeed.optimizer if self.is_deepspeed_enabled else self.optimizer
        steps = {"optimizer": optimizer, "schedule": self.lr_scheduler}
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None:
            steps["scaler"] = scaler
        return steps

    def _load(self, uri: str, into: dict[str, object]) -> None:
        self._door.load(uri, into=into, strict="state")

    def _newest(self) -> str:
        """Return the newest checkpoint that is not abandoned, ours or one of Trainer itself."""
        stock = self._stock_steps()
        steps = self._run.steps(stock)
        if not steps:
            raise NotACheckpointError(
                "there is no whole checkpoint to resume from",
                uri=parse(self._run.folder).redacted,
                advice="Leave resume_from_checkpoint out to start a new run.",
            )
        if steps[-1] in stock:
            return str(Path(self.args.output_dir, f"{_PREFIX}{steps[-1]}"))
        return self._run.uri(steps[-1])

    def _stock_steps(self) -> list[int]:
        """Return the steps of the checkpoints that Trainer itself has saved."""
        return stock_steps(self.args.output_dir, _PREFIX, _STATE_FILE)

    def _note_best(self) -> None:
        """Record the location of the best model, by the configured metric, if it is saved."""
        best = self.state.best_global_step
        if not best or self.state.best_model_checkpoint == self._run.uri(best):
            return
        if best == self.state.global_step or best in self._run.steps():
            self.state.best_model_checkpoint = self._run.uri(best)

    def _note_callbacks(self) -> None:
        """Record the states of callbacks in the trainer's state, as a list per class."""
        states: dict[str, list[object]] = {}
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        self.state.stateful_callbacks.update(states)

    def _refuse_what_is_not_known(self) -> None:
        if self.is_fsdp_xla_enabled:
            raise UsageError(
                "fsdp_config enables xla, and shards of torch_xla are not supported",
                advice="Do without the mixin.",
            )
        if self.is_deepspeed_enabled and not hasattr(super(), "_prepare_for_training"):
            raise UsageError(
                "this release of transformers resumes under DeepSpeed only from files",
                advice="Upgrade transformers.",
            )


def _is_stock(checkpoint: UriLike | None) -> bool:
    """Return whether Trainer itself has saved this checkpoint."""
    return checkpoint is not None and is_stock(checkpoint, _STATE_FILE)
