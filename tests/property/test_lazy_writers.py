"""Test that whatever writes during a lazy save, it stores the state of the call or fails by name."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bits import fresh_uri, raw
from support.effort import examples

import holdfast
from holdfast.storage.state import source
from holdfast.storage.state.capture import host_snapshot, process_memory
from holdfast.storage.state.capture.host_snapshot import HostSnapshot
from holdfast.storage.state.capture.write_tracking import WriteTracker, write_tracker
from holdfast.storage.state.capture.write_watch import write_history

pytestmark = pytest.mark.skipif(
    write_tracker() is None, reason="writes cannot be tracked on this machine"
)

SEEDS = 400
"""Number of seeds within which a broken engine is found."""
SIZES = (3, 5_000, 20_000, 40_000, 130_000)
"""Numbers of elements: small ones, and some of many pages."""


class Moments:
    """Actions by the number of the moment at which they happen."""

    def __init__(self) -> None:
        self.plan: dict[int, list[Callable[[], None]]] = {}
        self.passed = 0
        self._lock = threading.Lock()

    def at(self, moment: int, act: Callable[[], None]) -> None:
        """Call ``act`` at ``moment``."""
        self.plan.setdefault(moment, []).append(act)

    def come(self) -> None:
        """Run the actions of the next moment."""
        with self._lock:
            acts = self.plan.pop(self.passed, [])
            self.passed += 1
            for act in acts:
                act()

    def finish(self) -> None:
        """Drop the actions that have not run."""
        with self._lock:
            self.plan.clear()


@contextmanager
def _watched_reads(moments: Moments) -> Iterator[None]:
    def gather_segments(segments: Sequence[tuple[int, int]], to: int) -> None:
        for address, nbytes in segments:
            moments.come()
            process_memory.read(address, to, nbytes)
            moments.come()
            to += nbytes

    with pytest.MonkeyPatch.context() as patch:
        for module in (host_snapshot, source):
            patch.setattr(module, "gather_segments", gather_segments)
        yield


def state_of(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Return tensors of random sizes and layouts."""
    state: dict[str, torch.Tensor] = {}
    for i in range(int(rng.integers(1, 5))):
        size = int(rng.choice(SIZES))
        tensor = torch.arange(size, dtype=torch.float32)
        kind = rng.choice(["whole", "whole", "tied", "views", "transposed", "odd", "expanded"])
        if kind == "tied":
            state[f"{i}.again"] = tensor
        elif kind == "views":
            half = size // 2
            state[f"{i}.end"] = tensor[half:]
            state[f"{i}.overlap"] = tensor[half // 2 : half + 1]
            tensor = tensor[:half]
        elif kind == "transposed":
            tensor = tensor[: size // 2 * 2].view(2, -1).t()
        elif kind == "odd":
            tensor = torch.arange(size + 3, dtype=torch.bfloat16)[3:]
        elif kind == "expanded":
            tensor = tensor[None].expand(2, size)
        state[str(i)] = tensor
    return state


def _some(tensor: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Return a few elements, or all."""
    if rng.random() < 0.3:
        return tensor
    first = int(rng.choice([0, tensor.shape[0] - 1, rng.integers(tensor.shape[0])]))
    return tensor[first : first + int(rng.integers(1, 50))]


def _data(tensor: torch.Tensor, rng: np.random.Generator) -> None:
    tensor = tensor.data
    _some(tensor.select(0, 0) if tensor.dim() > 1 else tensor, rng).add_(1)


def _numpy(tensor: torch.Tensor, rng: np.random.Generator) -> None:
    if tensor.dtype == torch.float32:
        tensor.numpy().reshape(-1)[0:1] -= 7
        array = tensor.numpy()
        array[(int(rng.integers(len(array))), *[0] * (array.ndim - 1))] -= 7


def _memmove(tensor: torch.Tensor, rng: np.random.Generator) -> None:
    storage = tensor.untyped_storage()
    at = int(rng.integers(max(1, storage.nbytes() - 8)))
    ctypes.memmove(storage.data_ptr() + at, rng.bytes(8), min(8, storage.nbytes() - at))


def _resize(tensor: torch.Tensor, rng: np.random.Generator) -> None:
    tensor.untyped_storage().resize_(0)


def _resize_and_reuse(tensor: torch.Tensor, rng: np.random.Generator) -> None:
    nbytes = tensor.untyped_storage().nbytes()
    tensor.untyped_storage().resize_(0)
    reused.append(torch.full((nbytes,), 7, dtype=torch.uint8))
    del reused[:-5]


def _set(tensor: torch.Tensor, rng: np.random.Generator) -> None:
    tensor.set_(torch.zeros(tensor.shape, dtype=tensor.dtype))


def _assign_data(tensor: torch.Tensor, rng: np.random.Generator) -> None:
    tensor.data = torch.zeros(tensor.shape, dtype=tensor.dtype)


def _put_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    if tensor.untyped_storage().nbytes():  # if it was freed, torch would copy to address 0
        tensor.data.copy_(before)


def _thread(tensor: torch.Tensor, rng: np.random.Generator) -> None:
    thread = threading.Thread(target=_quietly, args=(lambda: _data(tensor, rng),))
    thread.start()
    thread.join()


reused: list[torch.Tensor] = []
WRITERS = (*(_data, _numpy, _memmove, _resize, _resize_and_reuse, _set, _assign_data, _thread),)


def _plan(
    state: dict[str, torch.Tensor], moments: Moments, rng: np.random.Generator
) -> Callable[[], None]:
    """Plan some writes; return a function that does those due right after the call."""
    now: list[Callable[[], None]] = []
    for _ in range(int(rng.integers(1, 4))):
        tensor = state[str(rng.choice(list(state)))]
        moment = int(rng.integers(-2, 2 * len(state) + 1))
        if rng.random() < 0.25:  # there and back again
            before = tensor.clone()
            then = moment + int(rng.integers(1, 3))
            acts = [
                (moment, lambda t=tensor: _data(t, rng)),
                (then, lambda t=tensor, b=before: _put_back(t, b)),
            ]
        else:
            writer = WRITERS[int(rng.integers(len(WRITERS)))]
            acts = [(moment, lambda w=writer, t=tensor: w(t, rng))]
        for at, act in acts:
            if at < 0:
                now.append(lambda act=act: _quietly(act))
            else:
                moments.at(at, lambda act=act: _quietly(act))

    def at_once() -> None:
        for act in now:
            act()

    return at_once


def _quietly(act: Callable[[], Any]) -> None:
    """Call ``act``, which may fail for a tensor that was freed or overlaps with itself."""
    try:
        act()
    except (RuntimeError, IndexError, ValueError):
        pass


def complaint(
    rng: np.random.Generator, *, lazy: bool | str = True, first_share: float = 0.2
) -> str | None:
    """Save a random state during writes; return how the stored one is wrong, or None."""
    write_history.forget()
    state = state_of(rng)
    if rng.random() >= first_share:
        holdfast.async_save(fresh_uri(), state, lazy=True).wait(60)
        holdfast.fence()
    expected = {name: raw(tensor) for name, tensor in state.items()}
    moments = Moments()
    at_once = _plan(state, moments, rng)
    with _watched_reads(moments):
        try:
            handle = holdfast.async_save(uri := fresh_uri(), state, lazy=lazy)
            at_once()
            handle.wait(60)
        except holdfast.SaveError as error:
            text = str(error)
            is_named = "state['" in text.replace('"', "'") and "changed while" in text
            return None if is_named else text
        finally:
            moments.finish()
            holdfast.fence()
    found = holdfast.load(uri)
    wrong = [name for name, data in expected.items() if raw(found[name]) != data]
    return f"{', '.join(wrong)} of {list(state)} are not of the call" if wrong else None


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
