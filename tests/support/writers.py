"""A trainer that writes to its state at any moment while a lazy save copies it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.storage.state import source
from holdfast.storage.state.capture import host_snapshot, process_memory
from holdfast.storage.state.capture.write_watch import write_history
from support.bits import fresh_uri, raw

__all__ = ["WRITERS", "Moments", "complaint", "state_of"]

SIZES = (3, 5_000, 20_000, 40_000, 130_000)
"""Elements: small ones, and some of many pages."""


class Moments:
    """What is to happen at which moment. Moments are numbered as they come."""

    def __init__(self) -> None:
        self.plan: dict[int, list[Callable[[], None]]] = {}
        self.passed = 0
        self._lock = threading.Lock()

    def at(self, moment: int, act: Callable[[], None]) -> None:
        """Call ``act`` then."""
        self.plan.setdefault(moment, []).append(act)

    def come(self) -> None:
        """The next one."""
        with self._lock:
            acts = self.plan.pop(self.passed, [])
            self.passed += 1
            for act in acts:
                act()

    def finish(self) -> None:
        """What has not happened yet never will."""
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
    """Some tensors: whole ones, tied ones, views of one storage, transposed, small, and odd ones."""
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
    """A few elements, or all."""
    if rng.random() < 0.3:
        return tensor
    first = int(rng.choice([0, tensor.shape[0] - 1, rng.integers(tensor.shape[0])]))
    return tensor[first : first + int(rng.integers(1, 50))]


def _counted(tensor: torch.Tensor, rng: np.random.Generator) -> None:
    _some(tensor.select(0, 0) if tensor.dim() > 1 else tensor, rng).add_(1)


def _data(tensor: torch.Tensor, rng: np.random.Generator) -> None:
    _counted(tensor.data, rng)


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
    if tensor.untyped_storage().nbytes():  # else it was freed, and torch would copy to address 0
        tensor.data.copy_(before)


def _thread(tensor: torch.Tensor, rng: np.random.Generator) -> None:
    thread = threading.Thread(target=_quietly, args=(lambda: _data(tensor, rng),))
    thread.start()
    thread.join()


def _backward(tensor: torch.Tensor, rng: np.random.Generator) -> None:
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda grad: _data(tensor, rng))
    leaf.sum().backward()


reused: list[torch.Tensor] = []
WRITERS = (
    *(_counted, _data, _numpy, _memmove, _resize, _resize_and_reuse, _set, _assign_data),
    *(_thread, _backward),
)


def _plan(
    state: dict[str, torch.Tensor], moments: Moments, rng: np.random.Generator
) -> Callable[[], None]:
    """Plan some writes. Returns what happens right after the call."""
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
    """A tensor that was freed before cannot be written to; nor can one that overlaps with itself."""
    try:
        act()
    except (RuntimeError, IndexError, ValueError):
        pass


def complaint(
    rng: np.random.Generator, *, lazy: bool | str = True, first_share: float = 0.2
) -> str | None:
    """Save a random state during writes; return what is wrong with the stored one, or None."""
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
            return (
                None
                if "state['" in str(error).replace('"', "'") and "changed while" in str(error)
                else str(error)
            )
        finally:
            moments.finish()
            holdfast.fence()
    found = holdfast.load(uri)
    wrong = [name for name, data in expected.items() if raw(found[name]) != data]
    return f"{', '.join(wrong)} of {list(state)} are not of the call" if wrong else None
