"""Ranks for the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.rank_processes import RankProcesses


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankProcesses]:
    """Four ranks, used by one test after the other."""
    with RankProcesses(4) as made:
        yield made
