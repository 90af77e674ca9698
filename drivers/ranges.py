"""Tracking of the byte ranges written to one upload."""

from __future__ import annotations

from ..errors import StorageError

__all__ = ["Ranges"]


class Ranges:
    """Byte ranges written to an object of at most ``nbytes``, until the upload is over. Holes and
    overlaps are found at commit, after which ``nbytes`` is the final size."""

    def __init__(self, nbytes: int, *, uri: str, key: str) -> None:
        """Raise StorageError if the size is negative."""
        self.nbytes = nbytes
        self._uri = uri
        self._key = key
        self._written: list[tuple[int, int]] = []
        self._over = False
        if nbytes < 0:
            raise self._error(f"an object cannot have {nbytes} bytes")

    def end(self) -> None:
        """Declare the upload over. May be repeated."""
        self._over = True

    def over(self) -> StorageError:
        """Return the error of an upload that is over."""
        message = "the upload is over: committed, failed or aborted"
        return StorageError(message, uri=self._uri, key=self._key)

    def check_open(self) -> None:
        """Raise StorageError if the upload is over."""
        if self._over:
            raise self.over()

    def check(self, start: int, length: int) -> None:
        """Raise StorageError if the upload is over, or unless ``length`` bytes from ``start`` lie
        inside the object."""
        self.check_open()
        self._check_inside(start, length)

    def _check_inside(self, start: int, length: int) -> None:
        if not 0 <= start <= start + length <= self.nbytes:
            raise self._error(
                f"bytes {start}:{start + length} are not inside an object of {self.nbytes} bytes"
            )

    def add(self, start: int, length: int) -> None:
        """Record that these bytes have been written."""
        if length:
            self._written.append((start, start + length))

    def check_complete(self, nbytes: int | None = None) -> None:
        """Set the final size to ``nbytes`` (None: the declared size). Raise StorageError if it
        exceeds the declared size, or unless exactly the bytes below it have been written, each
        once."""
        if nbytes is not None:
            if not 0 <= nbytes <= self.nbytes:
                raise self._error(
                    f"an object of at most {self.nbytes} bytes cannot end at byte {nbytes}"
                )
            self.nbytes = nbytes
        reached = 0
        for start, stop in [*sorted(self._written), (self.nbytes, self.nbytes)]:
            self._check_inside(start, stop - start)
            if start > reached:
                raise self._error(f"bytes {reached}:{start} of {self.nbytes} were never written")
            if start < reached:
                raise self._error(
                    f"bytes {start}:{min(stop, reached)} of {self.nbytes} were written twice"
                )
            reached = stop

    def _error(self, message: str) -> StorageError:
        return StorageError(
            message,
            uri=self._uri,
            key=self._key,
            advice="The caller's parts do not form the object.",
        )
