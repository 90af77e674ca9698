"""How hard property tests try: as many examples as they ask for, times ``HOLDFAST_TEST_EFFORT``."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

__all__ = ["EFFORT", "examples"]

EFFORT = int(os.environ.get("HOLDFAST_TEST_EFFORT", "1"))


def examples(count: int, *suppressed: HealthCheck) -> settings:
    """So many examples in a plain run. With more effort: so many times as many, and other ones each
    time, also on CI."""
    return settings(
        max_examples=count * EFFORT, suppress_health_check=[HealthCheck.too_slow, *suppressed]
    )
