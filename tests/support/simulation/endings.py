"""Check the storage after a run, or after all processes die during it: it opens and takes a save.

A schedule that ends early begins like the full run, so it is not run again. Instead, the run takes
snapshots of the storage, which are checked afterwards. On a local disk, half of these endings are
power cuts. In half of them the next save starts at once, in the others a day later.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.drivers.contract import Driver
from holdfast.errors import NotACheckpointError, StorageDownError
from holdfast.storage.operations.loading.load import run_build
from holdfast.storage.operations.saving.save import run_save
from holdfast.storage.pipeline.base import Base
from holdfast.storage.ranks.team import Team

from .checker import FEW, LAST, MAIN, Checker, Violation
from .engine import remembered
from .states import BUDGET_NBYTES, same_as, save_job
from .world import SimPlace, World

LATER_S, SOON_S = 30 * 3600.0, 1.0
PRUNING = f"{MAIN}/data/pruning"


@dataclass(frozen=True)
class Ending:
    """The death of all processes before the ``operation``-th operation of a run."""

    operation: int
    world: World
    checker: Checker

    @classmethod
    def now(cls, world: World, checker: Checker) -> Ending:
        """Take a snapshot of the current moment."""
        left = world.left_behind()
        return cls(world.operations, left, checker.of(left))

    def check(self) -> None:
        """Raise a Violation if the remaining state breaks a promise."""
        self.world.be_host()
        _cut(self.world)
        soon, told = self.world.below(2) == 1, self.world.log is not None
        _next_save(self.world, self.checker, soon=soon, load=told or not self._was_opened())

    def _was_opened(self) -> bool:
        """Return whether the same bytes on such storage were opened before in this process, and
        note it.

        They open again then, since no fault is injected here.
        """
        told = self.checker.check_whole()
        opened, key = remembered("opened"), (self.world.schedule.storage, told)
        return opened.setdefault(key, self) is not self


def aftermath(world: World, checker: Checker) -> None:
    """Make the same checks at the end of a run."""
    world.settle()
    _cut(world)
    _next_save(world, checker, soon=False, load=True)


def _cut(world: World) -> None:
    if world.is_posix and world.below(2):
        world.power_cut("host")


def _next_save(world: World, checker: Checker, *, soon: bool, load: bool) -> None:
    """Check that the acknowledged state opens and that the next save works.

    If the save starts after all grace periods, check that it leaves no other files.
    """
    world.loop.now_s += SOON_S if soon else LATER_S
    task = world.loop.spawn(
        world.process("afterwards", "afterwards"), _afterwards(world, checker, load)
    )
    world.loop.run_until(task.done)
    if world.loop.problems:
        raise Violation(world.loop.problems[0])
    barred, moment = task.result(), checker.history[-1]
    if barred and soon:
        return
    keep = {
        f"{MAIN}/manifest.safetensors",
        PRUNING,
    }  # the record of a prune that died: the next prune takes over
    left = [
        p
        for p in world.files()
        if p.startswith(MAIN) and p not in keep and f"/data/{moment.attempt}/" not in p
    ]
    if barred or moment.state != LAST or (left and not soon):
        raise Violation(f"the next save leaves {left} beside itself")
    if unused := checker.unused():
        raise Violation(f"the next save has not used its {unused}")


async def _afterwards(world: World, checker: Checker, load: bool) -> bool:
    """Return whether the save was refused because a pruning seemed to be in progress."""
    driver, last = world.driver(MAIN), checker.history[-1]
    if load and (found := await _opened(driver)) != last.state:
        raise Violation(f"what can be opened afterwards is state {found}, and it was {last.state}")
    flagged, barred = world.file(PRUNING) is not None, False
    try:
        job = save_job(LAST, 0, 1, FEW)
        if world.schedule.storage.endswith(("copies", "links")):
            job.base = Base(SimPlace(world).opened, lambda: "a")
        await run_save(driver, Team(), job)
    except StorageDownError:
        barred = True
        if not flagged:
            raise
        if checker.history[-1] != last and "late" not in world.schedule.storage:
            raise Violation("a save that a pruning bars has replaced the checkpoint") from None
    await driver.close()
    return barred


async def _opened(driver: Driver) -> int | None:
    try:
        return same_as((await run_build(driver, 0, BUDGET_NBYTES))[0])
    except NotACheckpointError:
        return None
