"""The lineage of a run, on its leader: which checkpoints lead to the current state of training, and
whether a save at a given step is allowed.

The record (:mod:`..format.lineage`) is written when training goes back: by ``resume(step=…)``
before it returns; or, if ``resume`` skipped later damaged checkpoints, before the first save.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ...drivers.contract import Driver
from ...errors import AccessError, DamagedError, StorageError, UsageError
from ..format.lineage import LINEAGE_KEY, Lineage
from ..format.manifest import MANIFEST_KEY
from ..operations.location import Place
from ..operations.maintenance.listing import ListedCheckpoint, Listing, read_lineage, size_of
from ..runtime.engine import offload

_NAME = re.compile(r"step-([0-9]{8,18})")
_KNOWN = 16
"""Recent checkpoints to look for on another device. Retention may have deleted all but the newest,
and the newest saves may have failed."""

_log = logging.getLogger(__name__)


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step's checkpoint, relative to the run's folder."""
    return f"step-{step:08d}"


def step_of(path: str) -> int | None:
    """Return the step in a name made by :func:`checkpoint_name`; None for any other name."""
    match = _NAME.fullmatch(path)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Survey:
    """The contents of a run's folder. ``steps``: checkpoints directly in the folder that have a
    step, the best to resume from first. ``broken``: checkpoints that cannot be opened. ``others``:
    paths of checkpoints that cannot be resumed from."""

    steps: Sequence[ListedCheckpoint]
    broken: Sequence[ListedCheckpoint]
    others: Sequence[str]

    def newest(self) -> ListedCheckpoint | None:
        """Return the live checkpoint of the highest step, also one that cannot be opened."""
        live = [c for c in self.steps if not c.abandoned]
        return max([*live, *self.broken], key=_step, default=None)


@dataclass(frozen=True, slots=True)
class Back:
    """The checkpoint to resume: at ``step``, the newest ``before`` a step, or the newest."""

    step: int | None = None
    before: int | None = None

    def __post_init__(self) -> None:
        if self.step is not None and self.before is not None:
            raise UsageError("resume: step and before are both given", advice="Give one of them.")
        for name, value in (("step", self.step), ("before", self.before)):
            if value is not None and type(value) is not int:
                raise UsageError(f"resume: {name} is {value!r}, which is not a whole number")

    @property
    def asked(self) -> bool:
        """Return whether the caller requested another checkpoint than the newest."""
        return self.step is not None or self.before is not None

    def allows(self, step: int) -> bool:
        """Return whether ``step`` matches the request."""
        if self.step is not None:
            return step == self.step
        return self.before is None or step < self.before

    def among(self, survey: Survey) -> list[ListedCheckpoint]:
        """Return the checkpoints to try, in order."""
        if self.step is not None:
            exact = [c for c in survey.steps if c.step == self.step]
            return sorted(exact, key=lambda c: c.abandoned)[:1]
        live = [c for c in survey.steps if not c.abandoned]
        return [c for c in live if self.allows(c.step or 0)]


class RunLineage:
    """The lineage of the run in ``root``, and its record. Runs on the engine's loop."""

    def __init__(self, root: Place) -> None:
        self._root = root
        self._folder = _RunFolder(root)
        self._lineage: Lineage | None = None
        self._recorded = True
        self._is_unknown = False
        self._admits = False
        self._turn = asyncio.Lock()

    async def survey(self, *, may_be_unknown: bool = False) -> Survey:
        """List the run's folder. ``may_be_unknown``: the lineage need not be readable."""
        await self._folder.check()
        async with self._root.opened() as driver:
            listing = await Listing.of(driver)
            folders = listing.folders()
            found = await listing.checkpoints(
                [path for path in folders if path and "/" not in path]
            )
            listed = [c for c in found if not c.is_version]
            listed += [c for c in await listing.unreadable() if "/" not in c.path]
            self._is_unknown = False
            try:
                self._lineage = await read_lineage(driver)
            except DamagedError as error:
                if not may_be_unknown:
                    raise
                _log.warning("%s", error)
                self._lineage, self._is_unknown = Lineage(), True
        self._recorded = True
        known = [c for c in listed if c.problem is None and c.step is not None]
        for c in known:
            self._folder.note(c.path)
        known.sort(key=lambda c: (_step(c), is_own(c), c.created_s, c.path), reverse=True)
        broken = [c for c in listed if c.problem is not None and step_of(c.path) is not None]
        taken = {c.path for c in (*known, *broken)}
        return Survey(known, broken, sorted(path for path in folders if path not in taken))

    async def take_up(
        self,
        resumed_from: ListedCheckpoint | None,
        survey: Survey,
        *,
        record: bool,
        kept_step: int | None = None,
    ) -> None:
        """Continue from a checkpoint, or from ``kept_step`` of the current branch, which is in
        memory (neither: anew). ``record`` it now, not with the next save."""
        assert self._lineage is not None
        self._admits = True
        if kept_step is not None:
            branch, step, is_abandoned = self._lineage.current, kept_step, False
        elif resumed_from is not None:
            branch, step = resumed_from.branch, _step(resumed_from)
            is_abandoned = resumed_from.abandoned
        else:
            return
        later = [c for c in survey.steps if not c.abandoned and _step(c) > step]
        if later or is_abandoned or self._is_unknown:
            self._go_back(branch, step)
        if record and not self._recorded:
            await self._record()

    async def admit(self, step: int) -> str:
        """Return the branch of a save at ``step``. Raises UsageError before the newest step."""
        return await self._admit(checkpoint_name(step), step)

    async def _admit(self, name: str, step: int | None) -> str:
        """Return the branch of a save at ``step`` as ``name``."""
        async with self._turn:
            await self._folder.check()
            if not self._admits:
                await self._check_first(step)
                self._admits = True
            if not self._recorded:
                await self._record()
            self._folder.note(name)
            assert self._lineage is not None
            return self._lineage.current

    async def _check_first(self, step: int | None) -> None:
        """Check the first save of a run that has not been resumed."""
        newest = (await self.survey()).newest()
        if newest is not None and step is not None and step < _step(newest):
            raise below(step, _step(newest), self._root.uri.redacted)

    def _go_back(self, branch: str, step: int) -> None:
        """Continue on a new branch, which forks at ``step`` of ``branch``."""
        assert self._lineage is not None
        self._lineage = self._lineage.gone_back(branch, step, secrets.token_hex(8))
        self._recorded = False

    async def _record(self) -> None:
        assert self._lineage is not None
        data = self._lineage.encode()
        async with self._root.opened() as driver:
            try:
                await driver.put(LINEAGE_KEY, data)
            except StorageError as error:
                if not self._is_unknown or error.temporary:
                    raise
                await _make_way(driver, error)
                await driver.put(LINEAGE_KEY, data)
        self._recorded = True
        self._is_unknown = False


class _RunFolder:
    """A check that the run's folder on a local file system has not been unmounted.

    After ``umount``, saves to the folder below the mount point succeed, and the next ``mount``
    hides them. A changed device number alone proves nothing: remounting the same file system may
    change it. So an error is raised only if no checkpoint of the run is left in the folder.
    """

    def __init__(self, root: Place) -> None:
        self._root = root
        self._device: int | None = None
        self._known: deque[str] = deque(maxlen=_KNOWN)

    def note(self, path: str) -> None:
        """Record that a checkpoint exists, or will exist, at ``path``."""
        if path not in self._known:
            self._known.append(path)

    async def check(self) -> None:
        """Raise StorageError if the folder is on another device and has lost checkpoints."""
        if self._root.uri.scheme not in ("file", "lustre"):
            return
        device = await offload(_device, self._root.uri.location)
        before = self._device
        if before not in (None, device) and self._known and not await self._has_known():
            raise StorageError(
                "the run's folder is on another file system than before, and none of the run's "
                f"checkpoints is in it (device {_printed(before)}, now {_printed(device)})",
                uri=self._root.uri.redacted,
                advice="Has it been unmounted? Mount it again, and saves continue. For a new run, "
                "start the job again.",
            )
        self._device = device

    async def _has_known(self) -> bool:
        async with self._root.opened() as driver:
            for path in reversed(self._known):
                if await size_of(driver, f"{path}/{MANIFEST_KEY}") is not None:
                    return True
        return False


def _device(path: str) -> int:
    while True:
        try:
            return os.stat(path).st_dev
        except (FileNotFoundError, NotADirectoryError):
            above = os.path.dirname(path)
            if above == path:
                raise
            path = above


def _printed(device: int | None) -> str:
    assert device is not None
    return f"{os.major(device)}:{os.minor(device)}"


async def _make_way(driver: Driver, error: StorageError) -> None:
    """Remove what a put did not replace: a link, or a folder, if it is empty."""
    if isinstance(error, AccessError):
        await driver.delete_all(LINEAGE_KEY)
    else:
        await driver.sweep(LINEAGE_KEY)


def below(step: int, newest: int, uri: str) -> UsageError:
    """Return the error for a save at ``step`` when the run is already at step ``newest``."""
    return UsageError(
        f"step {step} is below step {newest}, the newest of this run, and training did not go back",
        uri=uri,
        advice="To go back, call resume(state, step=…) or resume(state, before=…), rather than "
        "load a checkpoint by hand; both abandon later checkpoints. "
        "For another run, use another folder.",
    )


def is_own(c: ListedCheckpoint) -> bool:
    """Return whether the checkpoint has the name that a Checkpointer gives it."""
    return c.step is not None and c.path == checkpoint_name(c.step)


def _step(c: ListedCheckpoint) -> int:
    step = c.step
    if step is None:
        step = step_of(c.path)
    assert step is not None
    return step
