"""The interface of clients that measure the limit of a storage."""

from __future__ import annotations

from typing import Protocol, Self

__all__ = ["Client", "Setting"]


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
    """A client with one of several settings. :mod:`.sweep` finds the fastest."""

    @property
    def stored(self) -> object:
        """Key of the stored form. Settings with equal keys can read each other's data."""

    def at_size(self, nbytes: int) -> Self:
        """Return the same setting for another number of bytes."""
