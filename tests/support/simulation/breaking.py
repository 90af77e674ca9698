"""How an engine is broken on purpose, and the list of those that are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .engine import forget

Patch = tuple[Any, str, Any]


@dataclass(frozen=True)
class Broken:
    """A broken engine. ``storages``: part of the names of storages on which it shows."""

    name: str
    patches: Callable[[], Iterator[Patch]]
    storages: str = ""
    seed: int | None = None
    """A seed that shows it; None if hundreds are needed."""
    first: int = 0
    """The seed to begin with, if earlier ones show nothing."""

    @contextlib.contextmanager
    def engine(self) -> Iterator[None]:
        """Break the engine during the body."""
        patches = list(self.patches())
        before = [(owner, name, owner.__dict__[name]) for owner, name, _ in patches]
        forget()
        try:
            for owner, name, value in patches:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)
            forget()


BROKEN: list[Broken] = []


def broken(
    name: str, seed: int | None, storages: str = ""
) -> Callable[[Callable[[], Iterator[Patch]]], Callable[[], Iterator[Patch]]]:
    """Return a decorator that adds a broken engine to the list."""

    def listed(patches: Callable[[], Iterator[Patch]]) -> Callable[[], Iterator[Patch]]:
        BROKEN.append(Broken(name, patches, storages, seed))
        return patches

    return listed


def seeds_until_violation(
    run_seed: Callable[[int], object], engine: Broken, most: int
) -> tuple[int, str]:
    """Return the last seed tried, and its violation; "" if none of ``most`` seeds shows one."""
    seed = engine.first
    with engine.engine():
        for seed in range(engine.first, engine.first + most):
            try:
                run_seed(seed)
            except Exception as error:  # some break off at once
                return seed, f"{type(error).__name__}: {error}"
    return seed, ""
