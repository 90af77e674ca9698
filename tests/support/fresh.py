"""Draws seeds that no earlier run has tried."""

import os
import random


def first_seed() -> int:
    """Return HOLDFAST_TEST_SEED, or else a random number below 2**32. ``.ci/run`` derives it from
    the content that it tests: so a failure of it can be repeated."""
    given = os.environ.get("HOLDFAST_TEST_SEED")
    return random.randrange(1 << 32) if given is None else int(given)
