"""Patches of the engine: each function here is the only place that knows one internal name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast.storage.operations.reading import reader
from holdfast.storage.pipeline.image_writer import ImageWriter
from holdfast.storage.protocol import limits
from holdfast.storage.runtime.buffers import HostBuffer
from holdfast.storage.state.source import ImageSource


def around_copies(
    patch: pytest.MonkeyPatch, around: Callable[[Callable[[], None], int], None]
) -> None:
    """Call ``around(copy, start)`` for each chunk copied out of tensors."""
    plain = ImageSource.copy

    def copy(self: ImageSource, start: int, stop: int, into: Any) -> None:
        around(lambda: plain(self, start, stop, into), start)

    patch.setattr(ImageSource, "copy", copy)


def around_image_writes(
    patch: pytest.MonkeyPatch,
    around: Callable[[Callable[[], Awaitable[Any]], ImageWriter], Awaitable[Any]],
) -> None:
    """Call ``around(write, writer)`` for each write of an image, and return its result."""
    plain = ImageWriter.write

    async def write(self: ImageWriter, key: Any) -> Any:
        return await around(lambda: plain(self, key), self)

    patch.setattr(ImageWriter, "write", write)


def on_allocation(patch: pytest.MonkeyPatch, note: Callable[[int], object]) -> None:
    """Call ``note(nbytes)`` whenever a buffer is allocated."""
    plain = HostBuffer.allocate

    def allocate(nbytes: int) -> HostBuffer:
        note(nbytes)
        return plain(nbytes)

    patch.setattr(HostBuffer, "allocate", allocate)


def read_within(patch: pytest.MonkeyPatch, budget_nbytes: int) -> None:
    """Give readers of parts of a checkpoint another budget."""
    patch.setattr(reader, "READ_BUDGET_NBYTES", budget_nbytes)


def after_grace(patch: pytest.MonkeyPatch, clocks_differ_s: float = 1.0) -> None:
    """End the grace period of all attempts, even if the storage's clock is slow."""
    patch.setattr(limits, "GRACE_S", -clocks_differ_s)


def clean_up_within(patch: pytest.MonkeyPatch, limit_s: float) -> None:
    """Limit the time of a cleanup."""
    patch.setattr(limits, "CLEAN_UP_S", limit_s)
