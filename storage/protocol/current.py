"""The current checkpoint at a URI: its manifest, fetched, decoded and checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...core.spans import Where, span
from ...drivers.contract import Driver
from ...errors import DamagedError, NotACheckpointError, NotFoundError, UnsupportedFormatError
from ..format.manifest import MANIFEST_KEY, Manifest, attempt_in, check_complete
from ..runtime.engine import offload

__all__ = ["current_attempt", "is_current", "read_manifest"]


async def read_manifest(driver: Driver) -> tuple[Manifest, bytes]:
    """The current manifest and its bytes. Raises NotACheckpointError, DamagedError,
    UnsupportedFormatError."""
    with span("manifest", Where(MANIFEST_KEY)):
        data = await _get_manifest(driver)
        return await _decode_manifest(driver, data), data


async def current_attempt(driver: Driver) -> str | None:
    """The id of the attempt that the current manifest names; None where there is no manifest.

    The manifest is checked against its checksum, but its tables are not decoded: for a large state
    that takes longer than fetching them. Raises DamagedError, and UnsupportedFormatError: a
    manifest of a newer release must not be overwritten.
    """
    try:
        data = await _get_manifest(driver)
    except NotACheckpointError:
        return None
    with _location_added(driver):
        return await offload(attempt_in, data)


async def is_current(driver: Driver, attempt: str) -> bool:
    """Whether the current manifest is that of the attempt with this id. Decodes no tables. Raises
    NotACheckpointError where there is no manifest; DamagedError, UnsupportedFormatError."""
    data = await _get_manifest(driver)
    with _location_added(driver):
        return await offload(attempt_in, data) == attempt


async def _get_manifest(driver: Driver) -> bytes:
    """The bytes of the current manifest, unchecked. Raises NotACheckpointError."""
    try:
        return await driver.get(MANIFEST_KEY)
    except NotFoundError as error:
        raise NotACheckpointError(
            "nothing is committed here",
            uri=driver.uri,
            key=MANIFEST_KEY,
            advice="Is the URI that of one checkpoint? `holdfast ls` lists them.",
        ) from error


async def _decode_manifest(driver: Driver, data: bytes) -> Manifest:
    """The manifest in ``data``, which was read from ``driver``. Raises DamagedError,
    UnsupportedFormatError."""
    with _location_added(driver):
        manifest = await offload(Manifest.decode, data)
        check_complete(manifest, "the manifest")
        return manifest


@contextmanager
def _location_added(driver: Driver) -> Iterator[None]:
    """Add the location of the manifest to errors about its contents."""
    try:
        yield
    except (DamagedError, UnsupportedFormatError) as error:
        error.uri = driver.uri
        error.key = MANIFEST_KEY
        raise
