"""The parameters of one rank's save."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from ....core.lru import LruCache
from ...format.packed import Compression
from ...pipeline.image_writer import Callbacks
from ...state.capture.lazy import LazyCapture
from ...state.flat_state import FlatState
from ..deadline import Deadline
from .global_plan import Digest, GlobalPlans
from .keeper_request import Keeping

__all__ = ["PLANS_KEPT", "SaveJob"]

PLANS_KEPT = 8
"""Number of global plans that a process keeps."""


@dataclass
class SaveJob:
    """The parameters of one rank's save."""

    flat: FlatState
    step: int | None
    budget_nbytes: int | None
    """Host memory for chunks; None: room for the whole image."""
    lazy: LazyCapture | None = None
    """Set if training continues while ``flat`` is copied."""
    callbacks: Callbacks = field(default=Callbacks(lambda: None, lambda: None))
    created_s: float = field(default_factory=time.time)
    after: Future[None] | None = None
    """Another save; writing waits for its end, copying does not."""
    digests: Digest | None = None
    """Digests rows of the state; None: by default."""
    plans: GlobalPlans = field(default_factory=lambda: LruCache(PLANS_KEPT))
    """Global plans of earlier saves of this process."""
    deadline: Deadline = field(default=Deadline())
    """When the save must have been committed or failed."""
    compression: Compression | None = None
    """Storage format of images; the same on all ranks."""
    keeping: Keeping | None = None
    """Set if the save goes through a keeper; None: this process writes to storage."""
    admit: Callable[[], Awaitable[str]] | None = None
    """Called by the leader before anything is written. Raises if the run may not be saved at
    this step; returns the branch to record in the manifest."""

    @property
    def fenced_s(self) -> float:
        """Seconds that training has waited for a lazy capture."""
        if self.lazy is None:
            return 0.0
        return self.lazy.waited_s

    def release_state(self) -> None:
        """Drop all references to the state. Frames of a failed save may keep the job alive."""
        self.flat = FlatState()
        self.digests = None
