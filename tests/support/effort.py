"""The effort of property tests: the number of examples that they ask for, times
``HOLDFAST_TEST_EFFORT``.

A plain run tries half of that number. ``make properties`` tries twenty times that number, and
different examples.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EFFORT = float(os.environ.get("HOLDFAST_TEST_EFFORT", "0.5"))
FEW = 20
"""A plain run tries all examples of a test that asks for no more than this."""


def tried(count: int) -> int:
    """Return the number of examples to try if a test asks for ``count``."""
    return max(round(count * EFFORT), min(count, FEW))


def examples(count: int, *suppressed: HealthCheck) -> settings:
    """Return settings for ``count`` examples, of which a plain run tries half. More effort
    multiplies them, and tries different ones each time, also on CI."""
    return settings(
        max_examples=tried(count), suppress_health_check=[HealthCheck.too_slow, *suppressed]
    )
