"""Outcomes of the accidents in the keeper demo, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.units import size_text
from .journal import Event

__all__ = ["LEFT", "TITLES", "Accident", "Outcome", "differences", "outcome_of"]

TITLES = (
    "what happened",
    "at step",
    "resumed from",
    "lost",
    "resume",
    "to first step",
    "own memory",
    "other hosts",
    "rebuilt",
    "storage",
)
LEFT = TITLES[:1]
TIERS = ("own", "peer", "parity", "storage")


@dataclass(frozen=True, slots=True)
class Accident:
    """An accident: at ``step`` all trainers are killed, and these ``hosts`` are lost.

    ``expected`` is the step from which the next job should resume. ``tier`` is where most of its
    bytes should come from, one of :data:`TIERS`.
    """

    title: str
    step: int
    hosts: tuple[str, ...]
    expected: int
    tier: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The resume after an accident.

    ``tiers`` holds bytes over all ranks, ``resume_s`` the time of the slowest rank, and
    ``first_step_s`` the time from the start of the job to its first step.
    """

    accident: Accident
    step: int | None
    tiers: Mapping[str, int]
    resume_s: float
    first_step_s: float

    @property
    def as_expected(self) -> bool:
        """Return whether the job resumed from the expected step and the expected tier."""
        return self.step == self.accident.expected and bool(self.tiers.get(self.accident.tier))

    def row(self) -> tuple[str, ...]:
        """Return the cells below :data:`TITLES`."""
        step = self.step or 0
        nbytes = [self.tiers.get(tier, 0) for tier in TIERS]
        return (
            self.accident.title,
            str(self.accident.step),
            str(step),
            str(self.accident.step - step),
            f"{self.resume_s:.2f} s",
            f"{self.first_step_s:.1f} s",
            *(size_text(n) if n else "-" for n in nbytes),
        )

    def document(self) -> dict[str, Any]:
        """Return the outcome as a JSON object."""
        step = self.step or 0
        return {
            "what": self.accident.title,
            "hosts": list(self.accident.hosts),
            "step": self.accident.step,
            "resumed_step": self.step,
            "lost_steps": self.accident.step - step,
            "resume_s": self.resume_s,
            "first_step_s": self.first_step_s,
            "nbytes": {tier: self.tiers.get(tier, 0) for tier in TIERS},
            "as_expected": self.as_expected,
        }


def outcome_of(accident: Accident, resumed: Sequence[Event], first_step_s: float) -> Outcome:
    """Combine the resume events of all ranks into an outcome."""
    tiers = {tier: sum(event.told["tiers"].get(tier, 0) for event in resumed) for tier in TIERS}
    return Outcome(
        accident,
        resumed[0].told["step"],
        tiers,
        max(event.told["seconds"] for event in resumed),
        first_step_s,
    )


def differences(
    taken: Iterable[tuple[int, float]], uninterrupted: Mapping[int, float]
) -> list[int]:
    """Return the steps that were not taken, or whose loss differed from the uninterrupted run."""
    losses: dict[int, set[float]] = {step: set() for step in uninterrupted}
    for step, loss in taken:
        losses.setdefault(step, set()).add(loss)
    return [step for step in sorted(losses) if losses[step] != {uninterrupted.get(step)}]
