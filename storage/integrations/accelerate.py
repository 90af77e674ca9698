"""Checkpoints of Hugging Face Accelerate: the contents of ``Accelerator.save_state``, as one
checkpoint.

    save_state(accelerator, "s3://bucket/run/step-500", step=500)
    load_state(accelerator, "s3://bucket/run/step-500")

A save is part of the lineage of the checkpoints in its folder: after a load, saves into the same
folder abandon later checkpoints. Without a URI, both follow Accelerate's ``ProjectConfiguration``.

These are functions, not hooks: Accelerate passes only the models to hooks, and pickles the rest
itself.

Scope: objects passed to ``accelerator.prepare`` and ``register_for_checkpointing``, including those
sharded by DeepSpeed or FSDP. Accelerate itself is not imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ...drivers.uri import join, parse
from ...errors import ExistsError, NotACheckpointError, UsageError
from ..operations.location import UriLike
from ..operations.options import Lazy
from ..operations.report import LoadReport, SaveReport
from ..operations.saving.handle import SaveHandle
from ..state.adapters.deepspeed import engine_counters, engine_of, set_engine_counters
from ..state.adapters.per_rank import PerRank
from ..state.adapters.stateful import RNGState
from .doors import Door, RunFolder
from .newest import as_path_or_uri, is_stock, stock_steps

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["async_save_state", "load_state", "save_state"]

_PREFIX = "checkpoint_"
_STOCK_FILE = "random_states_0.pkl"
"""A file in each checkpoint of Accelerate itself."""


_doors: WeakKeyDictionary[Accelerator, Door] = WeakKeyDictionary()


def save_state(
    accelerator: Accelerator,
    uri: UriLike | None = None,
    *,
    step: int | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> SaveReport:
    """Save the state of everything that ``accelerator`` has prepared, and each rank's random
    generators.

    ``uri``: None for the next ``checkpoint_<iteration>`` of a project with
    ``automatic_checkpoint_naming``; its step is the iteration. It replaces no checkpoint; once it
    is committed, the oldest ones beyond ``total_limit`` are deleted.

    Returns once it is committed. Every rank calls this. Raises as :func:`holdfast.save`.
    """
    handle = _begun(accelerator, uri, step, None, storage_options)
    assert handle.report is not None
    return handle.report


def async_save_state(
    accelerator: Accelerator,
    uri: UriLike | None = None,
    *,
    step: int | None = None,
    lazy: Lazy = False,
    storage_options: Mapping[str, object] | None = None,
) -> SaveHandle:
    """Save like :func:`save_state`, but return once the state is copied to host memory; with
    ``lazy`` (see :func:`holdfast.async_save`), even before that.

    The next save and the next load wait for this one, and raise its error. After the last one, call
    ``wait()`` of the handle. Old checkpoints are deleted before: one to resume from always stays.
    """
    return _begun(accelerator, uri, step, lazy, storage_options)


def _begun(
    accelerator: Accelerator,
    uri: UriLike | None,
    step: int | None,
    lazy: Lazy | None,
    storage_options: Mapping[str, object] | None,
) -> SaveHandle:
    door = _door_of(accelerator)
    door.wait()
    project = accelerator.project_configuration
    state = _state_of(accelerator)
    if uri is not None:
        handle = door.save(uri, state, step=step, lazy=lazy, storage_options=storage_options)
        project.iteration += 1
        return handle
    if step is not None:
        raise UsageError(
            "step is given, and uri is not",
            advice="With automatic_checkpoint_naming, the step is the project's iteration.",
        )
    run = _project_of(accelerator, storage_options)
    step = project.iteration
    uri = run.uri(step)
    if is_stock(uri, _STOCK_FILE):
        raise ExistsError("Accelerate has saved a checkpoint there", uri=parse(uri).redacted)
    limit = project.total_limit if accelerator.is_main_process else None
    if limit is not None and lazy is not None:
        run.retain(limit - 1, saving=step)
    handle = door.save(
        uri, state, step=step, lazy=lazy, overwrite=False, storage_options=storage_options
    )
    project.iteration += 1
    if limit is not None and lazy is None:
        run.retain(limit)
    return handle


def load_state(
    accelerator: Accelerator,
    uri: UriLike | None = None,
    *,
    storage_options: Mapping[str, object] | None = None,
) -> int | None:
    """Load a checkpoint of :func:`save_state` into an accelerator that has prepared the same
    objects; return its step.

    ``uri``: None for the newest one of a project with ``automatic_checkpoint_naming`` that training
    has not abandoned. The number of ranks may differ. Every rank calls this. A folder of
    ``accelerator.save_state`` is loaded by Accelerate, and has no step. Raises as
    :func:`holdfast.load`.
    """
    door = _door_of(accelerator)
    if uri is None:
        door.wait()
        run = _project_of(accelerator, storage_options)
        steps = run.steps(stock_steps(run.folder, _PREFIX, _STOCK_FILE))
        if not steps:
            raise NotACheckpointError(
                "there is no whole checkpoint to load", uri=parse(run.folder).redacted
            )
        uri = run.uri(steps[-1])
    if is_stock(uri, _STOCK_FILE):
        accelerator.load_state(os.fspath(uri))
        return None
    reports: list[LoadReport] = []
    door.load_to_train(
        uri,
        into=_state_of(accelerator),
        storage_options=storage_options,
        on_report=reports.append,
    )
    return reports[0].step


def _door_of(accelerator: Accelerator) -> Door:
    return _doors.setdefault(accelerator, Door())


def _project_of(
    accelerator: Accelerator, storage_options: Mapping[str, object] | None
) -> RunFolder:
    """Return the folder of an accelerator's numbered checkpoints."""
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming or project.project_dir is None:
        raise UsageError(
            "uri is None, and the accelerator names no checkpoints",
            advice="Give one, or a ProjectConfiguration with automatic_checkpoint_naming.",
        )
    folder = as_path_or_uri(join(project.project_dir, "checkpoints"))
    return RunFolder(_door_of(accelerator), folder, _PREFIX, storage_options)


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
    if accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook:
        raise UsageError(
            "the accelerator has hooks that save_state or load_state would not call",
            advice="Remove them, by the handles that register_save_state_pre_hook returned.",
        )
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
