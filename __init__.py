"""Holdfast: the checkpoint storage layer for large-model training.

    import holdfast

    holdfast.save("/checkpoints/step-100", {"model": model, "optim": optim, "step": 100})
    holdfast.load("/checkpoints/step-100", into={"model": model, "optim": optim, "step": 0})

Any parallel layout into any other, without pickle, and never a torn checkpoint. ``import holdfast`` is cheap: torch is
imported when the first function that needs it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .forks import groups as _groups  # noqa: F401 - a fork may come before anything else is used
from .forks import renewal as _renewal  # noqa: F401 - before the first import that a fork may have to wait for

if TYPE_CHECKING:
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
        UnsupportedFormatError,
        UriError,
        UsageError,
    )
    from .storage.api import async_save, fence, load, release_memory, save
    from .storage.copy import CopyReport, copy
    from .storage.frameworks.per_rank import PerRank
    from .storage.frameworks.stateful import RNGState
    from .storage.handle import SaveHandle
    from .storage.listing import ListedCheckpoint, list_checkpoints
    from .storage.prune import PruneReport, prune
    from .storage.reader import Checkpoint, TensorInfo, open
    from .storage.report import LoadReport, SaveReport
    from .storage.training.checkpointer import Checkpointer
    from .storage.training.ledger import Counters
    from .storage.training.retention import Keep

_HOME = {
    "Checkpoint": ".storage.reader",
    "Checkpointer": ".storage.training.checkpointer",
    "CopyReport": ".storage.copy",
    "Counters": ".storage.training.ledger",
    "Keep": ".storage.training.retention",
    "ListedCheckpoint": ".storage.listing",
    "LoadReport": ".storage.report",
    "PruneReport": ".storage.prune",
    "PerRank": ".storage.frameworks.per_rank",
    "RNGState": ".storage.frameworks.stateful",
    "SaveHandle": ".storage.handle",
    "SaveReport": ".storage.report",
    "TensorInfo": ".storage.reader",
    "async_save": ".storage.api",
    "copy": ".storage.copy",
    "fence": ".storage.api",
    "list_checkpoints": ".storage.listing",
    "load": ".storage.api",
    "open": ".storage.reader",
    "prune": ".storage.prune",
    "release_memory": ".storage.api",
    "save": ".storage.api",
}

__all__ = [  # noqa: RUF022 - what one uses, then what one catches
    "Checkpoint",
    "Checkpointer",
    "CopyReport",
    "Counters",
    "Keep",
    "ListedCheckpoint",
    "LoadReport",
    "PerRank",
    "PruneReport",
    "RNGState",
    "SaveHandle",
    "SaveReport",
    "TensorInfo",
    "async_save",
    "copy",
    "fence",
    "list_checkpoints",
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
