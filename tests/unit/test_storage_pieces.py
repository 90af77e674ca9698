"""Loads from storage that is read in pieces."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
from support.given import Serve

import holdfast
from holdfast.drivers.contract import Buffer, TakePiece
from holdfast.drivers.layers.faults import FaultPlan, FaultsLayer
from holdfast.drivers.layers.retry import RetryLayer, RetryPolicy
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.pieces import PieceJoiner, cut, piece_ends
from holdfast.errors import DamagedError, StorageError

PIECE_NBYTES = 1 << 20
CHUNK_NBYTES = 16 << 20


@dataclass
class Seen:
    """The ranges read in pieces, and the position of a flipped byte."""

    uri: str = ""
    ranges: list[tuple[int, int]] = field(default_factory=list)
    flips: int | None = None
    cuts_nbytes: int = PIECE_NBYTES
    """Size of the pieces, regardless of the traits."""


class InPieces(MemoryDriver):
    """Storage that is best read in pieces."""

    def __init__(self, location: str, seen: Seen) -> None:
        super().__init__(location)
        self.seen = seen
        self.traits = replace(self.traits, piece_nbytes=PIECE_NBYTES)

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        self.seen.ranges.append((start, start + nbytes))
        if self.seen.cuts_nbytes == PIECE_NBYTES:
            await super().read_pieces(key, start, nbytes, take)
            return
        data = await self.fetch(key, start, nbytes)
        for piece in cut(data, start, self.seen.cuts_nbytes):
            take(piece)

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        data = bytearray(await super().fetch(key, start, nbytes))
        flips = self.seen.flips
        if flips is not None and start <= flips < start + nbytes:
            data[flips - start] ^= 1
        return memoryview(data)


@pytest.fixture
def seen(serve: Serve) -> Seen:
    """Return the record of drivers that read in pieces."""
    made = Seen()
    made.uri = serve(lambda location: InPieces(location, made))
    return made


def _state() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    sizes = [3, (20 << 20) + 5, 700_001, 64 << 10, 3 << 20]
    return {
        f"t{number}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=random)
        for number, size in enumerate(sizes)
    }


def test_all_of_a_chunk_is_one_read(seen: Seen) -> None:
    """Chunks are read whole, each once, and the tensors get their bytes."""
    state = _state()
    holdfast.save(f"{seen.uri}/saved", state)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    holdfast.load(f"{seen.uri}/saved", into=target)
    assert all(torch.equal(target[name], state[name]) for name in state)
    assert [start for start, _ in sorted(seen.ranges)] == [0, CHUNK_NBYTES]


def test_a_part_of_a_checkpoint_takes_its_pieces(seen: Seen) -> None:
    """Unwanted bytes between two reads are not read."""
    state = _state()
    holdfast.save(f"{seen.uri}/saved", state)
    target = {"t0": torch.zeros_like(state["t0"]), "t3": torch.zeros_like(state["t3"])}
    holdfast.load(f"{seen.uri}/saved", into=target, strict=False)
    assert all(torch.equal(target[name], state[name]) for name in target)
    assert sum(stop - start for start, stop in seen.ranges) <= 4 * (64 << 10)


def test_no_damaged_piece_is_delivered(seen: Seen) -> None:
    """A flipped byte is reported with its block; the piece that holds it reaches no tensor."""
    size = 4 * PIECE_NBYTES
    holdfast.save(f"{seen.uri}/saved", {"w": torch.ones(size, dtype=torch.uint8)})
    target = {"w": torch.zeros(size, dtype=torch.uint8)}
    seen.flips = 2 * PIECE_NBYTES + 12_345
    with pytest.raises(DamagedError, match="not what was written"):
        holdfast.load(f"{seen.uri}/saved", into=target)
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
    assert len(below.seen.ranges) > 1


def test_a_load_whose_reads_break_is_whole(seen: Seen) -> None:
    """Reads that break again and again fill the tensors, and nothing counts as damage."""
    state = _state()
    holdfast.save(f"{seen.uri}/saved", state)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    faults = {"faults": "seed:3,short:0.7,error:0.1", "retries": 100, "op_timeout_s": 30}
    holdfast.load(f"{seen.uri}/saved", into=target, storage_options=faults)
    assert all(torch.equal(target[name], state[name]) for name in state)


def test_pieces_cut_elsewhere_are_the_driver_s_fault(seen: Seen) -> None:
    """Pieces that contradict the driver's traits are its fault, not damage."""
    state = _state()
    holdfast.save(f"{seen.uri}/saved", state)
    for shift in (-1, 1):
        seen.cuts_nbytes = PIECE_NBYTES + shift
        with pytest.raises(StorageError, match="bytes instead of"):
            holdfast.load(f"{seen.uri}/saved", into=state)


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
