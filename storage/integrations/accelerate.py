"""Checkpoints of Hugging Face's Accelerate: what ``Accelerator.save_state`` saves, as one
checkpoint.

    save_state(accelerator, "s3://bucket/run/step-500", step=500)
    load_state(accelerator, "s3://bucket/run/step-500")

Functions of our own and no hooks: Accelerate's hooks are given the models alone, and whatever they
do, it pickles the rest.

Scope: what was given to ``accelerator.prepare`` and ``register_for_checkpointing``, also where
DeepSpeed or FSDP has sharded it. Accelerate itself is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..api import load, save
from ..operations.options import UriLike
from ..operations.report import SaveReport
from ..state.adapters.deepspeed import engine_of
from ..state.adapters.per_rank import PerRank
from ..state.adapters.stateful import RNGState
from .engine_counters import counters_of, set_counters

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["load_state", "save_state"]


def save_state(
    accelerator: Accelerator,
    uri: UriLike,
    *,
    step: int | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> SaveReport:
    """Save the state of everything that ``accelerator`` has prepared, and of the random generators
    of each rank; return when it is committed. Every rank calls this. Raises as
    :func:`holdfast.save`."""
    return save(uri, _state_of(accelerator), step=step, storage_options=storage_options)


def load_state(
    accelerator: Accelerator,
    uri: UriLike,
    *,
    storage_options: Mapping[str, object] | None = None,
) -> None:
    """Load what :func:`save_state` has saved, into an accelerator that has prepared the same, on
    any number of ranks. Every rank calls this. Raises as :func:`holdfast.load`."""
    load(uri, into=_state_of(accelerator), storage_options=storage_options)


class _Counters:
    """What an accelerator counts, and its engine, if it has one of DeepSpeed: one object, so that a
    checkpoint of an engine loads where there is none, and the reverse."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        engines = [counters_of(engine) for engine in self._engines()]
        return {"accumulated": self._accelerator.step, "engines": engines}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._accelerator.step = state_dict["accumulated"]
        for engine, stored in zip(self._engines(), state_dict["engines"], strict=False):
            set_counters(engine, stored)

    def _engines(self) -> list[Any]:
        return [model for model in self._accelerator._models if engine_of(model) is not None]


def _state_of(accelerator: Accelerator) -> dict[str, object]:
    loaders = accelerator._dataloaders
    state: dict[str, object] = {
        "models": list(accelerator._models),
        # Those of DeepSpeed are known by what Accelerate has wrapped.
        "optimizers": [wrapped.optimizer for wrapped in accelerator._optimizers],
        "schedules": list(accelerator._schedulers),
        "loaders": [
            PerRank(loader)
            for loader in loaders
            if getattr(loader, "use_stateful_dataloader", False)
        ],
        "objects": list(accelerator._custom_objects),
        "rng": RNGState(),
        "counters": _Counters(accelerator),
    }
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return state
