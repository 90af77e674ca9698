"""The base of an incremental save: an earlier checkpoint to borrow equal bytes from.

The leader chooses it, and only a committed one counts. Each rank reads the digests of its image
there, so nothing has to be remembered between saves. A save writes everything if anything about the
base is uncertain, and its report says why.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from ....drivers.contract import Driver
from ....errors import HoldfastError, NotACheckpointError, UsageError
from ....planner.image import BLOCK_NBYTES, CHUNK_NBYTES, ImageLayout
from ...format.manifest import image_key
from ...pipeline.borrowing import BaseImage, base_image
from ...protocol.current import read_manifest
from ..location import Place
from ..options import SaveOptions
from ..rounds import Begun

NO_COPIES = "this storage cannot copy within itself"


@dataclass(frozen=True, slots=True)
class Base:
    """Where to look for a base: at the key ``key()`` below ``place``, "" for ``place`` itself; None
    if there is no earlier checkpoint. Only the leader calls ``key``."""

    place: Place
    key: Callable[[], str | None]

    @classmethod
    def of(cls, place: Place, key: Callable[[], str | None], options: SaveOptions) -> Base:
        """Return a base for saves with these options. Raises UsageError if they exclude each
        other."""
        if options.compression is not None:
            raise UsageError(
                f"an incremental save with compression={options.compression!r}",
                advice="Leave out the compression: what has not changed is not written anyway.",
            )
        return cls(place, key)


async def chosen(base: Base, driver: Driver, attempt: str) -> Begun:
    """Return what the leader announces to the ranks of ``attempt``, which save to ``driver``."""
    key = base.key()
    if key is None:
        return Begun(attempt, why_whole="there is no earlier checkpoint")
    if driver.traits.copies is None:
        return Begun(attempt, why_whole=NO_COPIES)
    try:
        async with base.place.opened(key) as source:
            if not driver.copies_from(source):
                why = f"this storage cannot copy from {source.uri}"
                return Begun(attempt, why_whole=why)
            manifest, _ = await read_manifest(source)
    except NotACheckpointError:
        return Begun(attempt, why_whole="the earlier checkpoint is gone")
    except HoldfastError as error:
        return Begun(attempt, why_whole=f"the earlier checkpoint cannot be read: {error}")
    if manifest.compression is not None:
        return Begun(attempt, why_whole="the earlier checkpoint is compressed")
    if (manifest.chunk_nbytes, manifest.block_nbytes) != (CHUNK_NBYTES, BLOCK_NBYTES):
        return Begun(attempt, why_whole="the earlier checkpoint has blocks of another size")
    return Begun(attempt, manifest.attempt, key)


@dataclass(eq=False)
class Borrowing:
    """One rank's use of the base. ``uri``: the base, as its driver prints it; ``why_whole``: why
    everything is written, "" if something may be borrowed, or no base was given."""

    base: Base | None
    uri: str = ""
    why_whole: str = ""

    async def image(
        self, driver: Driver, begun: Begun, rank: int, layout: ImageLayout, opened: AsyncExitStack
    ) -> BaseImage | None:
        """Return the base of this rank's image, if it has one. Its driver lives as long as
        ``opened``."""
        self.why_whole = begun.why_whole
        if self.base is None or not begun.base:
            return None
        try:
            source = await opened.enter_async_context(self.base.place.opened(begun.base_key))
            self.uri = source.uri
            key = image_key(begun.base, rank)
            found = None
            if driver.copies_from(source):
                found = await base_image(driver, source, key, layout)
        except HoldfastError as error:
            self.why_whole = f"the earlier checkpoint cannot be read: {error}"
            return None
        if found is None:
            self.why_whole = "this rank's image had another layout, or there was none"
        return found
