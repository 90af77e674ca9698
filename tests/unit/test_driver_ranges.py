"""What has been written of an upload: every byte once, or the upload is refused."""

from __future__ import annotations

import pytest

from holdfast.drivers.ranges import Ranges
from holdfast.errors import StorageError


def written(nbytes: int, *pieces: tuple[int, int]) -> Ranges:
    """An object of which these (start, length) have been written."""
    ranges = Ranges(nbytes, uri="memory://x", key="k")
    for start, length in pieces:
        ranges.add(start, length)
    return ranges


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([(0, 5), (4, 6)], "bytes 4:5 of 10 were written twice"),
        ([(0, 10), (9, 1)], "bytes 9:10 of 10 were written twice"),
        ([(0, 1), (0, 10)], "bytes 0:1 of 10 were written twice"),
        ([(0, 5), (6, 4)], "bytes 5:6 of 10 were never written"),
        ([(0, 9)], "bytes 9:10 of 10 were never written"),
        ([(1, 9)], "bytes 0:1 of 10 were never written"),
        ([], "bytes 0:10 of 10 were never written"),
    ],
)
def test_a_hole_or_an_overlap_of_one_byte_is_found(
    pieces: list[tuple[int, int]], says: str
) -> None:
    """Wherever it lies, and in whatever order the pieces came."""
    for order in (pieces, pieces[::-1]):
        with pytest.raises(StorageError, match=says):
            written(10, *order).check_complete()


def test_what_is_written_once_is_complete() -> None:
    """In any order, with pieces of no bytes, and where the object ends before its declared size."""
    written(10, (5, 5), (0, 5), (3, 0)).check_complete()
    written(10, (0, 4)).check_complete(4)
    written(0).check_complete()
    for nbytes, says in (
        (3, "not inside an object of 3 bytes"),
        (5, "bytes 4:5 of 5 were never written"),
    ):
        with pytest.raises(StorageError, match=says):
            written(10, (0, 4)).check_complete(nbytes)
