"""What is committed at a URI now: the manifest that is there, got, decoded and checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...drivers.contract import Driver
from ...errors import DamagedError, NotACheckpointError, NotFoundError, UnsupportedFormatError
from ..format.manifest import MANIFEST_KEY, Manifest, attempt_in, check_complete
from ..runtime.engine import offload

__all__ = ["attempt_of", "read_manifest"]


async def read_manifest(driver: Driver) -> tuple[Manifest, bytes]:
    """The current manifest and its bytes. Raises NotACheckpointError, DamagedError,
    UnsupportedFormatError."""
    data = await _got(driver)
    return await _decoded(driver, data), data


async def attempt_of(driver: Driver) -> str:
    """Which attempt the current manifest names. The manifest is checked against its checksum, and
    its tables are left alone: to decode those of a large state takes longer than to get them.
    Raises as :func:`read_manifest` does."""
    data = await _got(driver)
    with _told_where(driver):
        return await offload(attempt_in, data)


async def _got(driver: Driver) -> bytes:
    """The bytes of the current manifest, whatever they are. Raises NotACheckpointError."""
    try:
        return await driver.get(MANIFEST_KEY)
    except NotFoundError as error:
        advice = "Is the URI that of one checkpoint? `holdfast ls` lists them."
        raise NotACheckpointError(
            "nothing is committed here", uri=driver.uri, key=MANIFEST_KEY, advice=advice
        ) from error


async def _decoded(driver: Driver, data: bytes) -> Manifest:
    """The manifest in ``data``, which is that of ``driver``. Raises DamagedError,
    UnsupportedFormatError."""
    with _told_where(driver):
        manifest = await offload(Manifest.decode, data)
        check_complete(manifest, "the manifest")
        return manifest


@contextmanager
def _told_where(driver: Driver) -> Iterator[None]:
    """What is wrong with the manifest says where that lies."""
    try:
        yield
    except (DamagedError, UnsupportedFormatError) as error:
        error.uri, error.key = driver.uri, MANIFEST_KEY
        raise
