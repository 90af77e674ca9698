"""The states that simulated jobs save, and the exact checkpoint of each. A save without faults
makes each checkpoint once."""

from __future__ import annotations

import asyncio
import functools
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any

import torch

from holdfast.drivers.memory import MemoryDriver
from holdfast.planner.box import Box
from holdfast.planner.layout import MeshLayout, Piece
from holdfast.storage.format.digest import digest
from holdfast.storage.format.manifest import Manifest
from holdfast.storage.format.packed import Compression
from holdfast.storage.operations.loading.load import LoadJob
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.ranks.calls import RankStatus
from holdfast.storage.ranks.store_team import StoreTeam
from holdfast.storage.ranks.team import Team
from holdfast.storage.state.fingerprint import fingerprints
from holdfast.storage.state.flat_state import FlatState
from holdfast.storage.state.flattening.flatten import flatten

from .engine import BLOCK_NBYTES, CHUNK_NBYTES, aside
from .loop import PROCESS, SimLoop

BUDGET_NBYTES = 64 << 20
SILENCE_S = 60.0
OTHER_STATE = 9
"""State of the checkpoint in another folder, next to the one under test."""
PACKED = 100
"""States from this number on are saved compressed, and shrink."""


class Torn(AssertionError):
    """A reader got a state that was never saved."""


@dataclass(frozen=True)
class Expected:
    """The checkpoint of ``state`` by ``world`` ranks: its images by rank, and its manifest without
    the attempt."""

    state: int
    world: int
    chunks: int
    manifest: Manifest
    images: dict[int, bytes]


class Store:
    """A job's key-value store in memory, with the interface of torch.distributed's stores."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop, self._values = loop, dict[str, bytes]()
        self._waiting: list[asyncio.Future[None]] = []
        self.away_until_s = 0.0

    def _here(self) -> dict[str, bytes]:
        if self._loop.now_s < self.away_until_s:
            raise RuntimeError("the store cannot be reached")
        return self._values

    def set(self, key: str, value: bytes | str, /) -> None:
        data = value.encode() if isinstance(value, str) else value
        before = self._here().get(key)
        self._values[key] = data
        if "/status/" not in key or before is None or _shown(before) != _shown(data):
            self._wake()

    def compare_set(self, key: str, expected: bytes, desired: bytes, /) -> bytes:
        """Set a key as torch does: a missing key is set only if ``expected`` is empty."""
        found = self._here().get(key)
        if found is None and expected:
            return expected
        if found in (None, expected):
            if desired != found:
                self.set(key, desired)
            return desired
        return found

    def add(self, key: str, amount: int, /) -> int:
        total = int(self._here().get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def delete_key(self, key: str, /) -> bool:
        return self._here().pop(key, None) is not None

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def changed(self, most_s: float) -> None:
        """Wait until a value other than a heartbeat is set, for at most ``most_s`` seconds."""
        future = self._loop.create_future()
        self._waiting.append(future)
        timer = self._loop.call_later(
            most_s, lambda: None if future.done() else future.set_result(None)
        )
        try:
            await future
        finally:
            timer.cancel()


def _shown(status: bytes) -> tuple[Any, ...]:
    """Return the parts of a status that others wait for: no heartbeats, and no idle times."""
    told = RankStatus.decode(status, 0)
    return (
        told.nonce,
        told.leader,
        [(s.number, s.taken) for s in told.open],
        told.failed,
        told.logs,
        told.settled,
    )


def whole(state: int, rank: int, world: int, chunks: int) -> dict[str, Any]:
    """Return the state of ``rank``: a tensor equal on all ranks, one of its own, small values."""
    numel = max(1, chunks - 2) * world * CHUNK_NBYTES // 4
    shared = _shared(numel, state)
    return {"state": state, "shared": [shared], "own": torch.full((5,), float(10 * state + rank))}


@functools.cache
def held(state: int, rank: int, world: int, chunks: int) -> FlatState:
    """Return the same state, flattened."""
    return flatten(whole(state, rank, world, chunks))


@functools.cache
def _digests(
    state: int, rank: int, world: int, chunks: int, rows: tuple[int, ...]
) -> dict[int, bytes]:
    return fingerprints(held(state, rank, world, chunks), rows)


def save_job(state: int, rank: int, world: int, chunks: int) -> SaveJob:
    """Return the rank's argument of ``run_save``. A simulated process keeps the plans of its
    earlier saves."""
    step = OTHER_STATE if state == OTHER_STATE else 1
    packed: Compression | None = "lz4" if state >= PACKED else None
    job = SaveJob(
        held(state, rank, world, chunks),
        step,
        BUDGET_NBYTES,
        created_s=1e9 + state,
        digests=lambda rows: _digests(state, rank, world, chunks, tuple(rows)),
        compression=packed,
    )
    process = PROCESS.get()
    if process is not None:
        job.plans = process.plans
    return job


def odd_job(state: int, rank: int, world: int, chunks: int) -> SaveJob:
    """Return the same job, but the last rank does not know that others hold the shared tensor. The
    tensor is stored twice."""
    job = save_job(state, rank, world, chunks)
    if rank == world - 1:
        row = next(row for row, name in enumerate(job.flat.names) if "shared" in name)
        shape = job.flat.shapes[row]
        layouts = list(job.flat.layouts)
        origin = (0,) * len(shape)
        piece = Piece(Box(origin, shape), 0, shape)
        layouts[row] = MeshLayout(shape, (piece,), shape, (rank,), world)
        job.flat = replace(job.flat, layouts=layouts, layout_id=None)
    return job


@functools.cache
def expected(state: int, world: int, chunks: int) -> Expected:
    """Return the checkpoint that a save of ``state`` makes."""
    loop, driver = SimLoop(), MemoryDriver()
    store = Store(loop)

    async def rank(rank: int) -> None:
        team = Team() if world == 1 else StoreTeam(store, rank, world, "job", SILENCE_S)
        await run_save(driver, team, save_job(state, rank, world, chunks))

    async def job() -> None:
        await asyncio.gather(*map(rank, range(world)))

    with aside():
        Context().run(loop.run_until_complete, job())
    m = Manifest.decode(driver.objects["manifest.safetensors"][0])
    images = {r: driver.objects[m.image_key(i)][0] for i, r in enumerate(m.images.rank.tolist())}
    return Expected(state, world, chunks, replace(m, attempt=""), images)


_named: dict[bytes, tuple[Manifest, str]] = {}


def identity(data: bytes) -> tuple[Manifest, str]:
    """Return a manifest, and a digest that all manifests of one state and world share."""
    if data not in _named:
        if len(_named) > 3000:
            _named.clear()
        m = Manifest.decode(data)
        _named[data] = m, digest(replace(m.whole, attempt="").encode()).hex()
    return _named[data]


@functools.cache
def identity_of(state: int, world: int, chunks: int) -> str:
    """Return the digest of :func:`identity` for the expected checkpoint."""
    return digest(expected(state, world, chunks).manifest.encode()).hex()


def target(world: int, rank: int, chunks: int, saved: int) -> tuple[LoadJob, dict[str, Any]]:
    """Return an empty state, shaped as ``saved`` ranks saved it, for ``rank`` of ``world`` to load
    into."""
    numel = max(1, chunks - 2) * saved * CHUNK_NBYTES // 4
    state = {"state": -1, "shared": [torch.empty(numel, dtype=torch.int32)]}
    return LoadJob(
        flatten(state, loading=True), strict=False, cast=False, budget_nbytes=BUDGET_NBYTES
    ), state


def same_as(found: Any) -> int:
    """Return the number of the state, if it is complete and exact. Raises Torn otherwise."""
    state, shared = found["state"], found["shared"][0]
    if not torch.equal(shared, _shared(len(shared), state)):
        raise Torn(f"a reader got a mixture, or worse, as state {state}")
    own = found.get("own")
    if own is not None and not torch.equal(own, torch.full((5,), float(10 * state))):
        raise Torn(f"a reader got {own.tolist()} as rank 0's own part of state {state}")
    return int(state)


@functools.cache
def _shared(numel: int, state: int) -> torch.Tensor:
    """Return the tensor that is equal on all ranks.

    Its blocks form pairs of three kinds: equal in all states, different in all states, and equal in
    every third state. A block of the last kind equals, in the next state, its neighbour in this
    one.
    """
    ramp = _ramp(numel)
    if state >= PACKED:
        return ramp // 16 * (state + 1)
    block = ramp // (BLOCK_NBYTES // 4)
    kind = (block + 1) // 2 % 5
    factor = torch.where(kind == 1, state + 1, 1)
    third = ramp % (BLOCK_NBYTES // 4) * ((state + block) % 3 + 1)
    return torch.where((kind == 1) | (kind == 4), ramp * factor, third).int()


@functools.cache
def _ramp(numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.int32)
