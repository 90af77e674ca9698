"""Checkpoints of Hugging Face Accelerate: the contents of ``Accelerator.save_state``, as one
checkpoint.

    save_state(accelerator, "s3://bucket/run/step-500", step=500)
    load_state(accelerator, "s3://bucket/run/step-500")

These are functions, not hooks: Accelerate passes only the models to hooks, and pickles the rest
itself.

Scope: objects passed to ``accelerator.prepare`` and ``register_for_checkpointing``, including those
sharded by DeepSpeed or FSDP. Accelerate itself is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..api import load, save
from ..operations.location import UriLike
from ..operations.report import SaveReport
from ..state.adapters.deepspeed import engine_counters, engine_of, set_engine_counters
from ..state.adapters.per_rank import PerRank
from ..state.adapters.stateful import RNGState

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
    """Save the state of everything that ``accelerator`` has prepared, and each rank's random
    generators.

    Returns once it is committed. Every rank calls this. Raises as :func:`holdfast.save`.
    """
    return save(uri, _state_of(accelerator), step=step, storage_options=storage_options)


def load_state(
    accelerator: Accelerator,
    uri: UriLike,
    *,
    storage_options: Mapping[str, object] | None = None,
) -> None:
    """Load a checkpoint of :func:`save_state` into an accelerator that has prepared the same
    objects.

    The number of ranks may differ. Every rank calls this. Raises as :func:`holdfast.load`.
    """
    load(uri, into=_state_of(accelerator), storage_options=storage_options)


class _Counters:
    """The counters of an accelerator and of its DeepSpeed engines, if any.

    One object, so that a checkpoint with an engine loads without one, and vice versa.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        engines = [engine_counters(engine) for engine in self._engines()]
        return {"accumulated": self._accelerator.step, "engines": engines}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._accelerator.step = state_dict["accumulated"]
        for engine, stored in zip(self._engines(), state_dict["engines"], strict=False):
            set_engine_counters(engine, stored)

    def _engines(self) -> list[Any]:
        return [model for model in self._accelerator._models if engine_of(model) is not None]


def _state_of(accelerator: Accelerator) -> dict[str, object]:
    loaders = accelerator._dataloaders
    state: dict[str, object] = {
        "models": list(accelerator._models),
        # Holdfast recognises DeepSpeed's optimizers only unwrapped.
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
