"""The parameters of one rank's save, and its time limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ....core.lru import LruCache
from ....errors import DeadlineError, UsageError
from ....planner.image import DIGEST_NBYTES
from ...format.fragment import fragment_of
from ...format.manifest import PATCH, Packing
from ...format.packed import Compression
from ...format.patches import PatchBases
from ...format.tables import ImageTable
from ...pipeline.base import Base
from ...pipeline.image_writer import Callbacks, ImageWriter
from ...pipeline.patching import Publication
from ...state.capture.lazy import LazyCapture
from ...state.flat_state import FlatState
from ...state.plan import ImagePlan
from .global_plan import Digest, GlobalPlans
from .keeper_request import Keeping, Storage

PLANS_KEPT = 8
"""Number of global plans that a process keeps."""

Admit: TypeAlias = Callable[[], Awaitable[str]]
"""Called by the leader before anything is written. Raises if the run may not be saved at this step;
returns the branch to record in the manifest."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time limit for a whole save; ``until_s`` on the clock of event loops. None: no limit."""

    timeout_s: float | None = None
    until_s: float | None = None

    @classmethod
    def of(cls, timeout_s: float | None) -> Deadline:
        """Return a deadline ``timeout_s`` from now. Raises UsageError unless that is positive."""
        if timeout_s is None:
            return cls()
        if not timeout_s > 0:
            raise UsageError(
                f"timeout_s is {timeout_s!r}",
                advice="Give a positive number of seconds, or None for no limit.",
            )
        return cls(timeout_s, time.monotonic() + timeout_s)

    @asynccontextmanager
    async def holds(self, uri: str, rank: int) -> AsyncIterator[None]:
        """Cancel the body when the time is up; raise DeadlineError once it has ended."""
        try:
            async with asyncio.timeout_at(self.until_s) as timeout:
                yield
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise DeadlineError(
                f"the save was not committed within {self.timeout_s:g} s",
                uri=uri,
                rank=rank,
                advice="Check the storage and the network, or allow more time: timeout_s.",
            ) from error


@dataclass
class SaveJob:
    """The parameters of one rank's save."""

    flat: FlatState
    step: int | None
    budget_nbytes: int | None
    """Host memory for chunks; None: room for the whole image."""
    shares_budget: bool = False
    """True if all ranks of the host share the budget."""
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
    overwrite: bool = True
    """Whether an existing checkpoint may be replaced; the same on all ranks."""
    keeping: Keeping | None = None
    """Set if the save goes through a keeper; None: this process writes to storage."""
    storage: Callable[[], Storage] | None = None
    """Returns the destination, if a saver may write the image. Composing its URI takes a while, for
    which training must not wait."""
    admit: Admit | None = None
    base: Base | None = None
    """Where to borrow equal bytes; on all ranks or none."""
    publication: Publication | None = None
    """Set if this save publishes a version of a weight channel."""
    bases: PatchBases | None = None
    """The bases of the images, if these are stored as patches; agreed upon during the save."""

    @property
    def packing(self) -> Packing | None:
        """Form of the stored images; None if they are plain files."""
        return self.compression if self.bases is None or self.bases.whole else PATCH

    @property
    def waits(self) -> bool:
        """Whether the trainer waits until everything is copied."""
        return self.lazy is None or self.lazy.waits

    @property
    def fenced_s(self) -> float:
        """Seconds that training has waited for a lazy capture."""
        return 0.0 if self.lazy is None else self.lazy.waited_s

    def draft(self, plan: ImagePlan, rank: int) -> bytes:
        """Return the encoded fragment of this rank's image, without attempt and digests, for a
        process that completes it (:meth:`~...format.fragment.Fragment.with_image`)."""
        unhashed = ImageTable.of(rank, 0, np.empty((0, DIGEST_NBYTES), np.uint8))
        head = ("", self.step, self.created_s)
        tables = (plan.reported, plan.shards, unhashed)
        return fragment_of(head, rank, *tables, self.flat.tree).encode()

    def publish_with(self, writer: ImageWriter) -> None:
        """Let ``writer`` store a patch, if this save publishes a version."""
        if self.publication is not None:
            writer.publish(self.publication.image, self.bases)

    def published(self, attempt: str) -> None:
        """Note that a version is committed, if this save publishes one."""
        if self.publication is not None:
            self.publication.image.commit(attempt)

    def release_state(self) -> None:
        """Drop all references to the state. Frames of a failed save may keep the job alive."""
        self.flat = FlatState()
        self.digests = None
