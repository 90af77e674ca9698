"""Reads that suit the driver: in pieces, in memory of its library, of several chunks."""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support.copies import flipped
from support.drivers import HookedDriver
from support.given import Serve
from support.inside import on_allocation, read_within

import holdfast
from holdfast.drivers.contract import Buffer, TakePiece
from holdfast.drivers.layers.faults import FaultPlan, FaultsLayer
from holdfast.drivers.layers.retry import RetryLayer, RetryPolicy
from holdfast.drivers.memory import STORES, MemoryDriver
from holdfast.drivers.pieces import PieceJoiner, cut, piece_ends
from holdfast.errors import DamagedError, StorageError
from holdfast.planner.image import BLOCK_NBYTES, CHUNK_NBYTES
from holdfast.planner.loading import LoadPlan, Targets
from holdfast.storage.format.manifest import Manifest
from holdfast.storage.pipeline.image_reader import ImageReader, plan_reads
from holdfast.storage.protocol.current import read_manifest
from holdfast.storage.runtime.engine import run

PIECE_NBYTES = 1 << 20
SIZES = [3, (20 << 20) + 5, 700_001, 64 << 10, 3 << 20]


@dataclass
class Seen:
    """Reads of images, and the faults to inject into them."""

    uri: str = ""
    fetched: list[tuple[int, int]] = field(default_factory=list)
    in_pieces: list[tuple[int, int]] = field(default_factory=list)
    flips: int | None = None
    """The position of a byte that fetches flip."""
    cuts_nbytes: int = PIECE_NBYTES
    """Size of the pieces, regardless of the traits."""


class InPieces(MemoryDriver):
    """Storage that is best read in pieces."""

    def __init__(self, location: str, seen: Seen) -> None:
        super().__init__(location)
        self.seen = seen
        self.traits = replace(self.traits, piece_nbytes=PIECE_NBYTES)

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        seen = self.seen
        seen.fetched.append((start, start + nbytes))
        data = bytearray(await super().fetch(key, start, nbytes))
        if seen.flips is not None and start <= seen.flips < start + nbytes:
            data[seen.flips - start] ^= 1
        return memoryview(data)

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        self.seen.in_pieces.append((start, start + nbytes))
        if self.seen.cuts_nbytes == PIECE_NBYTES:
            await super().read_pieces(key, start, nbytes, take)
            return
        data = await self.fetch(key, start, nbytes)
        for piece in cut(data, start, self.seen.cuts_nbytes):
            take(piece)


@pytest.fixture
def near(serve: Serve) -> Seen:
    """Return the reads of drivers of this host."""
    made = Seen()
    made.uri = serve(lambda location: InPieces(location, made))
    return made


def _saved(seen: Seen, sizes: list[int]) -> dict[str, torch.Tensor]:
    """Save tensors of random bytes; forget the requests of the save."""
    random = torch.Generator().manual_seed(0)
    state = {
        f"t{number}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=random)
        for number, size in enumerate(sizes)
    }
    holdfast.save(f"{seen.uri}/saved", state)
    seen.fetched.clear()
    seen.in_pieces.clear()
    return state


def _empty(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def _filled(seen: Seen, into: Any = None, **given: Any) -> tuple[Any, holdfast.LoadReport]:
    """Load; return the state and the report."""
    reports: list[holdfast.LoadReport] = []
    found = holdfast.load(f"{seen.uri}/saved", into=into, on_report=reports.append, **given)
    return found, reports[0]


def test_all_of_a_chunk_is_one_read(near: Seen) -> None:
    """Chunks are read whole, each once, and the tensors get their bytes."""
    state = _saved(near, SIZES)
    target = _empty(state)
    holdfast.load(f"{near.uri}/saved", into=target)
    assert all(torch.equal(target[name], state[name]) for name in state)
    assert [start for start, _ in sorted(near.in_pieces)] == [0, CHUNK_NBYTES]


def test_a_part_of_a_checkpoint_takes_its_pieces(near: Seen) -> None:
    """Unwanted bytes between two reads are not read."""
    state = _saved(near, SIZES)
    target = {"t0": torch.zeros_like(state["t0"]), "t3": torch.zeros_like(state["t3"])}
    holdfast.load(f"{near.uri}/saved", into=target, strict=False)
    assert all(torch.equal(target[name], state[name]) for name in target)
    assert sum(stop - start for start, stop in near.in_pieces) <= 4 * (64 << 10)


def test_no_damaged_piece_is_delivered(near: Seen) -> None:
    """A flipped byte is reported with its block; the piece that holds it reaches no tensor."""
    size = 4 * PIECE_NBYTES
    holdfast.save(f"{near.uri}/saved", {"w": torch.ones(size, dtype=torch.uint8)})
    target = {"w": torch.zeros(size, dtype=torch.uint8)}
    near.flips = 2 * PIECE_NBYTES + 12_345
    with pytest.raises(DamagedError, match="not what was written"):
        holdfast.load(f"{near.uri}/saved", into=target)
    # The image begins with a header, so that pieces and tensors do not meet.
    assert int(target["w"][2 * PIECE_NBYTES : 3 * PIECE_NBYTES - 4096].sum()) == 0
    assert int(target["w"].sum()) > 0


def test_a_read_that_broke_goes_on_after_what_was_taken() -> None:
    """A retry passes no byte twice, and none is lost."""
    content = bytes(range(256)) * 40_000
    below = InPieces("broke", Seen())
    driver = RetryLayer(
        FaultsLayer(below, FaultPlan(seed=1, short=0.5)), RetryPolicy(100, None, first_pause_s=1e-4)
    )

    async def read() -> list[bytes]:
        taken: list[bytes] = []
        await below.put("k", content)
        await driver.read_pieces("k", 7, len(content) - 7, lambda piece: taken.append(bytes(piece)))
        return taken

    pieces = asyncio.run(read())
    assert b"".join(pieces) == content[7:]
    ends = piece_ends(7, len(content) - 7, PIECE_NBYTES)
    assert [len(piece) for piece in pieces] == [stop - begin for begin, stop in pairwise(ends)]
    assert len(below.seen.in_pieces) > 1


def test_pieces_cut_elsewhere_are_the_driver_s_fault(near: Seen) -> None:
    """Pieces that contradict the driver's traits are its fault, not damage."""
    state = _saved(near, SIZES)
    for shift in (-1, 1):
        near.cuts_nbytes = PIECE_NBYTES + shift
        with pytest.raises(StorageError, match="bytes instead of"):
            holdfast.load(f"{near.uri}/saved", into=state)


@pytest.mark.parametrize("arrived_nbytes", [1, 7, 10, 64, 1000])
@pytest.mark.parametrize(("start", "nbytes"), [(0, 100), (3, 97), (10, 10), (19, 2), (5, 0)])
def test_pieces_are_joined_to_multiples(start: int, nbytes: int, arrived_nbytes: int) -> None:
    """Pieces end at multiples of their size; a restart repeats only bytes not yet taken."""
    content = bytes(range(128))
    taken: list[bytes] = []
    joiner = PieceJoiner(start, nbytes, 10, lambda piece: taken.append(bytes(piece)), bytearray(10))
    half = content[start : start + nbytes // 2]
    rest_of = content[: start + nbytes]
    for at in range(0, len(half), arrived_nbytes):
        joiner.add(memoryview(half[at : at + arrived_nbytes]))
    joiner.restart()
    rest = rest_of[joiner.reached :]
    assert len(rest) == joiner.left_nbytes
    for at in range(0, len(rest), arrived_nbytes):
        joiner.add(memoryview(rest[at : at + arrived_nbytes]))
    assert b"".join(taken) == content[start : start + nbytes]
    ends = [start + sum(map(len, taken[: count + 1])) for count in range(len(taken))]
    assert all(end % 10 == 0 for end in ends[:-1])
    assert all(0 < len(piece) <= 10 for piece in taken)


BUDGET_NBYTES = 128 << 20
CHUNKS = 7


class _Handed(np.ndarray[Any, np.dtype[np.uint8]]):
    """Memory that a fetch returned."""


@dataclass
class Library:
    """Counts the bytes that reads hold: a read twice its size, a fetch once. ``offset``: of memory."""

    uri: str = ""
    now: int = 0
    seen: list[int] = field(default_factory=list)
    fetched: int = 0
    offset: int = 1

    def take(self, nbytes: int) -> None:
        self.now += nbytes
        self.seen.append(self.now)

    def give(self, nbytes: int) -> None:
        self.now -= nbytes


class HandsOver(MemoryDriver):
    """A driver whose fetches return their own memory, read-only and at odd addresses."""

    def __init__(self, location: str, library: Library) -> None:
        super().__init__(location)
        self.library = library
        self.traits = replace(self.traits, concurrency=64, hands_over=True)

    async def read(self, key: str, start: int, into: Buffer) -> None:
        self.library.take(2 * len(into))
        await asyncio.sleep(0.01)  # all that may run at once do
        await super().read(key, start, into)
        self.library.give(2 * len(into))

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        library = self.library
        library.take(nbytes)
        library.fetched += nbytes
        await asyncio.sleep(0.01)
        received = np.empty(nbytes + library.offset, np.uint8)[library.offset :].view(_Handed)
        weakref.finalize(received, library.give, nbytes)
        await super().read(key, start, received.data)
        return received.data.toreadonly()


@pytest.fixture
def library(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """Return a library whose drivers hand over fetched memory."""
    made = Library()
    made.uri = serve(lambda location: HandsOver(location, made))
    read_within(monkeypatch, BUDGET_NBYTES)
    with warnings.catch_warnings(action="error"):
        yield made


def _load(uri: str) -> None:
    holdfast.load(uri, budget_nbytes=BUDGET_NBYTES)


def _copy(uri: str) -> None:
    holdfast.copy(uri, f"{uri}-copy", budget_nbytes=BUDGET_NBYTES)


def _verify(uri: str) -> None:
    with holdfast.open(uri) as checkpoint:
        assert not checkpoint.verify().damages


@pytest.mark.nightly(3)
@pytest.mark.parametrize("use", [_load, _copy, _verify])
def test_what_it_holds_is_within_the_budget(use: Callable[[str], None], library: Library) -> None:
    """Loads, copies and verification use the whole budget and no more."""
    uri = f"{library.uri}/saved"
    holdfast.save(uri, {"w": torch.zeros(CHUNKS << 24, dtype=torch.uint8)})
    library.seen.clear()
    use(uri)
    assert 2 << 24 < max(library.seen) <= BUDGET_NBYTES
    assert library.now == 0


@pytest.mark.nightly(5)
@pytest.mark.parametrize(("held_nbytes", "at_most"), [(0, 4), (32 << 20, 2), (1 << 30, 1)])
def test_what_an_upload_holds_is_within_the_budget(
    held_nbytes: int, at_most: int, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves and copies use fewer buffers if uploads hold memory, but at least one."""

    async def slow(operation: str, key: str) -> None:
        if operation == "write":
            await asyncio.sleep(0.01)  # every buffer that may be filled meanwhile is

    def holding(location: str) -> HookedDriver:
        driver = MemoryDriver(location)
        driver.traits = replace(driver.traits, concurrency=64, upload_nbytes=held_nbytes)
        return HookedDriver(driver, before=slow)

    uri = serve(holding)
    made: list[int] = []
    on_allocation(monkeypatch, made.append)
    state = {"w": torch.zeros(CHUNKS << 24, dtype=torch.uint8)}
    for use in (
        partial(holdfast.save, f"{uri}/a", state),
        partial(holdfast.copy, f"{uri}/a", f"{uri}/b"),
    ):
        holdfast.release_memory()
        made.clear()
        use(budget_nbytes=64 << 20)
        assert 1 <= made.count(16 << 20) <= at_most


def test_a_load_uses_it_as_it_is(library: Library) -> None:
    """Tensors come back from fetched memory at any alignment, and none of it is kept."""
    uri = library.uri
    state = {"bytes": torch.arange(100_001) % 251, "floats": torch.randn(300, 701)}
    state["bytes"] = state["bytes"].to(torch.uint8)
    holdfast.save(uri, state)
    into = {"bytes": torch.zeros_like(state["bytes"]), "floats": torch.zeros(701, 300).T}
    holdfast.load(uri, into=into)
    assert all(torch.equal(into[name], state[name]) for name in state)
    assert library.fetched >= sum(tensor.nbytes for tensor in state.values())
    wide = {"floats": torch.zeros(300, 701, dtype=torch.float64)}
    holdfast.load(uri, into=wide, strict=False, cast=True)
    assert torch.equal(wide["floats"], state["floats"].double())
    with holdfast.open(uri) as checkpoint:
        assert torch.equal(
            checkpoint.read("floats", (slice(17, 200, 3), slice(5, 600))),
            state["floats"][17:200:3, 5:600],
        )
    assert library.now == 0


NBYTES = 3 * CHUNK_NBYTES + 5 * BLOCK_NBYTES + 99
LONG_NBYTES = 2 * CHUNK_NBYTES
NAME = "long-reads"


class Handed(MemoryDriver):
    """Hands over memory that is there already."""

    def __init__(self) -> None:
        super().__init__(f"{NAME}/saved")
        self.traits = replace(self.traits, hands_over=True)


@pytest.fixture
def manifest() -> Manifest:
    """Return the manifest of an image of four chunks, the last of which is short."""
    STORES.pop(NAME, None)
    content = torch.arange(NBYTES, dtype=torch.int32).to(torch.uint8)
    holdfast.save(f"memory://{NAME}/saved", {"w": content})
    return run(read_manifest(Handed()))[0]


def _wanted(start: int, stop: int) -> Targets:
    """Elements [start, stop) of the tensor."""
    column = np.array([[stop - start]], np.int64)
    zero = np.zeros(1, np.int64)
    return Targets(zero, np.array([[start]], np.int64), column, zero, column, zero)


def _read(manifest: Manifest, plan: LoadPlan, delivered: list[int]) -> None:
    """Run the plan; note the numbers of delivered reads."""
    reader = ImageReader(Handed(), manifest, 1 << 30)
    run(reader.run(plan, lambda read, buffer: delivered.append(read)))


def _flip(manifest: Manifest, position: int) -> None:
    flipped(Handed(), manifest.image_key(0), position)


def test_a_read_that_begins_and_ends_within_chunks_is_verified(manifest: Manifest) -> None:
    """Block digests verify the ends of a read; damage anywhere in it prevents its delivery."""
    start = CHUNK_NBYTES // 2
    plan = plan_reads(Handed(), manifest, _wanted(start, start + CHUNK_NBYTES), LONG_NBYTES)
    _flip(manifest, int(plan.start[0]) - 1)
    _flip(manifest, int(plan.stop[0]))
    delivered: list[int] = []
    _read(manifest, plan, delivered)
    assert delivered == [0]
    for position in (int(plan.start[0]), CHUNK_NBYTES, int(plan.stop[0]) - 1):
        _flip(manifest, position)
        with pytest.raises(DamagedError, match="not what was written"):
            _read(manifest, plan, delivered)
        _flip(manifest, position)
    assert delivered == [0]
