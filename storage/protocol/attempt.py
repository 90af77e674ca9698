"""An attempt at writing a checkpoint: where its files are, and what attempts have left behind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...drivers.contract import Driver

__all__ = ["Attempt", "Trace", "attempts"]

_IN_DATA = re.compile(r"data/([0-9]{8}T[0-9]{6}-[0-9a-f]{8})/(.+)")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at writing a checkpoint."""

    id: str

    @property
    def prefix(self) -> str:
        """Where its files are."""
        return f"data/{self.id}"

    @property
    def marker(self) -> str:
        """The key that is there until the attempt is settled, or being deleted."""
        return f"data/{self.id}/attempt.json"

    @property
    def fate(self) -> str:
        """The key that decides between commit and abort."""
        return f"data/{self.id}/fate"


@dataclass(slots=True)
class Trace:
    """What an attempt has left: whether somebody has said its fate, when its last file was written,
    and how much it is."""

    decided: bool = False
    written_s: float = float("-inf")
    nbytes: int = 0


async def attempts(driver: Driver) -> Mapping[Attempt, Trace]:
    """Every attempt that has left a file."""
    found: dict[Attempt, Trace] = {}
    async for info in driver.list("data"):
        match = _IN_DATA.fullmatch(info.key)
        if match:
            attempt = Attempt(match[1])
            trace = found.setdefault(attempt, Trace())
            trace.decided |= info.key == attempt.fate
            trace.written_s = max(trace.written_s, info.modified_s)
            trace.nbytes += info.nbytes
    return found
