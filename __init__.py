"""Holdfast: the checkpoint storage layer for large-model training.

    import holdfast

    holdfast.save("/checkpoints/step-100", {"model": model, "optim": optim, "step": 100})
    holdfast.load("/checkpoints/step-100", into={"model": model, "optim": optim, "step": 0})

Any parallel layout into any other, without pickle, and never a torn checkpoint. ``import holdfast``
is cheap: torch is imported when the first function that needs it is used.
"""

# ruff: noqa: F403 - the errors are listed in their own module

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors as _errors
from .core.forks import renewal as _renewal  # noqa: F401 - a fork may come before anything else

if TYPE_CHECKING:
    from .core.spans import SlowOperation, StageReport
    from .errors import *
    from .storage.api import async_save, fence, load, release_memory, save
    from .storage.format.save_telemetry import RankTelemetry, SaveTelemetry
    from .storage.operations.conversion.export import ExportReport, export
    from .storage.operations.conversion.importing import ImportReport, import_
    from .storage.operations.maintenance.copy import CopyReport, compact, copy
    from .storage.operations.maintenance.listing import ListedCheckpoint, list_checkpoints
    from .storage.operations.maintenance.prune import PruneReport, prune
    from .storage.operations.reading.diff import DiffReport, diff
    from .storage.operations.reading.reader import Checkpoint, TensorInfo, open
    from .storage.operations.report import LoadReport, SaveReport, Update
    from .storage.operations.saving.handle import SaveHandle
    from .storage.operations.telemetry import Outcome, listen
    from .storage.pipeline.borrowing import Incremental
    from .storage.state.adapters.per_rank import PerRank
    from .storage.state.adapters.shards import Shard, mark_part
    from .storage.state.adapters.stateful import RNGState
    from .storage.training.checkpointer import Checkpointer
    from .storage.training.keeper_option import Keeper
    from .storage.training.resume import Resumed
    from .storage.training.retention import Keep
    from .storage.training.stats import Counters
    from .storage.weights.api import publish, subscribe
    from .storage.weights.memory import Serving
    from .storage.weights.publisher import Publisher
    from .storage.weights.subscriber import Subscriber

_NAMES = {
    ".core.spans": ["SlowOperation", "StageReport"],
    ".storage.api": ["async_save", "fence", "load", "release_memory", "save"],
    ".storage.format.save_telemetry": ["RankTelemetry", "SaveTelemetry"],
    ".storage.operations.conversion.export": ["ExportReport", "export"],
    ".storage.operations.conversion.importing": ["ImportReport", "import_"],
    ".storage.operations.maintenance.copy": ["CopyReport", "compact", "copy"],
    ".storage.operations.maintenance.listing": ["ListedCheckpoint", "list_checkpoints"],
    ".storage.operations.maintenance.prune": ["PruneReport", "prune"],
    ".storage.operations.reading.diff": ["DiffReport", "diff"],
    ".storage.operations.reading.reader": ["Checkpoint", "TensorInfo", "open"],
    ".storage.operations.report": ["LoadReport", "SaveReport", "Update"],
    ".storage.operations.saving.handle": ["SaveHandle"],
    ".storage.operations.telemetry": ["Outcome", "listen"],
    ".storage.pipeline.borrowing": ["Incremental"],
    ".storage.state.adapters.per_rank": ["PerRank"],
    ".storage.state.adapters.shards": ["Shard", "mark_part"],
    ".storage.state.adapters.stateful": ["RNGState"],
    ".storage.training.checkpointer": ["Checkpointer"],
    ".storage.training.keeper_option": ["Keeper"],
    ".storage.training.resume": ["Resumed"],
    ".storage.training.retention": ["Keep"],
    ".storage.training.stats": ["Counters"],
    ".storage.weights.api": ["publish", "subscribe"],
    ".storage.weights.memory": ["Serving"],
    ".storage.weights.publisher": ["Publisher"],
    ".storage.weights.subscriber": ["Subscriber"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
"""The module of each public name; the others are errors."""

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "CopyReport",
    "Counters",
    "DiffReport",
    "ExportReport",
    "ImportReport",
    "Incremental",
    "Keep",
    "Keeper",
    "ListedCheckpoint",
    "LoadReport",
    "Outcome",
    "PerRank",
    "PruneReport",
    "Publisher",
    "RNGState",
    "RankTelemetry",
    "Resumed",
    "SaveHandle",
    "SaveReport",
    "SaveTelemetry",
    "Serving",
    "Shard",
    "SlowOperation",
    "StageReport",
    "Subscriber",
    "TensorInfo",
    "Update",
    "async_save",
    "compact",
    "copy",
    "diff",
    "export",
    "fence",
    "import_",
    "list_checkpoints",
    "listen",
    "load",
    "mark_part",
    "open",
    "prune",
    "publish",
    "release_memory",
    "save",
    "subscribe",
]
__all__ += _errors.__all__

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME.get(name, ".errors"), __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
