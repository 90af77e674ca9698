"""The interface of clients that measure the limit of a storage, and the way they connect to it."""

from __future__ import annotations

from typing import Any, Protocol

from ...drivers.registry import driver_class, resolved_options, serving
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


def bare_driver(uri: Uri) -> Any:
    """Return the driver that serves ``uri`` without its layers, with the options that it would have
    in a save.

    Other clients use its connection settings, not its operations. A client that finds its own way
    might use another endpoint, other credentials or another signature, and measure the limit of
    something else. It performs no I/O. Raises what :func:`...drivers.registry.open_driver` raises.
    """
    cls = driver_class(serving(uri))
    own = {
        name: found.text
        for name, found in resolved_options(uri).items()
        if name in cls.OPTIONS and found.text is not None
    }
    return cls.open(Uri(uri.scheme, uri.location, own))
