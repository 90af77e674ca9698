"""The checkpoints of a soak on several storages, their permitted contents and the operations.

Each operation has a number. The seed and the number decide every random choice in it. A state is
generated from the number of the operation that saves it, so a reader can check every bit.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import torch

import holdfast
from holdfast.bench.states import State, digests, flat_tensors, zero
from holdfast.drivers.contract import ObjectInfo
from holdfast.drivers.uri import Uri, join
from holdfast.storage.operations.location import Place
from holdfast.storage.protocol import limits
from holdfast.storage.protocol.prune_lock import PRUNING_KEY
from holdfast.storage.protocol.records import ABORT_RECORD
from holdfast.storage.runtime.engine import run

__all__ = ["GRACE_S", "OPERATIONS", "Ground", "Slot", "World", "content", "shorten_grace"]

GRACE_S = 15.0
"""Grace period for attempts close to commit, in place of the usual hour.

With an hour, no soak would ever collect one. It is longer than any put of a manifest takes here.
"""
SMALL_NBYTES = 1 << 18
LARGE_NBYTES = 8 << 20
"""Maximum size of a tensor in a large state.

Large tensors give an image several chunks, and its upload several parts.
"""
KILL_WITHIN_S = 0.4
PATIENCE_S = 120.0
IN_FLIGHT_S = 1.0
"""Time that a server may still spend on a request of a killed process."""
ABSENT = None


def shorten_grace() -> None:
    """Shorten the grace period of this process; see GRACE_S."""
    limits.GRACE_S = GRACE_S


@dataclass(frozen=True)
class Ground:
    """A root. ``faults``: a fault plan without a seed; ``shared``: other processes can read it."""

    name: str
    root: Uri
    faults: str
    shared: bool

    @property
    def folder(self) -> Path | None:
        """Return the local folder of the root, None for other storages."""
        return Path(self.root.location) if self.root.scheme == "file" else None

    def options(self, random: Random) -> dict[str, object]:
        """Return storage options that inject faults."""
        return {"faults": f"seed:{random.randrange(1 << 30)},{self.faults}"}


@dataclass
class Slot:
    """A place for a checkpoint. ``allowed``: the states it may hold, by number, or ABSENT."""

    ground: Ground
    name: str
    allowed: set[int | None]

    @property
    def uri(self) -> str:
        return str(join(self.ground.root, self.name))

    def settle(self) -> int | None:
        """Return the state found here, and allow no other from now on.

        Raise AssertionError if that state is not allowed.
        """
        found = number_of(lambda: holdfast.load(self.uri))
        if found not in self.allowed:
            raise AssertionError(f"{self.uri} holds {found}, not one of {self.allowed}")
        self.allowed = {found}
        return found

    @property
    def holds(self) -> int | None:
        """The state of a settled slot."""
        (number,) = self.allowed
        return number


@functools.lru_cache(4)
def content(number: int) -> State:
    """Generate the state with this number; sizes, dtypes and values depend on the number."""
    random = torch.Generator().manual_seed(number)
    most_nbytes = LARGE_NBYTES if number % 11 == 0 else SMALL_NBYTES
    sizes = torch.randint(0, most_nbytes, (1 + number % 7,), generator=random).tolist()
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    tensors = {
        f"t{i}": torch.randint(0, 100, (nbytes // 64, 8), generator=random, dtype=torch.uint8).to(
            dtypes[i % 4]
        )
        for i, nbytes in enumerate(sizes)
    }
    return {
        "number": number,
        "step": number,
        "model": tensors,
        "notes": [f"of {number}", number / 7, None, True],
    }


@functools.lru_cache(64)
def _digests(number: int) -> dict[str, bytes]:
    return digests(content(number))


def number_of(load: Callable[[], State]) -> int | None:
    """Return the number of the state that ``load`` returns, ABSENT without a checkpoint.

    Raise AssertionError if the state differs from the saved one in a single bit.
    """
    try:
        found = load()
    except holdfast.NotACheckpointError:
        return ABSENT
    number = found["number"]
    if (
        digests(found) != _digests(number)
        or found["notes"] != content(number)["notes"]
        or found["step"] != number
    ):
        raise AssertionError(f"what was loaded is not what was saved as {number}")
    return int(number)


class World:
    """All grounds and their slots. ``perform`` runs one operation and checks its effects."""

    def __init__(
        self,
        grounds: list[Ground],
        slots: int,
        seed: int,
        operations: Mapping[str, Operation] | None = None,
    ) -> None:
        self.slots = [
            Slot(ground, f"step-{n}", {ABSENT}) for ground in grounds for n in range(slots)
        ]
        self.grounds = grounds
        self.seed = seed
        self._operations = OPERATIONS if operations is None else operations
        self.deaths: Counter[str] = Counter()
        """Counts of processes to kill: killed or already finished, new or old checkpoint left."""
        # Child processes are forked from a server that has already imported their modules.
        self.processes = multiprocessing.get_context("forkserver")
        # The server can import this module only after the main program has set the path of the
        # tests.
        self.processes.set_forkserver_preload(
            [
                "torch",
                "holdfast.storage.api",
                "holdfast.storage.operations.maintenance.copy",
                "__main__",
                __name__,
            ]
        )

    def perform(self, number: int) -> tuple[str, bool]:
        """Run operation ``number``; return its name and whether it succeeded (no injected fault).

        Raise AssertionError for a broken invariant, and any error that no fault explains.
        """
        random = Random(f"{self.seed}/{number}")
        weights = [weight for weight, _ in self._operations.values()]
        name = random.choices(list(self._operations), weights)[0]
        slot = random.choice(self.slots)
        before = [s.allowed for s in self.slots]
        well = True
        try:
            _, operation = self._operations[name]
            operation(self, slot, random, number)
        except holdfast.HoldfastError as error:
            if not _on_purpose(error):
                raise
            well = False
        for s, allowed in zip(self.slots, before, strict=True):
            if s is slot or s.allowed != allowed:
                s.settle()
        return name, well

    def settle(self) -> None:
        """Settle every slot."""
        for slot in self.slots:
            slot.settle()

    def left_nbytes(self) -> int:
        """Return the total size of all objects that belong to no checkpoint."""
        return sum(info.nbytes for ground in self.grounds for info in self.strays(ground))

    def strays(self, ground: Ground) -> list[ObjectInfo]:
        """Return the objects that belong to no checkpoint."""
        ours = []
        for slot in self.slots:
            if slot.ground is ground and slot.holds is not ABSENT:
                with holdfast.open(slot.uri) as found:
                    ours += [
                        f"{slot.name}/manifest.safetensors",
                        f"{slot.name}/data/{found.attempt}/",
                    ]
        return [info for info in run(_listed(ground)) if not info.key.startswith(tuple(ours))]


def _on_purpose(error: BaseException | None) -> bool:
    """Return whether a fault of this soak caused the error.

    A pruning that a fault or a kill interrupted also counts: its lock refuses saves during the
    grace period.
    """
    while error is not None:
        if "injected fault" in str(error) or "or died doing it" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


async def _listed(ground: Ground) -> list[ObjectInfo]:
    async with Place(ground.root, {}).opened() as driver:
        return [info async for info in driver.list()]


async def _got(ground: Ground, key: str) -> bytes | None:
    async with Place(ground.root, {}).opened() as driver:
        try:
            return await driver.get(key)
        except holdfast.NotFoundError:
            return None


# The operations. Each adds to ``slot.allowed`` every state that a failure halfway could leave.


def _save(world: World, slot: Slot, random: Random, number: int) -> None:
    slot.allowed = slot.allowed | {number}
    holdfast.save(slot.uri, content(number), storage_options=slot.ground.options(random))
    slot.allowed = {number}


def _async_save(world: World, slot: Slot, random: Random, number: int) -> None:
    slot.allowed = slot.allowed | {number}
    state = content.__wrapped__(number)
    handle = holdfast.async_save(slot.uri, state, storage_options=slot.ground.options(random))
    zero(state)  # it is captured: whoever still reads it saves zeros
    handle.wait()
    slot.allowed = {number}


def _load(world: World, slot: Slot, random: Random, number: int) -> None:
    options = slot.ground.options(random)
    if slot.holds is ABSENT:
        _expect(ABSENT, number_of(lambda: holdfast.load(slot.uri, storage_options=options)))
        return
    into = content.__wrapped__(slot.holds)
    zero(into)
    into["notes"] = [None] * 4
    _expect(
        slot.holds, number_of(lambda: holdfast.load(slot.uri, into=into, storage_options=options))
    )


def _misread(world: World, slot: Slot, random: Random, number: int) -> None:
    """Flip bits on the way: the load raises, or returns the right state."""
    plan = {"faults": f"seed:{random.randrange(1 << 30)},flip:0.2"}
    try:
        _expect(slot.holds, number_of(lambda: holdfast.load(slot.uri, storage_options=plan)))
    except holdfast.CheckpointError as error:
        if isinstance(error, holdfast.NotACheckpointError):
            raise


def _read(world: World, slot: Slot, random: Random, number: int) -> None:
    if slot.holds is ABSENT:
        return
    with holdfast.open(slot.uri, storage_options=slot.ground.options(random)) as found:
        for name, tensor in flat_tensors(content(slot.holds)).items():
            first = random.randint(0, len(tensor))
            rows = slice(first, random.randint(first, len(tensor)))
            if not torch.equal(found.read(name, rows=rows), tensor[rows]):
                raise AssertionError(f"{name}[{rows}] of {slot.uri} is not what was saved")


def _verify(world: World, slot: Slot, random: Random, number: int) -> None:
    if slot.holds is not ABSENT:
        with holdfast.open(slot.uri, storage_options=slot.ground.options(random)) as found:
            _expect([], found.verify().damages)


def _copy(world: World, slot: Slot, random: Random, number: int) -> None:
    source = random.choice([s for s in world.slots if s is not slot])
    if source.holds is ABSENT:
        return
    slot.allowed = slot.allowed | {source.holds}
    there = source.ground.options(random)
    here = slot.ground.options(random)
    holdfast.copy(source.uri, slot.uri, overwrite=True, src_options=there, dst_options=here)
    slot.allowed = {source.holds}


def _prune(world: World, slot: Slot, random: Random, number: int) -> None:
    """Prune, sometimes with faults; without them, only objects in their grace period remain."""
    ground = slot.ground
    keep = random.choice((None, 1, 2, 3))
    options = ground.options(random) if random.random() < 0.3 else {}
    here = {s.name: s for s in world.slots if s.ground is ground}
    there = sum(s.holds is not ABSENT for s in here.values())
    for s in here.values():
        s.allowed = s.allowed | ({ABSENT} if keep else set())
    report = holdfast.prune(str(ground.root), keep_last=keep, idle_s=0, storage_options=options)
    gone = {c.path for c in report.checkpoints}
    for name, s in here.items():
        s.allowed = (
            {ABSENT} if name in gone else s.allowed - ({ABSENT} if s.allowed != {ABSENT} else set())
        )
    if len(report.kept) < min(there, keep or there) or len(report.kept) + len(gone) != there:
        raise AssertionError(f"of {there} checkpoints {len(report.kept)} were kept, not {keep}")
    if not options:
        _check_nothing_left(world, ground)


def _check_nothing_left(world: World, ground: Ground) -> None:
    now_s = time.time()
    for info in world.strays(ground):
        record_key = info.key.rpartition("/")[0] + "/fate"
        record = run(_got(ground, record_key))
        spared = info.key.endswith(f"/{PRUNING_KEY}") or record not in (None, ABORT_RECORD)
        if not spared or now_s - info.modified_s > GRACE_S + 60:
            raise AssertionError(f"{info.key} of {ground.name} was left by prune")
    for slot in world.slots:
        # A failed save may leave an empty folder in a slot without objects. The next save removes
        # it.
        if slot.ground is ground and ground.folder is not None and slot.holds is not ABSENT:
            below = list(os.walk(ground.folder / slot.name))
            empty = [path for path, folders, names in below if not folders and not names]
            _expect(
                [],
                empty + [name for _, _, names in below for name in names if name.endswith(".tmp")],
            )


def _kill(world: World, slot: Slot, random: Random, number: int) -> None:
    """Kill a process during a save, copy or prune, while this process reads."""
    shared = [s for s in world.slots if s.ground.shared]
    slot = random.choice(shared)
    source = random.choice([s for s in shared if s is not slot])
    what = random.choice(["save", "save", "copy", "prune"])
    after_s = random.random() ** 2 * KILL_WITHIN_S
    if what == "copy" and source.holds is ABSENT:
        return
    before = slot.holds
    slot.allowed = {before, {"save": number, "copy": source.holds, "prune": ABSENT}[what]}
    given = {"save": number, "copy": source.uri, "prune": str(slot.ground.root)}[what]
    ours, theirs = world.processes.Pipe()
    child = world.processes.Process(
        target=_victim, args=(theirs, what, slot.uri, given), daemon=True
    )
    child.start()
    theirs.close()
    if what == "prune":
        for s in shared:
            s.allowed = s.allowed | ({ABSENT} if s.ground is slot.ground else set())
    try:
        if not ours.poll(PATIENCE_S):
            raise AssertionError(f"a process that was to {what} did not begin")
        ends_s = time.monotonic() + after_s
        while time.monotonic() < ends_s and child.is_alive():
            found = number_of(lambda: holdfast.load(slot.uri))
            if found not in slot.allowed:
                raise AssertionError(
                    f"a reader beside {what} found {found}, not one of {slot.allowed}"
                )
    finally:
        child.kill()
        child.join(PATIENCE_S)
        if slot.ground.folder is None:
            time.sleep(IN_FLIGHT_S)
        died = child.exitcode != 0
        child.close()
        ours.close()
    changed = slot.settle() != before
    world.deaths[
        f"{what}: {'killed' if died else 'came to its end'}, {'new' if changed else 'old'}"
    ] += 1


def _victim(pipe: Connection, what: str, uri: str, given: Any) -> None:
    """Announce the start, then run one operation; runs in a child process."""
    shorten_grace()
    state = content(given if what == "save" else 0)
    holdfast.save(
        "memory://warm-up", state
    )  # the first save in a process is slow: kills would miss the rest
    number_of(lambda: holdfast.load(uri))
    pipe.send("begin")
    if what == "save":
        holdfast.save(uri, state)
    elif what == "copy":
        holdfast.copy(given, uri, overwrite=True)
    else:
        holdfast.prune(given, keep_last=1, idle_s=0)


def _expect(expected: object, found: object) -> None:
    if expected != found:
        raise AssertionError(f"found {found}, not {expected}")


Operation = tuple[int, Callable[[World, Slot, Random, int], None]]
"""The weight of an operation, and its function."""
OPERATIONS: Mapping[str, Operation] = {
    "save": (20, _save),
    "async_save": (12, _async_save),
    "load": (12, _load),
    "load, bits flipped": (4, _misread),
    "open and read": (8, _read),
    "verify": (6, _verify),
    "copy": (10, _copy),
    "prune": (6, _prune),
    "kill -9": (8, _kill),
}
