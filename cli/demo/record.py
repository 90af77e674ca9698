"""The record of a job, built from its events: losses, saves, loads, failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .journal import Event

__all__ = ["Record", "Saved"]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that all ranks have committed. Times are those of the slowest rank: until
    training went on, and until the commit."""

    step: int
    nbytes: int
    captured_s: float
    durable_s: float


@dataclass
class Record:
    """Record of a job, or of several that continue each other."""

    ranks: int
    parameters: int = 0
    text_nbytes: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    saves: list[Saved] = field(default_factory=list)
    loads: list[dict[str, Any]] = field(default_factory=list)
    """One entry per rank: uri, attempt, bytes_wanted, bytes_read, seconds."""
    failures: list[Event] = field(default_factory=list)
    killed: Event | None = None
    _saving: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Add an event."""
        told = event.told
        if event.kind == "ready":
            self.parameters = told["parameters"]
            self.text_nbytes = told["text_nbytes"]
        elif event.kind == "step" and event.rank == 0:
            self.losses[told["step"]] = told["loss"]
            self.seconds[told["step"]], self.tokens[told["step"]] = told["seconds"], told["tokens"]
        elif event.kind == "saved":
            self._add_saved(told)
        elif event.kind == "loaded":
            self.loads.append(told)
        elif event.kind == "failed":
            self.failures.append(event)
        elif event.kind == "killed":
            self.killed = event

    def _add_saved(self, told: dict[str, Any]) -> None:
        reports = self._saving.setdefault(told["step"], [])
        reports.append(told)
        if len(reports) == self.ranks:
            del self._saving[told["step"]]
            slowest = {name: max(r[name] for r in reports) for name in ("captured_s", "durable_s")}
            self.saves.append(Saved(told["step"], sum(r["nbytes"] for r in reports), **slowest))

    def tokens_per_s(self) -> float:
        """Return the throughput, without the first step, which sets torch up."""
        steps = sorted(self.losses)[1:] or list(self.losses)
        return sum(map(self.tokens.__getitem__, steps)) / sum(map(self.seconds.__getitem__, steps))

    def loaded_nbytes(self) -> tuple[int, int]:
        """Return the bytes wanted and the bytes read by all ranks together."""
        return sum(r["bytes_wanted"] for r in self.loads), sum(r["bytes_read"] for r in self.loads)

    def difference(self, other: Record) -> float:
        """Return the greatest difference in loss over the steps that both have trained."""
        return max(
            abs(loss - other.losses[step])
            for step, loss in self.losses.items()
            if step in other.losses
        )
