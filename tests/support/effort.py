"""How hard property tests try: as many examples as they ask for, times ``HOLDFAST_TEST_EFFORT``.

A plain run takes half of them: ``make properties`` takes twenty times as many, and other ones.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EFFORT = float(os.environ.get("HOLDFAST_TEST_EFFORT", "0.5"))
FEW = 20
"""Of so many or fewer, a plain run leaves none out."""


def tried(count: int) -> int:
    """How many examples are tried where a test asks for ``count``."""
    return max(round(count * EFFORT), min(count, FEW))


def examples(count: int, *suppressed: HealthCheck) -> settings:
    """So many examples, half of them in a plain run. With more effort: so many times as many, and
    other ones each time, also on CI."""
    return settings(
        max_examples=tried(count), suppress_health_check=[HealthCheck.too_slow, *suppressed]
    )
