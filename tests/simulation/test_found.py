"""Schedules that few seeds come upon: the engine passes them for ever, and one that lacks a step
fails."""

from __future__ import annotations

import pytest
from support.simulation.broken import BROKEN
from support.simulation.found import SCHEDULES
from support.simulation.run import run

pytestmark = pytest.mark.usefixtures("engine")


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_catches_the_engine_that_it_was_found_for(name: str) -> None:
    """And only that one: the engine as it is keeps its promises in it."""
    broken = next(b for b in BROKEN if b.name == name)
    assert run(SCHEDULES[name]) is None
    with broken.engine():
        assert run(SCHEDULES[name]) is not None
