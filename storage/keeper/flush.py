"""A flush: a generation in memory becomes a checkpoint in storage, by the same steps as a save."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from ...drivers.contract import Driver
from ...drivers.registry import open_driver
from ...errors import SupersededError
from ..arenas.label import Label
from ..arenas.messages import Flush
from ..format.fragment import Fragment
from ..format.lineage import ROOT
from ..format.manifest import image_key
from ..format.packed import Compression, checked_compression
from ..protocol.attempt import Attempt
from ..protocol.collect import give_up
from ..protocol.commit import begin
from ..protocol.whole import commit_attempt
from .standing import Written
from .tiers import HeldImage
from .written import write_image

__all__ = ["flush", "flush_part", "flush_to", "fragment_of", "opened_for", "write_part"]


@asynccontextmanager
async def opened_for(
    request: Flush, writers: int
) -> AsyncIterator[tuple[Driver, Compression | None]]:
    """What a trainer wants a generation to be written to, and how. What configures drivers is from
    now on what configures them for that trainer. Raises UsageError and UriError for what is no URI
    or no options."""
    os.environ.update(request.environment)
    driver = open_driver(request.uri, writers, **json.loads(request.options))
    try:
        yield driver, checked_compression(request.compression or None)
    finally:
        await driver.close()


async def flush_to(
    request: Flush, images: Sequence[HeldImage], is_wanted: Callable[[], bool] = lambda: True
) -> str:
    """:func:`flush` as a trainer has asked for it; the id of the attempt. Raises as
    :func:`opened_for`, too."""
    async with opened_for(request, len(images)) as (driver, compression):
        return (await flush(driver, images, compression, request.branch, is_wanted)).id


async def flush_part(request: Flush, attempt: str, images: Sequence[HeldImage]) -> Written:
    """Write the images of this keeper for an attempt that another keeper commits. They are durable
    on return. Raises DamagedError where memory no longer holds what was sealed, StorageError; as
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
    """Write the images of a generation, one for each rank, in order; and commit them as one
    checkpoint. ``is_wanted()`` is asked before the commit. Raises DamagedError where memory no
    longer holds what was sealed, SupersededError where it is not wanted any more; as
    :func:`commit_attempt`. Then nothing is committed, unless the put of the manifest failed."""
    attempt = await begin(driver)
    try:
        stored = [await write_part(driver, attempt.id, image, compression) for image in images]
        if not is_wanted():
            raise SupersededError("a resume has gone on from before this step", uri=driver.uri)
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
    """Write one image for an attempt; the size of its file. A rank without a shard writes none, and
    that is 0."""
    label = image.label
    if not label.digests:
        return 0
    return await write_image(
        driver, image_key(attempt, label.rank, compression), image, compression
    )


def fragment_of(
    label: Label, attempt: str, stored_nbytes: int, compression: Compression | None
) -> Fragment:
    """What the manifest of an attempt is to say of an image that was written for it."""
    return label.fragment(attempt, None if compression is None else stored_nbytes)
