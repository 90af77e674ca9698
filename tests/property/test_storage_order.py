"""Test the order of storage operations: names follow durable data, which then never changes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bits import difference
from support.drivers import HookedDriver
from support.effort import examples
from support.ranks import load_as_ranks, save_as_ranks

import holdfast
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.format.manifest import MANIFEST_KEY, Manifest


class Notary(HookedDriver):
    """Records violations of the order; a share ``rate`` of operations fails, half of them after."""

    def __init__(self, seed: int, rate: float) -> None:
        super().__init__(MemoryDriver())
        self.rng, self.rate = random.Random(seed), rate
        self.durable: set[str] = set()
        self.tried: set[str] = set()
        """Named by a manifest that the save under way has tried to put: it may have been stored."""
        self.broken: list[str] = []

    async def around(
        self,
        operation: str,
        key: str,
        work: Callable[..., Awaitable[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        await self._judge(operation, key, *args)
        fate = self.rng.random()
        if fate < self.rate / 2:
            raise holdfast.StorageDownError("injected", key=key)
        result = await work(*args, **kwargs)
        await asyncio.sleep(0)  # others come between the deed and the word of it
        if fate < self.rate:
            raise holdfast.StorageDownError("injected, though done", key=key)
        if operation == "commit":
            self.durable.add(key)
        return result

    async def _judge(self, operation: str, key: str, *args: Any) -> None:
        if operation == "put" and key == MANIFEST_KEY:
            self.tried |= (named := names(args[1]))
            self.broken += [
                f"{image} is named before its commit has returned" for image in named - self.durable
            ]
        elif operation in ("create", "put", "commit", "delete", "delete_all"):
            current = self.inner.objects.get(MANIFEST_KEY)  # type: ignore[attr-defined]
            if key == MANIFEST_KEY or key in self.tried or (current and key in names(current[0])):
                self.broken.append(f"{operation} of {key}, which a manifest names")


def names(manifest: bytes) -> set[str]:
    """The keys of all images of a manifest."""
    decoded = Manifest.decode(manifest)
    return {decoded.image_key(image) for image in range(len(decoded.images))}


def state_of(step: int, rank: int) -> dict[str, Any]:
    """Tensors that all ranks hold alike, and one of each rank's own."""
    return {
        "step": step,
        "alike": torch.full((4, 1000), float(step)),
        "own": torch.full((9, rank + 1), float(rank - step)),
    }


@examples(40)
@given(
    worlds=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 32),
    rate=st.sampled_from([0.0, 0.01, 0.03, 0.1]),
)
def test_a_manifest_names_only_what_is_durable_and_nobody_touches_what_it_names(
    worlds: list[int], seed: int, rate: float
) -> None:
    """Successful saves exist, failed ones wholly or not."""
    storage = Notary(seed, rate)
    possible: set[int | None] = {None}
    for step, world in enumerate(worlds):
        storage.tried.clear()
        try:
            save_as_ranks(storage, [state_of(step, rank) for rank in range(world)])
            possible = {step}
        except holdfast.HoldfastError:
            possible = possible | {step}
        assert storage.broken == []
        found = None
        if MANIFEST_KEY in storage.inner.objects:  # type: ignore[attr-defined]
            found = asyncio.run(storage.inner.get(MANIFEST_KEY))
            into = [state_of(-1, rank) for rank in range(Manifest.decode(found).world)]
            loaded = load_as_ranks(storage.inner, into)
            found = loaded[0]["step"]
            assert difference([state_of(found, rank) for rank in range(len(into))], loaded) is None
        assert found in possible
        possible = {found}
