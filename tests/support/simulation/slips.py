"""A call in which one rank slips: it fails alone, comes late, calls something else, or dies.

The call must fail soon on all ranks: no rank waits longer than its deadline. The next call of all
ranks succeeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from holdfast.errors import HoldfastError, StateError
from holdfast.storage.operations.loading.load import run_load
from holdfast.storage.ranks.calls import Call
from holdfast.storage.ranks.keys import Keys
from holdfast.storage.ranks.member import Member
from holdfast.storage.ranks.store_team import StoreTeam

from .checker import MAIN, OTHER, Violation
from .loop import Crashed, Process
from .schedule import ActorPlan
from .states import SILENCE_S, Store, target
from .world import World

SOON_S = 10.0
"""Longest time until a rank learns of a failure: until it looks, and until the status settles."""

Save = Callable[[Any], Awaitable[Any]]


class Slipping:
    """A job of several ranks, one of which slips in its first call. Each process keeps one
    membership for all its calls."""

    def __init__(self, world: World, plan: ActorPlan, store: Store, tried: int) -> None:
        """``tried``: number of earlier starts of the job."""
        assert plan.slip is not None
        self._world, self._plan, self._slip, self._store = world, plan, plan.slip, store
        kind = plan.slip.kind
        self._meet = kind != "death" and plan.slip.meet
        self._rank = plan.slip.rank % plan.world
        self._members = [Member(Keys(store, "job"), rank, plan.world) for rank in range(plan.world)]
        self._tried = tried
        self._processes: dict[int, Process] = {}
        self._ended: dict[int, HoldfastError | None] = {}
        self._passed: dict[int, int] = {}
        """Number of further calls that each rank has failed in."""

    async def call(self, rank: int, process: Process, save: Save) -> Any:
        """Return the result of the rank's next call, after the first has failed."""
        self._processes[rank] = process
        self._world.calm_s = max(
            self._world.calm_s, self._now_s + abs(self._slip.late_s) + SILENCE_S
        )
        is_late = (rank == self._rank) == (self._slip.late_s > 0)
        await asyncio.sleep(abs(self._slip.late_s) if is_late else 0.0)
        if not self._tried:
            await self._first(rank, save)
            for number, failing in enumerate(self._slip.failing):
                await self._failing(rank, save, failing, number)
        return await save(self._team(rank, Call("save", MAIN, 1 if self._meet else 2)))

    async def _first(self, rank: int, save: Save) -> None:
        """Make the call in which one rank slips."""
        began_s = self._now_s
        team = self._team(rank, Call("save", MAIN, 1))
        error = None
        try:
            await (self._slipped(team, save) if rank == self._rank else save(team))
        except HoldfastError as raised:
            error = raised
        self._ended[rank] = error
        self._check(rank, error, self._now_s - began_s)
        if self._slip.kind == "death" and error is not None:
            raise error  # the launcher starts all ranks again
        while self._meet and self._missing():
            await asyncio.sleep(0.5)

    async def _failing(self, rank: int, save: Save, failing: int, number: int) -> None:
        """Make a call of the same name in which some or all ranks fail. The others learn of it at
        once."""
        team = self._team(rank, Call("save", MAIN, 1))
        began_s = self._now_s
        if failing >> rank & 1:
            await team.fail(StateError("a state that cannot be saved"))
        else:
            error = None
            try:
                await save(team)
            except HoldfastError as raised:
                error = raised
            self._ended[rank] = error
            self._check(rank, error, self._now_s - began_s)
        self._passed[rank] = number + 1
        while any(
            process.alive and self._passed.get(r, 0) <= number
            for r, process in self._processes.items()
        ):
            await asyncio.sleep(0.5)

    async def _slipped(self, team: StoreTeam, save: Save) -> None:
        kind = self._slip.kind
        if kind == "late":
            await save(team)
        elif kind == "local error":
            error = StateError("a state that cannot be saved")
            await team.fail(error)
            raise error
        elif kind == "load":
            await self._load()
        elif kind == "elsewhere":
            await save(self._team(team.rank, Call("save", OTHER, 1)))
        elif kind == "other step":
            await save(self._team(team.rank, Call("save", MAIN, 3)))
        else:
            self._world.kill(self._processes[self._rank])
            raise Crashed

    async def _load(self) -> None:
        job, _ = target(self._plan.world, self._rank, self._world.schedule.chunks, 2)
        driver = self._world.driver(MAIN)
        try:
            await run_load(driver, self._team(self._rank, Call("load", MAIN, 1)), job)
        finally:
            await driver.close()

    def _check(self, rank: int, error: HoldfastError | None, lasted_s: float) -> None:
        """Raise Violation unless the call failed as it must."""
        slip, calm = self._slip, not self._world.struck
        process = self._processes[rank]
        if error is None and slip.kind != "late":
            raise Violation(f"{process} returned from a call with a slip ({slip.kind})")
        most_s = SILENCE_S if slip.kind == "death" else min(abs(slip.late_s), SILENCE_S)
        most_s += sum(
            self._world.delays.values()
        )  # delays of operations: a save of many chunks on slow storage has many
        if calm and lasted_s > most_s + SOON_S:
            raise Violation(
                f"{process} waited for {lasted_s:g} s in a call with a slip ({slip.kind}): "
                f"{error!r}"
            )
        all_returned = len(self._ended) == self._plan.world and not any(self._ended.values())
        if calm and all_returned and abs(slip.late_s) > SILENCE_S + SOON_S:
            raise Violation(f"{process} and all others waited longer than their deadline")

    def _missing(self) -> bool:
        """Return whether a living rank has not yet ended its first call."""
        return any(
            process.alive and rank not in self._ended for rank, process in self._processes.items()
        )

    def _team(self, rank: int, call: Call) -> StoreTeam:
        return StoreTeam(
            self._store, rank, self._plan.world, "job", SILENCE_S, call, self._members[rank]
        )

    @property
    def _now_s(self) -> float:
        return self._world.loop.now_s
