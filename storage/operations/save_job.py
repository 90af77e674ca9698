"""What one rank saves, and how."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from ...core.lru import LruCache
from ..format.packed import Compression
from ..pipeline.image_writer import Callbacks
from ..state.flat_state import FlatState
from ..state.lazy import LazyCapture
from .deadline import Deadline
from .global_plan import Digest, GlobalPlans
from .keeping import Keeping

__all__ = ["PLANS_KEPT", "SaveJob"]

PLANS_KEPT = 8
"""How many global plans a process keeps."""


@dataclass
class SaveJob:
    """What one rank saves."""

    flat: FlatState
    step: int | None
    budget_nbytes: int | None
    """Host memory for chunks; None: room for the whole image."""
    lazy: LazyCapture | None = None
    """Set where training goes on while ``flat`` is copied."""
    callbacks: Callbacks = field(default=Callbacks(lambda: None, lambda: None))
    created_s: float = field(default_factory=time.time)
    after: Future[None] | None = None
    """Another save, for whose end the writing waits; copying does not."""
    digests: Digest | None = None
    """How to digest rows of the state; None: there is nothing about it."""
    plans: GlobalPlans = field(default_factory=lambda: LruCache(PLANS_KEPT))
    """The global plans of former saves of this process."""
    deadline: Deadline = field(default=Deadline())
    """When it is committed, or has failed."""
    compression: Compression | None = None
    """How images are stored; the same on all ranks."""
    keeping: Keeping | None = None
    """How it goes by way of a keeper; None: it goes to storage from here."""
    admit: Callable[[], Awaitable[str]] | None = None
    """Asked by the leader before anything is written: raises where the run may not be saved at this
    step; returns the branch that the manifest records."""

    @property
    def fenced_s(self) -> float:
        """How long training has waited for a lazy capture."""
        if self.lazy is None:
            return 0.0
        return self.lazy.waited_s

    def release_state(self) -> None:
        """Keep no reference to the state. Frames of a failed save may keep the job."""
        self.flat = FlatState()
        self.digests = None
