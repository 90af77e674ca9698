"""Polling: repeated looks at something until it changes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ..errors import NotFoundError

T = TypeVar("T")

FIRST_PAUSE_S = 0.05
PAUSE_MAX_S = 2.0


async def poll(
    look: Callable[[], Awaitable[T | None]],
    timeout_s: float,
    *,
    chance: Callable[[], float] = random.random,
) -> T | None:
    """Call ``look`` until it returns something, and return that; None once ``timeout_s`` seconds
    have passed. Looks at least once, and does not interrupt a look.

    Looks begin 0.05 s apart, then twice as long each time, up to 2 s, minus a random part of up to
    a half: clients that started together do not stay together. ``chance`` returns a random number
    in [0, 1).
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    pause_s = FIRST_PAUSE_S
    while True:
        began_s = loop.time()
        found = await look()
        now_s = loop.time()
        if found is not None or now_s >= end_s:
            return found
        next_s = min(began_s + pause_s * (1 - chance() / 2), end_s)
        await asyncio.sleep(max(0.0, next_s - now_s))
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


async def news(get: Callable[[], Awaitable[bytes]], known: bytes | None) -> bytes | None:
    """Return the content that ``get`` returns; None if it is ``known``, or if there is no such
    object."""
    try:
        content = await get()
    except NotFoundError:
        return None
    if content == known:
        return None
    return content
