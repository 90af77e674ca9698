"""Durations of saves and loads at given rates of ranks, hosts and the storage.

Scope: pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.units import parse_size
from ...errors import UsageError
from ..measured.result import Measurement

__all__ = ["Limits", "Rates", "measured_rates", "parse_rate"]


@dataclass(frozen=True)
class Limits:
    """Bytes per second of one rank, of a host's ranks together and of the whole job. None: no known
    limit."""

    rank: float | None = None
    host: float | None = None
    total: float | None = None

    @property
    def is_known(self) -> bool:
        """Return whether any limit is known."""
        return (self.rank, self.host, self.total) != (None, None, None)

    def seconds(self, rank_nbytes: Sequence[int], host_ranks: int) -> float | None:
        """Return the time for moving these bytes of each rank, with ``host_ranks`` on each host.
        The slowest rank, host or storage decides. None if no limit is known."""
        hosts = [
            sum(rank_nbytes[first : first + host_ranks])
            for first in range(0, len(rank_nbytes), host_ranks)
        ]
        pairs = (
            (max(rank_nbytes), self.rank),
            (max(hosts), self.host),
            (sum(rank_nbytes), self.total),
        )
        return max((nbytes / rate for nbytes, rate in pairs if rate is not None), default=None)


@dataclass(frozen=True)
class Rates:
    """Limits of saves and of loads."""

    save: Limits
    load: Limits

    @classmethod
    def alike(cls, limits: Limits) -> Rates:
        """Return rates with the same limits for saves and loads."""
        return cls(limits, limits)


def parse_rate(option: str, text: str) -> float:
    """Return the bytes per second of a text such as ``2GB/s``, ``2500MiB/s`` or ``2GB``. Raises
    UsageError, which names ``option``."""
    try:
        rate = float(parse_size(text.strip().removesuffix("/s")))
    except ValueError:
        rate = 0.0
    if rate <= 0:
        raise UsageError(
            f"{option} {text!r} is not a rate", advice="Give one such as 2GB/s or 2500MiB/s."
        )
    return rate


def measured_rates(found: Measurement, name: str) -> Rates:
    """Return the rates of one rank in a result of ``holdfast bench``. Raises UsageError, which
    names ``name``, if it has no saves or no loads."""
    limits = {}
    for phase in ("save", "load"):
        if phase not in found.by_name:
            raise UsageError(
                f"{name} has no phase {phase!r}", advice="Measure again, with all phases."
            )
        limits[phase] = Limits(rank=found.by_name[phase].rate)
    return Rates(limits["save"], limits["load"])
