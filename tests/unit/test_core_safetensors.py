"""Headers of safetensors files that are malformed are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.core.safetensors import parsed


def text(**changes: Any) -> bytes:
    """Return a changed header of one tensor of six bytes."""
    entry = {"dtype": "U8", "shape": [2, 3], "data_offsets": [0, 6]}
    return json.dumps({"x": entry | changes}).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe", "codec can't decode"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "not an object"),
        (b'{"x": 1}', "is not a tensor"),
        (b'{"x": {}}', "a dtype that is not a string"),
        (b'{"x": {}, "x": {}}', "repeats a name"),
        (text(dtype="F4"), "does not fill its data_offsets"),
        (text(dtype="F4", shape=[11]), "does not fill its data_offsets"),
        (text(dtype="F6_E2M3", shape=[7]), "does not fill its data_offsets"),
        (text(dtype="C64", shape=[1]), "does not fill its data_offsets"),
        (text(dtype=["U8"]), "a dtype that is not a string"),
        (text(dtype="F99", data_offsets=[0, 5]), "take 5 bytes of 6"),
        (b'{"__metadata__": ["pt"]}', "not an object of strings"),
        (b'{"__metadata__": {"format": 7}}', "not an object of strings"),
        (text(shape=[2, -3]), "are not counts"),
        (text(shape=[True, 6]), "are not counts"),
        (text(shape="ab"), "are not counts"),
        (text(shape=[1 << 62, 0]), "are not counts"),
        (text(shape=[6] + [1] * 64), "65 dimensions"),
        (text(shape=[2, 4]), "not fill its data_offsets"),
        (text(data_offsets=[6, 0]), "data_offsets that are not a range"),
        (text(data_offsets=[0, 6, 6]), "data_offsets that are not a range"),
        (text(data_offsets=[1, 7]), "begin at 1, not at 0"),
        (text(shape=[5], data_offsets=[0, 5]), "take 5 bytes of 6"),
        (text(shape=[7], data_offsets=[0, 7]), "take 7 bytes of 6"),
    ],
)  # fmt: skip
def test_what_is_no_header_is_refused(data: bytes, message: str) -> None:
    """A malformed header is refused before any of it is used."""
    with pytest.raises(ValueError, match=message):
        parsed(data, 6)
