"""Bit flips in the memory of a live keeper: in an image, a label or a parity block. The keepers of
several hosts and the steps of a resume run in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
import torch
from support.kept_hosts import KeptHosts, kept_hosts
from support.kept_memory import RUN, pinned, state_of

import holdfast
from holdfast.storage.arenas.label import GenerationId, Label
from holdfast.storage.arenas.memory import sealed_bytes
from holdfast.storage.arenas.messages import Protected, Rebuild
from holdfast.storage.keeper.decisions.choice import Choice
from holdfast.storage.keeper.slot_memory import PooledSlot
from holdfast.storage.keeper.tiers import PeerImage, TiersDriver
from holdfast.storage.operations.options import LoadOptions
from holdfast.storage.runtime import engine
from holdfast.storage.training.keeper_inventory import DamagedImage
from holdfast.storage.training.memory_level import MemoryLevel

HOSTS = "abcd"
NEWEST = GenerationId(0, 2)


def slot_of(job: KeptHosts, name: str, rank: int) -> PooledSlot:
    """Find the slot with the newest image of a rank."""
    slots = job.hosts[name].keeper.pool.slots.values()
    labels = [(slot, slot.label) for slot in slots if slot.label is not None]
    (slot,) = (s for s, label in labels if (label.generation, label.rank) == (NEWEST, rank))
    return slot


def flip_image(job: KeptHosts, name: str) -> None:
    """Flip a bit in the newest image of the host's own rank."""
    slot_of(job, name, HOSTS.index(name)).memory.view[4096] ^= 1


def flip_label(job: KeptHosts, name: str) -> None:
    """Flip a bit in the label of that image, as trainers of this host read it."""
    slot = slot_of(job, name, HOSTS.index(name))
    assert slot.label is not None
    data = bytearray(slot.label.encode())
    data[len(data) // 2] ^= 1
    slot.label_fd = sealed_bytes(bytes(data))


def flip_parity(job: KeptHosts, name: str) -> None:
    """Flip a bit in each parity block of the newest step on the host."""
    for parity in job.hosts[name].keeper._guards._held[NEWEST].parities:
        if parity.memory is not None:
            parity.memory.view[17] ^= 1


def resumed(
    mode: str, damage: Callable[[KeptHosts], None], readers: Sequence[str]
) -> tuple[int | None, list[str]]:
    """Protect two steps, damage the newer one, and resume on the hosts ``readers``. Return the step
    and the problems met. The loaded values are checked."""
    problems: list[str] = []
    count = GROUPS[mode]

    async def body() -> int | None:
        async with kept_hosts(mode, *([rank] for rank in range(count))) as job:
            await job.step(1, Protected)
            await job.step(2, Protected)
            damage(job)
            made: list[Choice] = []
            struck: set[DamagedImage] = set()
            while True:
                choices, lost = job.choices(struck)
                problems.extend(lost)
                choice = next((one for one in choices if one not in made), None)
                if choice is None:
                    return None
                made.append(choice)
                found = await job.rebuild(choice)
                problems.extend(found)
                results = [] if found else [await loaded(job, choice, name) for name in readers]
                struck.update(*results)
                if not found and not any(results):
                    return choice.generation.step

    async def loaded(job: KeptHosts, choice: Choice, name: str) -> set[DamagedImage]:
        """Load on one host, and return the images it strikes."""
        level = MemoryLevel(holdfast.Keeper(starts=False), "memory://run/")
        level._run = RUN
        level._arena = next(iter(job.hosts[name].arenas.values()))
        into = {
            key: torch.zeros_like(x)
            for rank in range(count)
            for key, x in state_of(0, rank).items()
        }
        hosts = [stock.host for stock in job.stocks()]
        try:
            await asyncio.to_thread(level.load, choice, hosts, into, LoadOptions(), set())
        except holdfast.DamagedError as error:
            problems.append(str(error))
            assert level._damaged
            return set(level._damaged)
        for rank in range(count):
            for key, wanted in state_of(choice.generation.step, rank).items():
                assert torch.equal(into[key], wanted)
        return set()

    return engine.run(asyncio.wait_for(body(), 60)), problems


GROUPS = {"copy": 2, "xor": 3, "pq": 4}


@pytest.mark.parametrize(
    ("flip", "mode", "name"),
    [
        (flip_image, "copy", "b"),
        (flip_image, "xor", "b"),
        (flip_label, "xor", "b"),
        (flip_image, "pq", "d"),
    ],
)
def test_a_bit_flip_on_one_host_is_repaired_from_parity(
    mode: str, name: str, flip: Callable[[KeptHosts, str], None]
) -> None:
    """The keeper is alive and still has the image, but does not count as a holder."""
    step, problems = resumed(mode, lambda job: flip(job, name), [name, HOSTS[0]])
    assert step == 2
    assert problems != []


def test_a_keeper_repairs_its_own_damaged_image() -> None:
    """It repairs in place, for existing mappings. A failed rebuild leaves the image as it is."""

    async def body() -> None:
        async with kept_hosts("xor", [0], [1], [2]) as job:
            await job.step(1, Protected)
            await job.step(2, Protected)
            image = await job.image(NEWEST, 0, "a")
            request = Rebuild(NEWEST, 0, job.group(), (0,), tuple(s.host for s in job.stocks()))
            arena, keeper = job.hosts["a"].arenas[0], job.hosts["a"].keeper
            assert await arena.rebuild(request)
            assert keeper.status().counters.rebuilt == 0
            held = slot_of(job, "a", 0)
            mapped = held.memory.view
            flip_image(job, "a")
            flip_label(job, "a")
            assert await arena.rebuild(request)
            assert keeper.status().counters.rebuilt == 1
            assert await job.image(NEWEST, 0, "a") == image == bytes(mapped)
            assert pinned(keeper.pool.generations) == []
            flip_image(job, "a")
            flip_parity(job, "b")
            flip_parity(job, "c")
            assert not await arena.rebuild(request)
            assert "does not match its label" in arena.problem
            assert await job.image(NEWEST, 0, "a") != image

    engine.run(asyncio.wait_for(body(), 60))


def test_an_image_that_a_peer_cannot_provide_is_named_by_its_own_key() -> None:
    """The resume can then exclude it, if it is missing there or truncated."""
    label = Label(RUN, NEWEST, 1, 3, 16, 16, 16, 16, 0.0, digests=bytes(16))
    nowhere = holdfast.drivers.memory.MemoryDriver("memory://nowhere")
    driver = TiersDriver("memory://run/", b"{}", [PeerImage(label, nowhere, "b")])
    with pytest.raises(holdfast.DamagedError, match="the keeper b cannot provide it") as raised:
        engine.run(driver.read(label.key, 0, memoryview(bytearray(16))))
    assert raised.value.key == label.key
