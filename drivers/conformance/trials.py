"""Shared helpers: the trial decorator, requirements of trials, and handling of bytes, parts and
outcomes."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import pytest

from ..checks.ground import begun, bytes_of, parts_of, store, write_parts
from ..contract import Buffer
from .place import Place

__all__ = [
    "ATOMIC_EXCLUSIVE", "COPIES", "LINKS", "PROBE", "SEVERAL_STREAMS", "SMALL_OBJECTS",
    "TINY_PARTS", "UNORDERED_PARTS", "Need", "aligned", "begun", "bytes_of", "parts_of",
    "refused", "store", "trial", "write_parts",
]  # fmt: skip

_LARGE_NBYTES = (64 << 20) + 1

P = ParamSpec("P")
E = TypeVar("E", bound=Exception)


@dataclass(frozen=True)
class Need:
    """A requirement of a trial. If the storage does not meet it, the trial is skipped with the
    reason ``missing``."""

    missing: str
    met: Callable[[Place], bool]


UNORDERED_PARTS = Need(
    "parts of an upload are written in order", lambda place: place.traits.part_order == "any"
)
TINY_PARTS = Need("parts have a least size", lambda place: place.traits.part_min_nbytes == 1)
SEVERAL_STREAMS = Need("an upload is one stream", lambda place: place.traits.streams > 1)
SMALL_OBJECTS = Need(
    "objects may be larger than 64 MiB",
    lambda place: (place.traits.object_max_nbytes or _LARGE_NBYTES) < _LARGE_NBYTES,
)
ATOMIC_EXCLUSIVE = Need(
    "exclusive puts are not atomic", lambda place: place.traits.exclusive_is_atomic
)
LINKS = Need("an object has one key", lambda place: place.traits.links)
COPIES = Need("the storage copies no ranges", lambda place: place.traits.copies is not None)
PROBE = Need("no probe for this storage (--driver-probe)", lambda place: place.probe is not None)


def trial(
    *needs: Need,
) -> Callable[
    [Callable[Concatenate[Place, P], Coroutine[Any, Any, None]]],
    Callable[Concatenate[Place, P], None],
]:
    """Turn a coroutine function that takes a place into a test, which is skipped if a need is not
    met."""

    def decorate(
        test: Callable[Concatenate[Place, P], Coroutine[Any, Any, None]],
    ) -> Callable[Concatenate[Place, P], None]:
        @functools.wraps(test)
        def run(place: Place, *args: P.args, **kwargs: P.kwargs) -> None:
            for need in needs:
                if not need.met(place):
                    pytest.skip(f"not applicable: {need.missing}")
            place.run(test(place, *args, **kwargs))

        return cast(Callable[Concatenate[Place, P], None], run)

    return decorate


def aligned(nbytes: int, offset: int = 0) -> Buffer:
    """Return ``nbytes`` of memory whose address is ``offset`` bytes past a page boundary."""
    return memoryview(mmap.mmap(-1, nbytes + offset + 1))[offset : offset + nbytes]


async def refused(
    kind: type[E], *calls: Awaitable[object], where: tuple[str, str] | None = None
) -> list[E]:
    """Await these calls one after the other and return their errors. Fails if a call succeeds or
    raises another type, or if ``where`` is given and is not the URI and key of each error."""
    outcomes = [await _outcome(call) for call in calls]
    errors = [outcome for outcome in outcomes if isinstance(outcome, kind)]
    assert len(errors) == len(calls), f"expected {kind.__name__}, got {outcomes}"
    for error in errors if where is not None else ():
        assert (getattr(error, "uri", None), getattr(error, "key", None)) == where
    return errors


async def _outcome(call: Awaitable[object]) -> object:
    try:
        return await call
    except Exception as error:  # any error: the trial inspects it
        return error
