"""What the tests of the simulator share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from support.simulation.engine import installed


@pytest.fixture
def engine() -> Iterator[None]:
    """The engine runs in simulations only; what it warns of is part of the plan."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with installed():
        yield
    logging.disable(before)
