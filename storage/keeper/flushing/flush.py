"""Flushes a generation from memory to storage, with the same protocol as a save."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from ....drivers.contract import Driver
from ....drivers.registry import open_driver
from ....errors import SupersededError
from ...arenas.label import Label
from ...arenas.messages import Flush
from ...format.fragment import Fragment
from ...format.lineage import ROOT
from ...format.manifest import image_key
from ...format.packed import Compression, checked_compression
from ...protocol.attempt import Attempt
from ...protocol.collect import give_up
from ...protocol.commit import begin, commit_attempt
from ..decisions.standing import Written
from ..tiers import HeldImage
from .image_upload import write_image

__all__ = ["flush", "flush_part", "flush_to", "fragment_of", "opened_for", "write_part"]


@asynccontextmanager
async def opened_for(
    request: Flush, writers: int
) -> AsyncIterator[tuple[Driver, Compression | None]]:
    """Open the driver and the compression that a trainer has requested, for the body. Applies the
    environment of the request to this process for good, so the last trainer's driver settings
    count. Raises UsageError or UriError for a bad URI or options."""
    os.environ.update(request.environment)
    driver = open_driver(request.uri, writers, **json.loads(request.options))
    try:
        yield driver, checked_compression(request.compression or None)
    finally:
        await driver.close()


async def flush_to(
    request: Flush, images: Sequence[HeldImage], is_wanted: Callable[[], bool] = lambda: True
) -> str:
    """Flush for the request of a trainer, and return the id of the attempt. Raises as :func:`flush`
    and :func:`opened_for`."""
    async with opened_for(request, len(images)) as (driver, compression):
        return (await flush(driver, images, compression, request.branch, is_wanted)).id


async def flush_part(request: Flush, attempt: str, images: Sequence[HeldImage]) -> Written:
    """Write this keeper's images for an attempt that another keeper commits. They are durable on
    return. Raises StorageError, DamagedError if an image has changed in memory, and as
    :func:`opened_for`."""
    async with opened_for(request, images[0].label.world) as (driver, compression):
        stored = [await write_part(driver, attempt, image, compression) for image in images]
    return Written(attempt, tuple(image.label.rank for image in images), tuple(stored))


async def flush(
    driver: Driver,
    images: Sequence[HeldImage],
    compression: Compression | None = None,
    branch: str = ROOT,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Attempt:
    """Write the images of a generation, one per rank in order, and commit them as one checkpoint.

    ``is_wanted()`` is asked right before the commit. Raises DamagedError if an image has changed in
    memory, SupersededError if the generation is no longer wanted, and as :func:`commit_attempt`.
    After an error nothing is committed, unless putting the manifest failed.
    """
    attempt = await begin(driver)
    try:
        stored = [await write_part(driver, attempt.id, image, compression) for image in images]
        if not is_wanted():
            raise SupersededError("a resume has discarded this step", uri=driver.uri)
    except BaseException:
        await give_up(driver, attempt)
        raise
    fragments = [
        fragment_of(image.label, attempt.id, nbytes, compression)
        for image, nbytes in zip(images, stored, strict=True)
    ]
    await commit_attempt(driver, attempt, fragments, compression, branch)
    return attempt


async def write_part(
    driver: Driver, attempt: str, image: HeldImage, compression: Compression | None
) -> int:
    """Write one image for an attempt, and return the size of its file; 0 for a rank without shards,
    which writes none."""
    label = image.label
    if not label.digests:
        return 0
    return await write_image(
        driver, image_key(attempt, label.rank, compression), image, compression
    )


def fragment_of(
    label: Label, attempt: str, stored_nbytes: int, compression: Compression | None
) -> Fragment:
    """Return the manifest fragment of an image that was written for an attempt."""
    return label.fragment(attempt, None if compression is None else stored_nbytes)
