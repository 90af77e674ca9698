"""Whatever writes during a lazy save, it stores the state of the call or fails by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.effort import examples
from support.writers import complaint

from holdfast.storage.state.capture.host_snapshot import HostSnapshot
from holdfast.storage.state.capture.write_tracking import WriteTracker, write_tracker

pytestmark = pytest.mark.skipif(
    write_tracker() is None, reason="writes cannot be tracked on this machine"
)

SEEDS = 400
"""A broken engine is found within so many."""


@examples(80)
@given(st.integers(0, 2**32))
def test_a_lazy_save_stores_the_state_of_the_call_or_fails(seed: int) -> None:
    """Writers of any kind come before, between and after reads; some free or replace memory."""
    assert complaint(np.random.default_rng(seed)) is None


@examples(40)
@given(st.integers(0, 2**32))
def test_sums_alone_find_every_writer_too(seed: int) -> None:
    """Sums find every writer without the kernel's help, as on an accelerator."""
    with pytest.MonkeyPatch.context() as patch:
        _tracking_off(patch)
        assert complaint(np.random.default_rng(seed), lazy="prove", first_share=0) is None


def _tracking_off(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WriteTracker, "is_clean", lambda self, start, stop: True)


def _asks_before_it_reads(patch: pytest.MonkeyPatch) -> None:
    plain = HostSnapshot.segments
    check = HostSnapshot.check

    def early(self: HostSnapshot, row: int, start: int, stop: int) -> list[tuple[int, int]]:
        check(self, [(row, start, stop)])
        return plain(self, row, start, stop)

    _broken(patch, segments=early, check=lambda self, read, *, disarm=True: None)


def _asks_for_the_first_alone(patch: pytest.MonkeyPatch) -> None:
    plain = HostSnapshot.check

    def once(
        self: HostSnapshot, read: Sequence[tuple[int, int, int]], *, disarm: bool = True
    ) -> None:
        plain(self, read[:1], disarm=disarm)

    _broken(patch, check=once)


def _arms_late(patch: pytest.MonkeyPatch) -> None:
    plain = HostSnapshot.segments

    def late(self: HostSnapshot, row: int, start: int, stop: int) -> list[tuple[int, int]]:
        pages = self._tracked(self._at[row])
        if pages[0] < pages[1]:
            self._tracker.arm(*pages)
        return plain(self, row, start, stop)

    _broken(patch, segments=late)


def _edges_not_copied(patch: pytest.MonkeyPatch) -> None:
    plain = HostSnapshot.segments

    def all_of_it(self: HostSnapshot, row: int, start: int, stop: int) -> list[tuple[int, int]]:
        i = self._at[row]
        if self._head[i] < self._tail[i] and i not in self._whole:
            return [(self._regions[i].address + start, stop - start)]
        return plain(self, row, start, stop)

    _broken(patch, segments=all_of_it)


def _broken(patch: pytest.MonkeyPatch, **methods: Callable[..., object]) -> None:
    for name, method in methods.items():
        patch.setattr(HostSnapshot, name, method)


@pytest.mark.parametrize(
    "broken",
    [
        _tracking_off,
        _asks_before_it_reads,
        _asks_for_the_first_alone,
        _arms_late,
        _edges_not_copied,
    ],
)
def test_a_broken_engine_is_found(
    broken: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    """The trainer above finds each fault that the engine could have."""
    broken(monkeypatch)
    seeds = rng.integers(2**32, size=SEEDS)
    assert any(complaint(np.random.default_rng(seed)) for seed in seeds)
