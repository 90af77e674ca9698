"""Loads from remote storage read ahead: each byte once, and only wanted ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from support.given import Serve

import holdfast
from holdfast.drivers.contract import Buffer, TakePiece
from holdfast.drivers.memory import MemoryDriver
from holdfast.errors import DamagedError, MismatchError, StorageDownError

CHUNK_NBYTES = 16 << 20
PIECE_NBYTES = 1 << 20


@dataclass
class Seen:
    """Reads of images, and the faults to inject into them."""

    uri: str = ""
    fetched: list[tuple[int, int]] = field(default_factory=list)
    in_pieces: list[tuple[int, int]] = field(default_factory=list)
    in_flight: int = 0
    delay_s: float = 0.0
    fails: Exception | None = None
    first: Callable[[], Awaitable[None]] | None = None
    """Runs once, before the next fetch."""


class Far(MemoryDriver):
    """Storage behind a network, which is read in pieces."""

    remote: ClassVar[bool] = True

    def __init__(self, location: str, seen: Seen) -> None:
        super().__init__(location)
        self.seen = seen
        self.traits = replace(self.traits, piece_nbytes=PIECE_NBYTES)

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        seen = self.seen
        seen.fetched.append((start, start + nbytes))
        seen.in_flight += 1
        first = seen.first
        seen.first = None
        try:
            if first is not None:
                await first()
            await asyncio.sleep(seen.delay_s)
            if seen.fails is not None:
                raise seen.fails
            return await super().fetch(key, start, nbytes)
        finally:
            seen.in_flight -= 1

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        self.seen.in_pieces.append((start, start + nbytes))
        await super().read_pieces(key, start, nbytes, take)


@pytest.fixture
def seen(serve: Serve) -> Seen:
    """Reads seen by the driver of a test."""
    made = Seen()
    made.uri = serve(lambda location: Far(location, made))
    return made


MANY = 4000
"""Tensors: to look at them takes as long as it takes to read some chunks."""


def _state(small: int = MANY) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    sizes = [(40 << 20) + 5, 700_001, *[3] * small]
    return {
        f"t{number}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=random)
        for number, size in enumerate(sizes)
    }


def _saved(seen: Seen, small: int = MANY) -> dict[str, torch.Tensor]:
    state = _state(small)
    holdfast.save(f"{seen.uri}/saved", state)
    seen.fetched.clear()
    seen.in_pieces.clear()
    return state


def _load(seen: Seen, into: Any = None, **given: Any) -> tuple[Any, holdfast.LoadReport]:
    reports: list[holdfast.LoadReport] = []
    found = holdfast.load(f"{seen.uri}/saved", into=into, on_report=reports.append, **given)
    return found, reports[0]


@pytest.mark.nightly(2)
def test_what_was_read_ahead_is_read_once(seen: Seen) -> None:
    """A load reads digests and the first 32 MiB of chunks ahead, and every byte once."""
    state = _saved(seen)
    found, report = _load(seen)
    assert all(torch.equal(found[name], state[name]) for name in state)
    chunks = [(start, stop) for start, stop in seen.fetched if stop - start > PIECE_NBYTES]
    assert [start // CHUNK_NBYTES for start, _ in chunks] == [0, 1, 2]
    assert [start for start, _ in seen.in_pieces] == [2 * CHUNK_NBYTES]
    assert report.bytes_read == sum(stop - start for start, stop in seen.fetched)


def test_no_more_is_read_ahead_than_the_budget_allows(seen: Seen) -> None:
    """Reading ahead uses a quarter of the budget; the load reads the rest as usual."""
    state = _saved(seen)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    _load(seen, target, budget_nbytes=80 << 20)
    assert all(torch.equal(target[name], state[name]) for name in state)
    assert [start for start, _ in sorted(seen.in_pieces)] == [CHUNK_NBYTES, 2 * CHUNK_NBYTES]


@pytest.mark.parametrize("given", [{"strict": False}, {"only": "t2"}], ids=["lenient", "part"])
def test_a_load_that_may_not_want_all_reads_nothing_ahead(
    seen: Seen, given: dict[str, Any]
) -> None:
    """The load reads only the wanted tensors."""
    state = _saved(seen)
    if "only" in given:
        found, report = _load(seen, **given)
        assert torch.equal(found, state["t2"])
    else:
        target = {"t2": torch.zeros_like(state["t2"])}
        _, report = _load(seen, target, **given)
        assert torch.equal(target["t2"], state["t2"])
    assert report.bytes_read < PIECE_NBYTES


@pytest.mark.nightly(3)
def test_a_state_that_does_not_fit_waits_for_nothing(seen: Seen) -> None:
    """The mismatch is raised at once, nothing is filled, and no read is left behind."""
    state = _saved(seen)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    target["other"] = torch.zeros(3)
    seen.delay_s = 3600
    with pytest.raises(MismatchError, match="other"):
        _load(seen, target)
    assert not any(int(tensor.sum()) for tensor in target.values())
    assert len(seen.fetched) > 2
    assert seen.in_flight == 0


def test_an_error_of_what_was_read_ahead_is_the_load_s(seen: Seen) -> None:
    """An error of a read ahead is raised by the load."""
    state = _saved(seen)
    seen.fails = StorageDownError("out", temporary=False)
    with pytest.raises(StorageDownError, match="out"):
        _load(seen, state)
    assert seen.in_flight == 0


def test_damage_of_what_was_read_ahead_is_found(seen: Seen) -> None:
    """Bytes read ahead are verified before delivery, like all others."""
    state = _saved(seen)
    folder = MemoryDriver(seen.uri.removeprefix("given://") + "/saved")

    async def flip() -> None:
        keys = [info.key async for info in folder.list("data")]
        (key,) = (key for key in keys if key.endswith("0.safetensors"))
        upload_nbytes = (await folder.stat(key)).nbytes
        data = bytearray(await folder.fetch(key, 0, upload_nbytes))
        data[CHUNK_NBYTES + 5] ^= 1
        upload = await folder.create(key, upload_nbytes)
        await upload.write(0, memoryview(data))
        await upload.commit()

    asyncio.run(flip())
    with pytest.raises(DamagedError, match="16,777,216 to"):
        _load(seen, state)


def test_a_checkpoint_that_is_replaced_meanwhile_is_loaded_anew(seen: Seen) -> None:
    """The load discards the bytes read ahead and returns the complete new checkpoint."""
    state = _saved(seen)
    other = {name: 255 - tensor for name, tensor in state.items()}

    async def replace() -> None:
        save = partial(holdfast.save, f"{seen.uri}/saved", other)
        await asyncio.get_running_loop().run_in_executor(None, save)

    seen.first = replace
    found, _ = _load(seen, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    assert all(torch.equal(found[name], other[name]) for name in other)
    assert seen.in_flight == 0
