"""What the lead keeper waits for before it commits what all keepers have written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest
from support.clock import run_virtual

from holdfast.errors import SaveError, SupersededError
from holdfast.storage.keeper.decisions.standing import Written
from holdfast.storage.keeper.flushing.flush import _written


class Waiting:
    """The reports of the keepers ``a`` and ``b``. The second time that something moves, another job
    has begun, on ``a`` alone."""

    name = "a"

    def __init__(self) -> None:
        self.lead = self
        self.names = frozenset("ab")
        self.moves = 0
        self.parts: dict[str, Written] = {}

    def written(self) -> Mapping[str, Written]:
        """What was reported."""
        return self.parts

    def unheard(self) -> Sequence[str]:
        """Of the job that runs, all are heard."""
        return []

    async def moved(self, within_s: float) -> None:
        """Something has."""
        self.moves += 1
        if self.moves == 2:
            self.names = frozenset("a")
        assert self.moves < 10, "it waits for a keeper that reports to nobody here"


def test_nothing_is_waited_for_of_a_keeper_that_is_not_of_the_job_any_more() -> None:
    """The next job was begun on fewer hosts, while the flush of the one before was under way."""
    waiting = Waiting()
    with pytest.raises(SaveError, match=re.escape("the keeper b has stopped reporting")):
        run_virtual(_written(waiting, lambda: True))  # type: ignore[arg-type]
    assert waiting.moves == 2


def test_what_a_keeper_has_nothing_of_any_more_is_not_tried_again() -> None:
    """It took the place of one that had died, and later steps that of what was to be written. The
    other keepers held two of three slots for it, so that no later step could take its place."""
    waiting = Waiting()
    waiting.parts["b"] = Written("attempt", problem="nothing of it is here", gone=True)
    with pytest.raises(SupersededError, match="the keeper b no longer holds it"):
        run_virtual(_written(waiting, lambda: True))  # type: ignore[arg-type]
