"""The periods that the protocol waits for. Modules read them here at each use, so that one
assignment changes them everywhere."""

from __future__ import annotations

__all__ = ["CLEAN_UP_S", "GRACE_S", "IDLE_S", "TELEMETRY_S"]

GRACE_S = 3600.0
"""An attempt with a commit record is spared for this long. Longer than any put of a manifest may
take."""
CLEAN_UP_S = 30.0
"""The most time that a failed save spends on removing its files, and that a new save spends on
removing those of dead savers."""
IDLE_S = 24 * 3600.0
"""An attempt without a new file for this long is dead, where the storage offers no better way to
tell."""
TELEMETRY_S = 10.0
"""The most time that storing the telemetry of a save takes, beside the end of its attempt."""
