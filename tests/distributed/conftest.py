"""Ranks for the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.gang import Gang


@pytest.fixture(scope="session")
def gang() -> Iterator[Gang]:
    """Four ranks, used by one test after the other."""
    with Gang(4) as made:
        yield made
