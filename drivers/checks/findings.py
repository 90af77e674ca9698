"""What a check finds out about a storage: a finding for each probe, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Effect", "Finding", "Kept", "Outcome", "Report", "UnkeptError"]

Outcome = Literal["kept", "broken", "not promised", "not tried"]
"""``kept``: as Holdfast needs it. ``broken``: not so. ``not promised``: the driver's traits deny
it, or the storage lacks it by design, and Holdfast does without. ``not tried``: an earlier finding
made it pointless."""

Effect = Literal["unusable", "unsafe", "unreadable", "leftovers", "names", "slower"]
"""What follows where it is not kept. ``unusable``: neither saves nor loads work. ``unsafe``: a save
may destroy data, or report a success that is none. ``unreadable``: what was saved cannot be loaded.
``leftovers``: what dead saves leave stays, and costs money. ``names``: some characters must not be
in URIs. ``slower``: it works, slowly."""


class UnkeptError(Exception):
    """Raised by a probe where the storage did something else than Holdfast needs. The message says
    what."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a probe returns where it has not failed."""

    detail: str = ""
    outcome: Outcome = "kept"
    nbytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one probe."""

    name: str
    title: str
    outcome: Outcome
    detail: str
    effect: Effect | None = None
    """What follows; None where the storage keeps it."""
    follows: str = ""
    """The same as a sentence."""
    advice: str = ""
    seconds: float = 0.0
    nbytes_per_s: float | None = None
    """The rate at which a large object was written or read."""
    warnings: tuple[str, ...] = ()
    """What the driver logged meanwhile."""


@dataclass(slots=True)
class Report:
    """What is known of the storage at ``uri``, which is redacted."""

    uri: str
    findings: list[Finding] = field(default_factory=list)
    requests: int = 0
    """Operations of the driver; some take several requests."""
    seconds: float = 0.0
    left: str | None = None
    """The URI of what the check could not remove."""
    why_left: str = ""

    @property
    def problems(self) -> list[Finding]:
        """What is broken."""
        return [finding for finding in self.findings if finding.outcome == "broken"]

    @property
    def ok(self) -> bool:
        """Whether everything was tried, there is no problem, and nothing was left behind."""
        return not self.problems and self.left is None and not self._untried

    @property
    def _untried(self) -> bool:
        return any(finding.outcome == "not tried" for finding in self.findings)

    @property
    def may_save(self) -> bool:
        """Whether checkpoints that are saved here are safe, and can be loaded."""
        serious = any(
            finding.effect in ("unusable", "unsafe", "unreadable") for finding in self.problems
        )
        return not serious and not self._untried
