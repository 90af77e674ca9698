"""Results of a check: one finding per probe, and a report of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["kept", "broken", "not promised", "not tried"]
"""``kept``: works as Holdfast needs it. ``broken``: does not. ``not promised``: the driver's traits
rule it out, or the storage lacks it by design, and Holdfast copes without. ``not tried``: pointless
after an earlier finding."""

Effect = Literal["unusable", "unsafe", "unreadable", "leftovers", "names", "slower"]
"""Consequence of a broken property. ``unusable``: neither saves nor loads work. ``unsafe``: a save
may destroy data or wrongly report success. ``unreadable``: saved data cannot be loaded.
``leftovers``: remains of dead saves stay and cost money. ``names``: some characters must not appear
in URIs. ``slower``: works, but slowly."""


class UnkeptError(Exception):
    """Raised by a probe when the storage does not behave as Holdfast needs. The message describes
    the deviation."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Result of a probe that did not fail."""

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
    """Consequence; None if the storage passed."""
    follows: str = ""
    """The consequence as a sentence."""
    advice: str = ""
    seconds: float = 0.0
    nbytes_per_s: float | None = None
    """Throughput of writing or reading a large object."""
    warnings: tuple[str, ...] = ()
    """Warnings that the driver logged during the probe."""


@dataclass(slots=True)
class Report:
    """Findings about the storage at ``uri``, which is redacted."""

    uri: str
    findings: list[Finding] = field(default_factory=list)
    requests: int = 0
    """Number of driver operations; some take several requests."""
    seconds: float = 0.0
    left: str | None = None
    """URI of the files that the check could not remove."""
    why_left: str = ""

    @property
    def problems(self) -> list[Finding]:
        """Findings that are broken."""
        return [finding for finding in self.findings if finding.outcome == "broken"]

    @property
    def ok(self) -> bool:
        """True if every probe ran, no problem was found, and nothing was left behind."""
        return not self.problems and self.left is None and not self._untried

    @property
    def _untried(self) -> bool:
        return any(finding.outcome == "not tried" for finding in self.findings)

    @property
    def may_save(self) -> bool:
        """True if checkpoints saved here are safe and can be loaded."""
        serious = any(
            finding.effect in ("unusable", "unsafe", "unreadable") for finding in self.problems
        )
        return not serious and not self._untried
