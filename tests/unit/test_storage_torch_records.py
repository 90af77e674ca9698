"""The directory of a zip file is read as zipfile reads it, and whatever is no directory is refused."""

from __future__ import annotations

import io
import struct
import zipfile

import pytest

from holdfast.storage.operations.conversion.torch_records import (
    EarlierError,
    ZipError,
    ZipRecord,
    directory,
)


def zipped(contents: dict[str, bytes], comment: bytes = b"") -> bytes:
    """A zip file with these records in a folder."""
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w") as archive:
        archive.comment = comment
        for name, content in contents.items():
            archive.writestr(f"folder/{name}", content)
    return into.getvalue()


SMALL = zipped({"data.pkl": b"pickle", "data/0": bytes(100)})


@pytest.mark.nightly(4)
@pytest.mark.parametrize(("count", "comment"), [(0, b""), (3, b"a comment"), (66_000, b"")])
def test_records_are_where_zipfile_finds_them(count: int, comment: bytes) -> None:
    """Also where there are more than 16 bits count, and before a comment."""
    data = zipped({f"data/{number}": bytes(number % 7) for number in range(count)}, comment)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        expected = {
            info.filename.removeprefix("folder/"): ZipRecord(
                info.header_offset, info.file_size, is_stored=True
            )
            for info in archive.infolist()
        }
        assert (expected, archive.start_dir) == directory(data, 0)


def test_what_is_not_stored_as_it_is_says_so() -> None:
    """Compressed records, and encrypted ones."""
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("folder/data/0", bytes(1000))
    records, _ = directory(into.getvalue(), 0)
    assert not records["data/0"].is_stored
    _, start = directory(SMALL, 0)
    encrypted = bytearray(SMALL)
    encrypted[start + 8] |= 1
    records, _ = directory(bytes(encrypted), 0)
    assert [record.is_stored for record in records.values()] == [False, True]


def test_numbers_of_64_bits() -> None:
    """Sizes and places beyond 4 GiB are in the extra field, behind other fields or not."""
    full = 0xFFFF_FFFF
    size = 5 << 30
    extra = struct.pack("<HHI", 0x5455, 4, 0) + struct.pack("<HH3Q", 1, 24, size, size, 2 << 30)
    entry = struct.pack(
        "<4s4xHH8xIIHHH8xI", b"PK\x01\x02", 0, 0, full, full, 3, len(extra), 0, full
    )
    entry += b"f/a" + extra
    end = struct.pack("<4s8xII2x", b"PK\x05\x06", len(entry), 3 << 30)
    with pytest.raises(ZipError, match="not in it"):
        directory(entry + end, 0)
    records, _ = directory(entry + end, 3 << 30)
    assert records == {"a": ZipRecord(2 << 30, size, is_stored=True)}
    with pytest.raises(ZipError, match="not in it"):
        directory(
            entry.replace(struct.pack("<HH", 1, 24), struct.pack("<HH", 2, 24)) + end, 3 << 30
        )


def test_what_was_not_read_is_asked_for() -> None:
    """The whole directory."""
    _, start = directory(SMALL, 0)
    with pytest.raises(EarlierError) as raised:
        directory(SMALL[start + 1 :], start + 1)
    assert raised.value.start == start
