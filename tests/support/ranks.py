"""A job of several ranks in one process: saves and loads over a store in memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from holdfast.drivers.contract import Buffer, Driver
from holdfast.drivers.memory import MemoryDriver
from holdfast.planner.box import Box
from holdfast.planner.layout import MeshLayout, Piece
from holdfast.storage.exchange.group import ExchangeLimits
from holdfast.storage.format.packed import Compression
from holdfast.storage.operations.loading.differences import Strict
from holdfast.storage.operations.loading.load import Exchanging, LoadJob, finish, run_load
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.ranks.keys import Keys
from holdfast.storage.ranks.member import Member
from holdfast.storage.ranks.store_team import StoreTeam
from holdfast.storage.runtime.engine import offload, start
from holdfast.storage.state.flat_state import FlatState
from holdfast.storage.state.flattening.flatten import flatten

from .bits import fresh_uri

BUDGET_NBYTES = 64 << 20
_numbers = itertools.count()


def as_ranks(
    world: int,
    act: Callable[[StoreTeam], Awaitable[Any]],
    *,
    store: Any = None,
    hosts: Sequence[str | None] | None = None,
) -> list[Any]:
    """Run ``act`` on ``world`` ranks, all tasks of this process; return results or errors.
    ``hosts`` is the host of each rank, None for this one."""
    store, prefix = store or dist.HashStore(), f"ranks{next(_numbers)}"

    async def rank_of(rank: int) -> Any:
        member = Member(Keys(store, prefix), rank, world)
        if hosts:
            member.host, member.job_host = hosts[rank], "127.0.0.1"
        return await act(StoreTeam(store, rank, world, prefix, 20.0, member=member))

    async def run() -> list[Any]:
        return await asyncio.gather(*map(rank_of, range(world)), return_exceptions=True)

    return start(run()).result(60)


def save_as_ranks(
    driver: Driver, states: Sequence[Any], compression: Compression | None = None
) -> None:
    """Save one state per rank, even an empty one; raise the first error of a rank."""

    flats = [flatten(state) for state in states]
    for flat in flats:
        flat.placeholders = {}
    save_flats(driver, flats, compression)


class Replaced(MemoryDriver):
    """Storage in which another save replaces the checkpoint, once, just before the ``last``-th
    read."""

    def __init__(self, state: Any, new: Any, last: int = 1) -> None:
        super().__init__()
        self.new, self.left = new, 0
        save_as_ranks(self, [state])
        self.left = last

    async def read(self, key: str, start: int, into: Buffer) -> None:
        """Read, after another save if it is due."""
        self.left -= 1
        if self.left == 0:
            await offload(save_as_ranks, self, [self.new])
        await super().read(key, start, into)


def saved_as_ranks(states: Sequence[Any]) -> MemoryDriver:
    """Save one state per rank to new storage in memory; return it."""
    driver = MemoryDriver(fresh_uri().removeprefix("memory://"))
    save_as_ranks(driver, states)
    return driver


def save_cut(
    driver: Driver, tensors: Mapping[str, np.ndarray], boxes: Mapping[str, Sequence[Box]]
) -> None:
    """Save ``tensors``; every rank holds one box of each, as with a DTensor."""
    flats = []
    for rank in range(min(map(len, boxes.values()))):
        mine = {name: boxes[name][rank] for name in tensors}
        windows = {name: tuple(map(slice, box.offsets, box.stops)) for name, box in mine.items()}
        flat = flatten(
            {name: torch.from_numpy(np.array(tensors[name][windows[name]])) for name in tensors}
        )
        flat.shapes, flat.layouts = list(flat.shapes), list(flat.layouts)
        for row, name in enumerate(flat.names):
            piece = Piece(mine[name], 0, mine[name].lengths)
            shape = flat.shapes[row] = tensors[name].shape
            lengths = mine[name].lengths
            flat.layouts[row] = MeshLayout(shape, (piece,), lengths, (rank,), len(boxes[name]))
        flat.layout_id = None  # no other state is laid out like it now
        flats.append(flat)
    save_flats(driver, flats)


def save_flats(
    driver: Driver, flats: Sequence[FlatState], compression: Compression | None = None
) -> None:
    """Save one flattened state per rank."""
    jobs = [SaveJob(flat, None, BUDGET_NBYTES, compression=compression) for flat in flats]
    succeeded(as_ranks(len(flats), lambda team: run_save(driver, team, jobs[team.rank])))


def load_as_ranks(
    driver: Driver,
    into: Sequence[Any],
    exchange: Exchanging = False,
    strict: Strict = True,
    budget_nbytes: int = BUDGET_NBYTES,
    *,
    apart: bool = False,
    limits: ExchangeLimits | None = None,
) -> list[Any]:
    """Load into one state per rank. ``apart``: each rank is on a different host."""
    options: Any = {
        "strict": strict,
        "cast": False,
        "budget_nbytes": budget_nbytes,
        "exchange": exchange,
        "exchange_limits": limits or ExchangeLimits(),
    }
    jobs = [LoadJob(flatten(state, loading=True), **options) for state in into]
    hosts = [f"host {rank}" for rank in range(len(into))] if apart else None
    done = as_ranks(len(into), lambda team: run_load(driver, team, jobs[team.rank]), hosts=hosts)
    return [
        finish(job, manifest, rank)
        for rank, (job, (manifest, *_)) in enumerate(zip(jobs, succeeded(done), strict=True))
    ]


def succeeded(done: list[Any]) -> list[Any]:
    """Return the results of ranks; raise the first error."""
    for outcome in done:
        if isinstance(outcome, BaseException):
            raise outcome
    return done
