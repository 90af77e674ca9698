"""Time limits of the protocol. Modules read them here at each use, so one assignment changes
them everywhere."""

from __future__ import annotations

GRACE_S = 3600.0
"""Time for which an attempt with a commit record is spared. Must exceed any put of a manifest."""
CLEAN_UP_S = 30.0
"""Time limit for a failed save to remove its files, and for a new save to remove dead savers'
files."""
IDLE_S = 24 * 3600.0
"""Idle time after which an attempt counts as dead on storage that offers no better criterion."""
TELEMETRY_S = 10.0
"""Time limit for storing the telemetry of a save, in parallel with settling its attempt."""
