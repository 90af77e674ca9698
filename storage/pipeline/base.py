"""The base of an incremental save: an earlier checkpoint to borrow equal bytes from.

The leader chooses it, and only a committed one counts. Each rank reads the digests of its image
there, so nothing has to be remembered between saves. A save writes everything if anything about the
base is uncertain, and its report says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

from ...drivers.contract import Driver
from ...drivers.registry import opened_below
from ...drivers.uri import Uri
from ...errors import HoldfastError, NotACheckpointError
from ...planner.image import BLOCK_NBYTES, CHUNK_NBYTES, ImageLayout
from ..format.manifest import Manifest, image_key
from ..protocol.current import read_manifest
from .borrowing import BaseImage, Incremental, copied_image
from .linking import linked_image

NO_SHARING = "this storage can neither copy within itself nor link"


@dataclass(frozen=True, slots=True)
class Base:
    """The place of a base: ``opened(key())`` opens its driver. ``key()`` returns None without an
    earlier checkpoint; only the leader calls it. ``folder``: URI of the folder of all keys, for
    another process; "" if only this one can open them."""

    opened: Callable[[str], AbstractAsyncContextManager[Driver]]
    key: Callable[[], str | None]
    limits: Incremental = field(default_factory=Incremental)
    folder: str = ""

    @classmethod
    def below(
        cls,
        folder: Uri,
        options: Mapping[str, object],
        key: Callable[[], str | None],
        limits: Incremental,
    ) -> Base:
        """Return a base at ``key()`` below ``folder``, opened with these driver options."""
        return cls(partial(opened_below, folder, **options), key, limits, str(folder))


@dataclass(frozen=True, slots=True)
class ChosenBase:
    """The leader's choice, for all ranks: the committed ``attempt`` at ``key``, or ``why_whole``
    there is none. ``increments``: as in the manifest of a save with this base."""

    attempt: str = ""
    key: str = ""
    why_whole: str = ""
    increments: int = 0


async def chosen(base: Base | None, driver: Driver) -> ChosenBase:
    """Return the checkpoint from which a save to ``driver`` may borrow."""
    if base is None:
        return ChosenBase()
    key = base.key()
    if key is None:
        return ChosenBase(why_whole="there is no earlier checkpoint")
    if driver.traits.copies is None and not driver.traits.links:
        return ChosenBase(why_whole=NO_SHARING)
    try:
        async with base.opened(key) as source:
            found = await borrowable(source, driver, base.limits, (CHUNK_NBYTES, BLOCK_NBYTES))
    except HoldfastError as error:
        found = _unreadable(error)
    if isinstance(found, str):
        return ChosenBase(why_whole=found)
    return ChosenBase(found.attempt, key, increments=found.increments + 1)


async def borrowable(
    source: Driver, driver: Driver, limits: Incremental, sizes: tuple[int, int]
) -> Manifest | str:
    """Return the checkpoint at ``source`` if one at ``driver`` may borrow from it; otherwise the
    reason. ``sizes``: of the chunks and blocks of the borrower."""
    if not (driver.copies_from(source) or driver.links_from(source)):
        return f"this storage cannot copy from {source.uri}"
    try:
        manifest, _ = await read_manifest(source)
    except NotACheckpointError:
        return "the earlier checkpoint is gone"
    except HoldfastError as error:
        return _unreadable(error)
    if manifest.compression is not None:
        return "the earlier checkpoint is compressed"
    if (manifest.chunk_nbytes, manifest.block_nbytes) != sizes:
        return "the earlier checkpoint has blocks of another size"
    if manifest.increments + 1 >= limits.anchor:
        return f"one in {limits.anchor} saves is whole"
    return manifest


def _unreadable(error: HoldfastError) -> str:
    return f"the earlier checkpoint cannot be read: {error}"


@dataclass(eq=False)
class Borrowing:
    """A process's use of the base that the leader has chosen. ``uri``: the base, as its driver
    prints it; ``why_whole``: why everything is written, "" if something may be borrowed, or no base
    was given."""

    base: Base | None
    choice: ChosenBase
    uri: str = ""
    why_whole: str = field(init=False)

    def __post_init__(self) -> None:
        self.why_whole = self.choice.why_whole

    async def image(
        self, driver: Driver, rank: int, layout: ImageLayout, opened: AsyncExitStack
    ) -> BaseImage | None:
        """Return the base of the image of ``rank``, if it has one. Its driver lives as long as
        ``opened``."""
        choice = self.choice
        if self.base is None or not choice.attempt:
            return None
        try:
            source = await opened.enter_async_context(self.base.opened(choice.key))
            self.uri = source.uri
            found: BaseImage | None = None
            if driver.copies_from(source):
                key = image_key(choice.attempt, rank)
                found = await copied_image(driver, source, key, layout)
            if found is None and driver.links_from(source):
                limits = self.base.limits
                found = await linked_image(source, choice.attempt, rank, layout, limits)
        except HoldfastError as error:
            self.why_whole = _unreadable(error)
            return None
        if found is None:
            self.why_whole = f"the image of rank {rank} had another layout, or there was none"
        return found
