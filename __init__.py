"""Holdfast: the checkpoint storage layer for large-model training.

    import holdfast

    holdfast.save("/checkpoints/step-100", {"model": model, "optim": optim, "step": 100})
    holdfast.load("/checkpoints/step-100", into={"model": model, "optim": optim, "step": 0})

Any parallel layout into any other, without pickle, and never a torn checkpoint. ``import holdfast``
is cheap: torch is imported when the first function that needs it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .core.forks import groups as _groups  # noqa: F401 - a fork may come before anything else is used
from .core.forks import renewal as _renewal  # noqa: F401 - before the first import that a fork may have to wait for

if TYPE_CHECKING:
    from .core.spans import SlowOperation, StageReport
    from .errors import (
        AccessError,
        BusyError,
        CheckpointError,
        CoordinationError,
        CoverageError,
        DamagedError,
        DeadlineError,
        ExistsError,
        FullError,
        HoldfastError,
        InvisibleFilesError,
        MismatchError,
        NotACheckpointError,
        NotFoundError,
        RankFailedError,
        ReplacedError,
        SaveError,
        StateError,
        StorageDownError,
        StorageError,
        SupersededError,
        TelemetryError,
        UnsupportedFormatError,
        UriError,
        UsageError,
    )
    from .storage.api import async_save, fence, load, release_memory, save
    from .storage.format.save_telemetry import RankTelemetry, SaveTelemetry
    from .storage.operations.conversion.export import ExportReport, export
    from .storage.operations.conversion.importing import ImportReport, import_
    from .storage.operations.maintenance.copy import CopyReport, copy
    from .storage.operations.maintenance.listing import ListedCheckpoint, list_checkpoints
    from .storage.operations.maintenance.prune import PruneReport, prune
    from .storage.operations.reading.diff import DiffReport, diff
    from .storage.operations.reading.reader import Checkpoint, TensorInfo, open
    from .storage.operations.report import LoadReport, SaveReport
    from .storage.operations.saving.handle import SaveHandle
    from .storage.operations.telemetry import Outcome, listen
    from .storage.state.adapters.per_rank import PerRank
    from .storage.state.adapters.shards import Shard
    from .storage.state.adapters.stateful import RNGState
    from .storage.training.checkpointer import Checkpointer
    from .storage.training.keeper_option import Keeper
    from .storage.training.resume import Resumed
    from .storage.training.retention import Keep
    from .storage.training.stats import Counters

_HOME = {
    "Checkpoint": ".storage.operations.reading.reader",
    "Checkpointer": ".storage.training.checkpointer",
    "CopyReport": ".storage.operations.maintenance.copy",
    "Counters": ".storage.training.stats",
    "DiffReport": ".storage.operations.reading.diff",
    "ExportReport": ".storage.operations.conversion.export",
    "ImportReport": ".storage.operations.conversion.importing",
    "Keep": ".storage.training.retention",
    "Keeper": ".storage.training.keeper_option",
    "ListedCheckpoint": ".storage.operations.maintenance.listing",
    "LoadReport": ".storage.operations.report",
    "Outcome": ".storage.operations.telemetry",
    "PruneReport": ".storage.operations.maintenance.prune",
    "PerRank": ".storage.state.adapters.per_rank",
    "RankTelemetry": ".storage.format.save_telemetry",
    "RNGState": ".storage.state.adapters.stateful",
    "Resumed": ".storage.training.resume",
    "SaveHandle": ".storage.operations.saving.handle",
    "SaveReport": ".storage.operations.report",
    "SaveTelemetry": ".storage.format.save_telemetry",
    "Shard": ".storage.state.adapters.shards",
    "SlowOperation": ".core.spans",
    "StageReport": ".core.spans",
    "TensorInfo": ".storage.operations.reading.reader",
    "async_save": ".storage.api",
    "copy": ".storage.operations.maintenance.copy",
    "diff": ".storage.operations.reading.diff",
    "export": ".storage.operations.conversion.export",
    "fence": ".storage.api",
    "import_": ".storage.operations.conversion.importing",
    "list_checkpoints": ".storage.operations.maintenance.listing",
    "listen": ".storage.operations.telemetry",
    "load": ".storage.api",
    "open": ".storage.operations.reading.reader",
    "prune": ".storage.operations.maintenance.prune",
    "release_memory": ".storage.api",
    "save": ".storage.api",
}

__all__ = [  # noqa: RUF022 - what one uses, then what one catches
    "Checkpoint",
    "Checkpointer",
    "CopyReport",
    "Counters",
    "DiffReport",
    "ExportReport",
    "ImportReport",
    "Keep",
    "Keeper",
    "ListedCheckpoint",
    "LoadReport",
    "Outcome",
    "PerRank",
    "PruneReport",
    "RankTelemetry",
    "RNGState",
    "Resumed",
    "SaveHandle",
    "SaveReport",
    "SaveTelemetry",
    "Shard",
    "SlowOperation",
    "StageReport",
    "TensorInfo",
    "async_save",
    "copy",
    "diff",
    "export",
    "fence",
    "import_",
    "list_checkpoints",
    "listen",
    "load",
    "open",
    "prune",
    "release_memory",
    "save",
    "AccessError",
    "BusyError",
    "CheckpointError",
    "CoordinationError",
    "CoverageError",
    "DamagedError",
    "DeadlineError",
    "ExistsError",
    "FullError",
    "HoldfastError",
    "InvisibleFilesError",
    "MismatchError",
    "NotACheckpointError",
    "NotFoundError",
    "RankFailedError",
    "ReplacedError",
    "SaveError",
    "StateError",
    "StorageDownError",
    "StorageError",
    "SupersededError",
    "TelemetryError",
    "UnsupportedFormatError",
    "UriError",
    "UsageError",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME.get(name, ".errors"), __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
