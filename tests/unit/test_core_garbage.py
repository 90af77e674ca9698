"""The collector of garbage is paused while anybody needs it to be, and is as it was afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from holdfast.core.garbage import collector_paused


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    """The collector runs before and after each test."""
    gc.enable()
    yield
    gc.enable()


def test_the_last_pause_that_ends_ends_it() -> None:
    """However pauses overlap."""
    first = collector_paused()
    second = collector_paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    """A trainer may run it at moments of its own choice."""
    gc.disable()
    with collector_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()
