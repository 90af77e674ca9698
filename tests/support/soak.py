"""An hour of random saves, loads, copies and prunes, on storage that fails.

make soak                        an hour on a local folder and on an S3 server of its own
make soak MINUTES=1              a minute
make soak URI=s3://bucket/path   on your own S3
make soak SEED=n                 the operations of that seed, in the same order

Everything that an operation touches is loaded again: it must be an allowed state, bit for bit.
Memory, handles, threads, and bytes that belong to no checkpoint must not rise. Without an S3
server, ``memory://`` takes its place. ``tests/crash`` kills processes.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

import holdfast
from holdfast.bench.machine import trim_heap
from holdfast.bench.states import State, digests, zero
from holdfast.drivers.contract import ObjectInfo
from holdfast.drivers.uri import Uri, join, parse
from holdfast.storage.operations.location import Place
from holdfast.storage.protocol import limits
from holdfast.storage.runtime.buffers import release_pools
from holdfast.storage.runtime.engine import run

from .servers.start import FINDERS, started

SLOTS = 3
LOOK_EVERY = 10
LATE_S = 300.0
"""Time after which an operation counts as hung: all stacks are printed, and the process ends."""
GRACE_S = 15.0
"""Grace period for attempts close to commit, instead of an hour, so that they are collected."""
FAULTS = "error:0.01,unsure:0.01,short:0.01,delay:0.02,delay_s:0.02"
WARM_UP = 0.2
MIB = 1 << 20


@dataclass
class Slot:
    """A place for a checkpoint. ``allowed``: the states it may hold, by number, None for none."""

    root: Uri
    name: str
    allowed: set[int | None]

    @property
    def uri(self) -> str:
        return str(join(self.root, self.name))

    @property
    def holds(self) -> int | None:
        """Return the state of a settled slot."""
        (number,) = self.allowed
        return number

    def settle(self) -> None:
        """Allow only the state that is found here. Raise AssertionError if it was not allowed
        before."""
        found = number_of(lambda: holdfast.load(self.uri))
        if found not in self.allowed:
            raise AssertionError(f"{self.uri} holds {found}, not one of {self.allowed}")
        self.allowed = {found}


def content(number: int) -> State:
    """Generate the state with this number, of a size that depends on it."""
    random = torch.Generator().manual_seed(number)
    most = (8 << 20 if number % 11 == 0 else 1 << 18) // 64
    rows = torch.randint(0, most, (1 + number % 7,), generator=random).tolist()
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    tensors = {
        f"t{i}": torch.randint(0, 100, (n, 8), generator=random).to(dtypes[i % 4])
        for i, n in enumerate(rows)
    }
    return {"number": number, "model": tensors, "notes": [f"of {number}", number / 7, None, True]}


@functools.lru_cache(64)
def _digests(number: int) -> dict[str, bytes]:
    return digests(content(number))


def number_of(load: Callable[[], State]) -> int | None:
    """Return the number of a loaded state, None without a checkpoint. Raise AssertionError if the
    state differs from the saved one in a single bit."""
    try:
        found = load()
    except holdfast.NotACheckpointError:
        return None
    number = int(found["number"])
    if digests(found) != _digests(number) or found["notes"] != content(number)["notes"]:
        raise AssertionError(f"what was loaded is not what was saved as {number}")
    return number


class World:
    """Slots for checkpoints below several roots. The seed and an operation's number decide every
    random choice in it."""

    def __init__(self, roots: list[Uri], seed: int) -> None:
        self.slots = [Slot(root, f"step-{n}", {None}) for root in roots for n in range(SLOTS)]
        self.seed = seed

    def perform(self, number: int) -> str:
        """Run operation ``number``, check all slots that it may have changed, and return its name.
        Raise AssertionError for a broken promise, and any error that no fault explains."""
        random = Random(f"{self.seed}/{number}")
        name = random.choice(list(OPERATIONS))
        slot = random.choice(self.slots)
        before = [one.allowed for one in self.slots]
        try:
            OPERATIONS[name](self, slot, random, number)
        except holdfast.HoldfastError as error:
            if not _is_injected(error):
                raise
            name = f"{name}, failed"
        for one, allowed in zip(self.slots, before, strict=True):
            if one is slot or one.allowed != allowed:
                one.settle()
        return name

    def stray_nbytes(self) -> int:
        """Return the size of all objects that belong to no checkpoint."""
        return sum(map(_stray_nbytes, self.slots))


def _stray_nbytes(slot: Slot) -> int:
    async def listed() -> list[ObjectInfo]:
        async with Place(parse(slot.uri), {}).opened() as driver:
            return [info async for info in driver.list()]

    ours = tuple[str, ...]()
    if slot.holds is not None:
        with holdfast.open(slot.uri) as found:
            ours = ("manifest.safetensors", f"data/{found.attempt}/")
    return sum(info.nbytes for info in run(listed()) if not info.key.startswith(ours))


def _is_injected(error: BaseException | None) -> bool:
    """Return whether a fault has caused the error, or has left the lock of a prune behind."""
    while error is not None:
        if "injected fault" in str(error) or "or died doing it" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _failing(random: Random) -> dict[str, object]:
    return {"faults": f"seed:{random.randrange(1 << 30)},{FAULTS}"}


# The operations. Each first adds to ``slot.allowed`` the state that a failure halfway may leave.


def _save(world: World, slot: Slot, random: Random, number: int) -> None:
    slot.allowed = slot.allowed | {number}
    holdfast.save(slot.uri, content(number), step=number, storage_options=_failing(random))
    slot.allowed = {number}


def _async_save(world: World, slot: Slot, random: Random, number: int) -> None:
    slot.allowed = slot.allowed | {number}
    state = content(number)
    handle = holdfast.async_save(slot.uri, state, step=number, storage_options=_failing(random))
    zero(state)  # it is captured: a later read of it would save zeros
    handle.wait()
    slot.allowed = {number}


def _load(world: World, slot: Slot, random: Random, number: int) -> None:
    into = None if slot.holds is None else content(slot.holds)
    if into is not None:
        zero(into)
        into["notes"] = [None] * 4
    options = _failing(random)
    found = number_of(lambda: holdfast.load(slot.uri, into=into, storage_options=options))
    if found != slot.holds:
        raise AssertionError(f"loaded {found} from {slot.uri}, not {slot.holds}")


def _copy(world: World, slot: Slot, random: Random, number: int) -> None:
    source = random.choice([one for one in world.slots if one is not slot])
    if source.holds is None:
        return
    slot.allowed = slot.allowed | {source.holds}
    there, here = _failing(random), _failing(random)
    holdfast.copy(source.uri, slot.uri, overwrite=True, src_options=there, dst_options=here)
    slot.allowed = {source.holds}


def _prune(world: World, slot: Slot, random: Random, number: int) -> None:
    here = {one.name: one for one in world.slots if one.root is slot.root}
    count = sum(one.holds is not None for one in here.values())
    keep = random.randint(1, SLOTS)
    options = random.choice([{}, _failing(random)])
    for one in here.values():
        one.allowed = one.allowed | {None}
    report = holdfast.prune(str(slot.root), keep_last=keep, idle_s=0, storage_options=options)
    gone = {checkpoint.path for checkpoint in report.checkpoints}
    kept = len(report.kept)
    if kept < min(count, keep) or kept + len(gone) != count:
        raise AssertionError(f"of {count} checkpoints {kept} were kept, not {keep}")
    for name, one in here.items():
        one.allowed = {None} if name in gone else (one.allowed - {None} or {None})


OPERATIONS: Mapping[str, Callable[[World, Slot, Random, int], None]] = {
    "save": _save,
    "async_save": _async_save,
    "load": _load,
    "copy": _copy,
    "prune": _prune,
}


def rise(values: list[float]) -> float:
    """Return how far the median of the second half is above that of the first, after a warm-up."""
    rest = values[int(len(values) * WARM_UP) :]
    middle = len(rest) // 2
    return statistics.median(rest[middle:]) - statistics.median(rest[:middle])


def _look(world: World) -> tuple[float, ...]:
    """Measure what must not rise. Garbage and pooled buffers do not count."""
    gc.collect()
    release_pools()
    trim_heap()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    entries = (float(len(os.listdir(f"/proc/self/{folder}"))) for folder in ("fd", "task"))
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB, *entries, world.stray_nbytes() / MIB


LIMITS = {"resident memory, MiB": 32, "open handles": 3, "threads": 3, "stray bytes, MiB": 64}


def soak(world: World, minutes: float) -> list[tuple[float, ...]]:
    """Run operations for this long. Return the measurements taken meanwhile."""
    done: Counter[str] = Counter()
    looks = []
    end_s = time.monotonic() + 60 * minutes
    while time.monotonic() < end_s:
        number = done.total() + 1
        faulthandler.dump_traceback_later(LATE_S, exit=True)
        try:
            done[world.perform(number)] += 1
        except BaseException:
            print(f"operation {number} of --seed {world.seed} has failed", flush=True)
            raise
        if number % LOOK_EVERY == 0:
            looks.append(_look(world))
    faulthandler.cancel_dump_traceback_later()
    print(*(f"{count:>7,} {name}" for name, count in sorted(done.items())), sep="\n")
    return looks


@contextlib.contextmanager
def _roots(folder: Path, uri: str | None) -> Iterator[list[Uri]]:
    local, name = Uri("file", str(folder / "local"), {}), f"soak-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        if uri is None and FINDERS["s3"]() is not None:
            uri, environment = stack.enter_context(started("s3", folder))
            os.environ.update(environment)
        yield [local, join(parse(uri or "memory://soak"), name)]


def main() -> int:
    """Return 1 if something rises. Raise AssertionError if a checkpoint is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--uri", default=os.environ.get("HOLDFAST_TEST_S3_URL"))
    given = parser.parse_args()
    print(f"--seed {given.seed}", flush=True)
    limits.GRACE_S = GRACE_S
    with (
        tempfile.TemporaryDirectory(dir=".", ignore_cleanup_errors=True) as folder,
        _roots(Path(folder).absolute(), given.uri) as roots,
    ):
        looks = soak(World(roots, given.seed), given.minutes)
    problems = 0
    for (name, limit), values in zip(LIMITS.items(), zip(*looks, strict=True), strict=True):
        found = rise(list(values))
        problems += found > limit
        print(f"{name}: {max(values):,.1f} at most, risen by {found:,.1f} (limit {limit})")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
