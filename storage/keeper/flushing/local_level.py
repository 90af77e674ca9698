"""The local level: generations written to storage of the keeper's own host, every few steps, so
that a keeper can load them after a reboot.

    <run>/<epoch>-<step>/<rank>.safetensors    an image
    <run>/<epoch>-<step>/<rank>.label          its label, written after it

There is no manifest: in a job on several hosts, each host has a part. The two newest generations
are kept.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence

from ....core.aio import at_most
from ....drivers.contract import Driver
from ....drivers.registry import open_driver
from ....drivers.uri import join
from ....errors import DamagedError, HoldfastError
from ....planner.periods import Steps
from ...arenas.label import GenerationId, Label
from ...arenas.memory import Memory
from ...runtime.engine import offload
from ..reading import generation_folder
from ..slot_memory import spared_memory
from ..tiers import LocalImage
from .flush import write_image

GENERATIONS_KEPT = 2
_FOLDER = re.compile(r"(\d{1,18})-(\d{1,18})")
_READ_NBYTES = 16 << 20

_log = logging.getLogger(__name__)


class LocalLevel:
    """Storage of the keeper's own host. ``uri``: a folder, shared by the keepers of all runs;
    ``every``: steps between written generations."""

    def __init__(self, uri: str, every: int, run: str) -> None:
        """Raise UriError or UsageError for a bad ``uri``."""
        self._driver = open_driver(join(uri, run))
        self._run = run
        self.due = Steps(every).due
        """Return whether to write the generation of a step. Call once per step, in order."""

    async def write(self, images: Sequence[LocalImage]) -> None:
        """Write a generation durably, then delete old ones. Raises StorageError, and DamagedError
        if an image has changed in memory."""
        if not images:
            raise DamagedError("its images are no longer in memory")
        folder = generation_folder(images[0].label.generation)
        for image in images:
            label = image.label
            if label.digests:
                await write_image(self._driver, f"{folder}/{label.rank}.safetensors", image)
            await self._driver.put(f"{folder}/{label.rank}.label", await offload(label.encode))
        for old in (await self._generations())[GENERATIONS_KEPT:]:
            await self._driver.delete_all(generation_folder(old))

    async def _generations(self) -> list[GenerationId]:
        found = set[GenerationId]()
        async for info in self._driver.list():
            match = _FOLDER.fullmatch(info.key.partition("/")[0])
            if match is not None:
                found.add(GenerationId(int(match[1]), int(match[2])))
        return sorted(found, reverse=True)

    async def read(
        self, is_held: Callable[[GenerationId, int], bool], moved: Callable[[], None]
    ) -> AsyncIterator[LocalImage]:
        """Load the images of the newest generations into memory, one by one, unless
        ``is_held(generation, rank)``. Skips images that cannot be read or do not fit into memory,
        with a warning. The bytes are not verified here. Calls ``moved()`` on progress."""
        try:
            generations = await self._generations()
            moved()
            for generation in generations[:GENERATIONS_KEPT]:
                prefix = generation_folder(generation)
                keys = [info.key async for info in self._driver.list(prefix)]
                moved()
                for key in sorted(key for key in keys if key.endswith(".label")):
                    rank = key.removeprefix(f"{prefix}/").removesuffix(".label")
                    if rank.isdecimal() and is_held(generation, int(rank)):
                        continue
                    image = await self._image(key, generation, moved)
                    if image is not None:
                        yield image
        except HoldfastError as error:
            _log.warning("the local level cannot be read: %s", error)

    async def _image(
        self, key: str, generation: GenerationId, moved: Callable[[], None]
    ) -> LocalImage | None:
        memory: Memory | None = None
        try:
            label = Label.decode(await self._driver.get(key))
            moved()
            if (label.run, label.generation) != (self._run, generation):
                raise DamagedError("the label belongs to another image", key=key)
            memory = await offload(spared_memory, label.nbytes, moved)
            if label.digests:
                image_key = key.removesuffix("label") + "safetensors"
                await _read(self._driver, image_key, memory, moved)
        except (HoldfastError, OSError) as error:
            _log.warning("an image of the local level cannot be read: %s", error)
            if memory is not None:
                memory.close()
            return None
        return LocalImage(label, memory)

    async def close(self) -> None:
        """Close the driver."""
        await self._driver.close()


async def _read(driver: Driver, key: str, memory: Memory, moved: Callable[[], None]) -> None:
    if (await driver.stat(key)).nbytes != memory.nbytes:
        raise DamagedError("the image has another size than its label says", key=key)
    moved()
    ranges = range(0, memory.nbytes, _READ_NBYTES)

    async def read(start: int) -> None:
        nbytes = min(_READ_NBYTES, memory.nbytes - start)
        await driver.read(key, start, memory.buffer(start, nbytes).view)
        moved()

    await at_most(driver.traits.concurrency, map(read, ranges))
