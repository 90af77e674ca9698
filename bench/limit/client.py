"""What is asked of a client that measures a storage, whatever it speaks to."""

from __future__ import annotations

from typing import Protocol, Self

__all__ = ["Client", "Setting"]


class Client(Protocol):
    """Writes and reads ``nbytes`` in one place of its own: no format, no checksum, no tensor."""

    @property
    def name(self) -> str:
        """Which client, and how it is set: "O_DIRECT, 8 threads"."""

    @property
    def nbytes(self) -> int:
        """How much it writes and reads."""

    def write(self) -> None:
        """Write it anew, as durably as a save is on this storage. Raises what the client raises."""

    def read(self) -> None:
        """Read all that was written. Raises what the client raises, and where a part is missing."""

    def remove(self) -> None:
        """Delete what was written. Nothing there is no error."""


class Setting(Client, Protocol):
    """A client with one of several settings, of which :mod:`.sweep` finds the fastest."""

    @property
    def stored(self) -> object:
        """Settings for which this is equal read what any of them has written."""

    def at_size(self, nbytes: int) -> Self:
        """The same for another number of bytes."""
