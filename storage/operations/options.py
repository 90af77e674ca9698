"""Options of saves and loads, documented by the public API, and their validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ...errors import UsageError
from ..format.packed import Compression, checked_compression
from ..format.part import Only
from ..pipeline.base import Base
from ..pipeline.borrowing import Incremental
from ..ranks.hosts import BUDGET_MIN_NBYTES
from ..runtime.progress import ProgressCallback
from ..state.flattening.walk import Default
from .loading.differences import Strict
from .loading.load import Exchanging
from .location import Place
from .report import LoadReport
from .telemetry import Telemetry, check_telemetry

BUDGET_NBYTES = 512 << 20
DEADLINE_S = 300.0

Lazy = bool | Literal["prove"]
"""Whether training continues while the state is copied; ``prove`` also verifies by digests that
nothing changed meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options of :func:`~holdfast.async_save`. ``asynchronous``: training continues meanwhile, so
    that another process should write. ``budget_nbytes``: of all ranks of a host; None: for the
    whole image if asynchronous, else :data:`BUDGET_NBYTES` for this rank."""

    asynchronous: bool = False
    lazy: Lazy = False
    budget_nbytes: int | None = None
    deadline_s: float = DEADLINE_S
    timeout_s: float | None = None
    compression: Compression | None = None
    allow_empty: bool = False
    overwrite: bool = True
    default: Default | None = None
    progress: ProgressCallback | None = None
    telemetry: Telemetry = "on"

    def check(self) -> None:
        """Raise UsageError for a budget that is too small, and for unknown values."""
        if self.budget_nbytes is not None:
            check_budget(self.budget_nbytes)
        checked_compression(self.compression)
        check_telemetry(self.telemetry)

    def base_at(
        self, place: Place, key: Callable[[], str | None], incremental: bool | Incremental = True
    ) -> Base | None:
        """Return the base of saves with these options, at ``key()`` below ``place``; None unless
        ``incremental``. Raises UsageError if the options exclude one."""
        if incremental is False:
            return None
        if incremental is True:
            incremental = Incremental()
        if not isinstance(incremental, Incremental):
            raise UsageError(f"incremental={incremental!r} is neither a bool nor an Incremental")
        if self.compression is not None:
            raise UsageError(
                f"an incremental save with compression={self.compression!r}",
                advice="Leave out the compression: what has not changed is not written anyway.",
            )
        return Base.below(place.uri, place.options, key, incremental)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of :func:`~holdfast.load`."""

    only: Only | None = None
    strict: Strict = True
    cast: bool = False
    budget_nbytes: int | None = None
    """The budget of all ranks of a host. None: :data:`BUDGET_NBYTES` for this one."""
    deadline_s: float = DEADLINE_S
    storage_options: Mapping[str, object] | None = None
    exchange: Exchanging = "auto"
    on_report: Callable[[LoadReport], None] | None = None
    progress: ProgressCallback | None = None
    telemetry: Telemetry = "on"

    def check(self) -> None:
        """Raise UsageError for unknown values."""
        if self.budget_nbytes is not None:
            check_budget(self.budget_nbytes)
        if self.exchange not in (True, False, "auto"):
            raise UsageError(f"exchange={self.exchange!r}", advice='Give "auto", True or False.')
        check_telemetry(self.telemetry)
        if self.strict not in (True, False, "state", "checkpoint"):
            raise UsageError(
                f"strict={self.strict!r}", advice='Give True, "state", "checkpoint" or False.'
            )


def check_budget(budget_nbytes: int) -> None:
    """Raise UsageError for a budget too small to make progress."""
    if budget_nbytes < BUDGET_MIN_NBYTES:
        raise UsageError(
            f"a budget of {budget_nbytes:,} bytes is too small",
            advice=f"Give at least {BUDGET_MIN_NBYTES:,}.",
        )
