"""Two saves to one URI, interleaved with up to two interruptions, and with a crash at any point.

A reader always finds exactly one complete checkpoint that somebody saved, bit for bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bits import difference
from support.simulation.turns import Actor, Simulation, run_inline, save_of

import holdfast
from holdfast.storage.format.manifest import MANIFEST_KEY, Manifest
from holdfast.storage.operations.maintenance.prune import PrunedCheckpoint, delete_checkpoint

STATES = {
    name: {"who": name, "x": torch.full((3,), float(i))}
    for i, name in enumerate(["first", "a", "b", "c", "last"])
}
LOST = (holdfast.SupersededError, holdfast.InvisibleFilesError)

Arrange = Callable[[list[str]], list[str]]
ORDERS: dict[str, Arrange] = {"sorted": sorted, "reversed": lambda keys: sorted(keys, reverse=True)}


class Watch:
    """Checks of the storage after every step."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.seen: dict[tuple[Any, ...], str] = {}
        self.history: list[str] = []

    async def check(self) -> None:
        """Check that there is a complete checkpoint, and that somebody saved it."""
        objects = self.sim.storage.objects
        manifest = objects["manifest.safetensors"][0]
        attempt = Manifest.decode(manifest).attempt
        key = (attempt, objects.get(f"data/{attempt}/0.safetensors", (None,))[0])
        if key not in self.seen:
            state = await self.sim.load()
            assert difference(STATES[state["who"]], state) is None
            self.seen[key] = state["who"]
        if self.history[-1:] != [self.seen[key]]:
            self.history.append(self.seen[key])


async def prepared(arrange: Arrange) -> tuple[Simulation, Watch]:
    """Return a simulation with a first checkpoint."""
    sim = Simulation(arrange)
    await save_of(STATES["first"])(sim.storage)
    watch = Watch(sim)
    await watch.check()
    return sim, watch


async def finish(sim: Simulation, watch: Watch) -> None:
    """Check the end of a run.

    Each save either became the checkpoint for a while or lost to another. One more save succeeds,
    and leaves only its own objects and those within their grace period.
    """
    await sim.end()
    for actor in sim.actors:
        if actor.dead or actor.name.startswith("reader"):
            continue
        error = actor.task.exception()
        assert error is None or isinstance(error, LOST), error
        assert error is not None or actor.name in watch.history
    await save_of(STATES["last"])(sim.storage)
    await watch.check()
    assert watch.history[-1] == "last"
    current = Manifest.decode(await sim.storage.get("manifest.safetensors")).attempt
    left = {info.key.split("/")[1] for info in [i async for i in sim.storage.list("data")]} - {
        current
    }
    for attempt in left:
        assert (await sim.storage.get(f"data/{attempt}/fate")).startswith(b"claim ")


def steps_of_a_save() -> int:
    """Count the storage accesses of a save over a checkpoint and the remains of a dead attempt."""

    async def run() -> int:
        sim, watch = await prepared(sorted)
        dead = sim.add("b", save_of(STATES["b"]))
        await sim.settle()
        for _ in range(8):
            await sim.step(dead)
        sim.crash(dead)
        actor = sim.add("a", save_of(STATES["a"]))
        await sim.run(lambda ready: ready[0], watch.check)
        await sim.end()
        return actor.steps

    return int(run_inline(run()))


def scripted(cuts: list[int]) -> Callable[[list[Actor]], Actor]:
    """Return a schedule of two actors that alternate.

    The first runs for cuts[0] steps, the second for cuts[1], the first for cuts[2] and so on.
    """
    turns = itertools.chain(cuts, itertools.repeat(1 << 30))
    state = {"turn": 0, "left": next(turns)}

    def choose(ready: list[Actor]) -> Actor:
        if not state["left"]:
            state["turn"] += 1
            state["left"] = next(turns)
        state["left"] -= 1
        wanted = "ab"[state["turn"] % 2]
        return next((actor for actor in ready if actor.name == wanted), ready[0])

    return choose


@pytest.mark.nightly(8)
@pytest.mark.parametrize(("order", "every"), [("reversed", 9), ("sorted", 21)])
def test_two_saves_that_take_turns_leave_one_whole_checkpoint(order: str, every: int) -> None:
    """A sample of interleavings with up to two interruptions, in each order of deletions."""
    n = steps_of_a_save()
    assert math.gcd(every, n - 1) == 1, "some second interruptions would never be tried"

    async def run(cuts: list[int]) -> None:
        sim, watch = await prepared(ORDERS[order])
        for name in "ab":
            sim.add(name, save_of(STATES[name]))
        try:
            await sim.run(scripted(cuts), watch.check)
            await finish(sim, watch)
        except BaseException:
            print(f"cuts {cuts}:", *sim.log, sep="\n  ")
            raise

    for first, second in list(itertools.product(range(1, n), range(1, n)))[::every]:
        run_inline(run([first, second]))


@pytest.mark.nightly(5)
def test_a_save_is_not_deleted_by_a_pruning_that_began_before_it() -> None:
    """A save that overlaps a pruning survives it, since the pruning targets an older attempt."""

    async def run(cuts: list[int] | None) -> int:
        sim, watch = await prepared(sorted)
        old = attempt_of(sim)
        sim.add("a", save_of(STATES["a"]))
        sim.add("b", lambda driver: delete_checkpoint(driver, PrunedCheckpoint("", None, old, 0)))
        try:
            await sim.run(
                scripted(cuts or []),
                lambda: watch.check() if MANIFEST_KEY in sim.storage.objects else nothing(),
            )
            assert all(actor.task.exception() is None for actor in sim.actors)
            assert (await sim.load())["who"] == "a"
        except BaseException:
            print(f"cuts {cuts}:", *sim.log, sep="\n  ")
            raise
        return sim.actors[0].steps

    n = run_inline(run(None))
    for first, second in itertools.product(range(n // 2, n), range(1, 12, 2)):
        run_inline(run([first, second]))


def attempt_of(sim: Simulation) -> str:
    """Return the attempt of the current checkpoint."""
    return Manifest.decode(sim.storage.objects[MANIFEST_KEY][0]).attempt


async def nothing() -> None:
    """Check nothing: no checkpoint needs to exist at this moment."""
