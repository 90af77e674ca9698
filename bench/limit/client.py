"""The interface of clients that measure the limit of a storage, and the way they connect to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from ...drivers.layers.layer import bottom
from ...drivers.registry import open_driver
from ...drivers.uri import Uri


class Client(Protocol):
    """Writes and reads ``nbytes`` in one place of its own: no format, no checksum, no tensor."""

    @property
    def name(self) -> str:
        """The client and its setting, such as "O_DIRECT, 8 threads"."""

    @property
    def nbytes(self) -> int:
        """Bytes that it writes and reads."""

    def write(self) -> None:
        """Replace the data, as durably as a save does on this storage. Raises the client's
        errors."""

    def read(self) -> None:
        """Read everything that was written. Raises the client's errors, also if a part is
        missing."""

    def remove(self) -> None:
        """Delete the data, which need not exist."""


class Setting(Client, Protocol):
    """A client with one of several settings. :mod:`.of` finds the fastest."""

    @property
    def stored(self) -> object:
        """Key of the stored form. Settings with equal keys can read each other's data."""


def ranges(nbytes: int, part_nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each part of ``nbytes``."""
    for start in range(0, nbytes, part_nbytes):
        yield start, min(start + part_nbytes, nbytes)


def bare_driver(uri: Uri) -> Any:
    """Return the driver that serves ``uri`` without its layers, with the options that it would have
    in a save.

    Other clients use its connection settings, not its operations. A client that finds its own way
    might use another endpoint, other credentials or another signature, and measure the limit of
    something else. It performs no I/O. Raises what :func:`...drivers.registry.open_driver` raises.
    """
    return bottom(open_driver(uri))
