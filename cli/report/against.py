"""The rate of a save relative to a result of ``holdfast bench``.

Scope: pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...bench.measured.result import LIMITS, Measurement
from ...storage.format.save_telemetry import SaveTelemetry
from ..text import one_of
from .words import facts, nbytes_of

__all__ = ["Against", "all_facts"]

_PHASE = "save"


@dataclass(frozen=True)
class Against:
    """A baseline. ``measured`` has a phase "save"; results without one are refused on reading."""

    measured: Measurement

    def share(self, save: SaveTelemetry) -> float | None:
        """Return the rate of ``save`` as a share of the measured save rate."""
        return self._share(save, _PHASE)

    def share_of_limit(self, save: SaveTelemetry) -> float | None:
        """Return the rate of ``save`` as a share of the measured limit; None if that was not
        measured."""
        return self._share(save, LIMITS[_PHASE])

    def words(self, save: SaveTelemetry) -> str:
        """Return both shares in words, with anything that limits the comparison."""
        said = [
            f"{share:.0%} of the {self.measured.by_name[name].rate / 1e9:.2f} GB/s of {name}"
            for name in (_PHASE, LIMITS[_PHASE])
            if (share := self._share(save, name)) is not None
        ]
        ranks = self.measured.config.get("ranks", 1)
        if ranks != save.world:
            said.append(f"measured with {one_of(ranks, 'rank')}")
        if self.measured.invalid:
            said.append("the measurement is marked as INVALID")
        return "; ".join(said)

    def _share(self, save: SaveTelemetry, name: str) -> float | None:
        phase = self.measured.by_name.get(name)
        if phase is None or save.seconds <= 0:
            return None
        return nbytes_of(save) / save.seconds / phase.rate


def all_facts(save: SaveTelemetry, against: Against | None) -> dict[str, str]:
    """Return the main facts about a save, by name, with its comparison to the baseline if there is
    one."""
    said = facts(save)
    if against is not None:
        said["bench"] = against.words(save)
    return said
