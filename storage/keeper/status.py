"""Status of a keeper, for people and for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..arenas.label import GenerationId
from ..arenas.messages import HeldGeneration

__all__ = ["Counters", "KeeperStatus"]


@dataclass
class Counters:
    """Events since the keeper began.

    ``sealed``: images; ``agreed`` and ``void``: generations; ``skipped``: steps without a free
    slot; ``refused``: requests; ``flushed`` and ``flush_failures``: flushes to storage; ``local``
    and ``local_failures``: writes to the local level; ``protected`` and ``protect_failures``:
    generations that were, or could not be, encoded; ``rebuilt``: images; ``report_failures``:
    reports that the leader has not answered.
    """

    sealed: int = 0
    agreed: int = 0
    void: int = 0
    skipped: int = 0
    refused: int = 0
    flushed: int = 0
    flush_failures: int = 0
    local: int = 0
    local_failures: int = 0
    protected: int = 0
    protect_failures: int = 0
    rebuilt: int = 0
    report_failures: int = 0


@dataclass(frozen=True)
class KeeperStatus:
    """Current state of a keeper."""

    run: str
    host: str
    pid: int
    began_s: float
    epoch: int
    budget_nbytes: int
    held_nbytes: int
    ranks: Sequence[int]
    """Ranks with a connected process."""
    generations: Sequence[HeldGeneration]
    flushing: GenerationId | None
    """Generation being flushed."""
    address: str
    """HTTP address, "" if not served."""
    counters: Counters
    name: str = ""
    """Name of the keeper in the run."""
    hosts: Sequence[str] = ()
    """Names of all keepers of the job."""
    protection: str = "off"
    """Mode of parity."""
    protected: GenerationId | None = None
    """Newest protected generation."""
    parity_nbytes: int = 0
    """Size of this keeper's parity."""
    ready: bool = True
    """False while it loads its first images and lets trainers wait."""

    def as_json(self) -> dict[str, object]:
        """Return the status as a JSON object."""
        return {
            "run": self.run,
            "host": self.host,
            "pid": self.pid,
            "began_s": self.began_s,
            "epoch": self.epoch,
            "budget_nbytes": self.budget_nbytes,
            "held_nbytes": self.held_nbytes,
            "ranks": list(self.ranks),
            "generations": [
                {
                    "epoch": held.generation.epoch,
                    "step": held.generation.step,
                    "world": held.world,
                    "ranks": list(held.ranks),
                    "agreed": held.agreed,
                }
                for held in self.generations
            ],
            "flushing_step": None if self.flushing is None else self.flushing.step,
            "address": self.address,
            "name": self.name,
            "hosts": list(self.hosts),
            "protection": self.protection,
            "protected_step": None if self.protected is None else self.protected.step,
            "parity_nbytes": self.parity_nbytes,
            "ready": self.ready,
            "counters": asdict(self.counters),
        }
