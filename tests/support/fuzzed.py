"""The fuzzed functions. They take bytes and raise only if Holdfast is wrong.

Bytes are read as instructions (:class:`Script`). So hypothesis, or a fuzzer that watches coverage,
alters the structure of a manifest, a header, a URI or a configuration file, not merely its bytes.
"""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import holdfast
from holdfast.cli.show import Outline, document
from holdfast.drivers.configuration.file import file_settings
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.options import duration, size
from holdfast.drivers.registry import schemes
from holdfast.drivers.uri import join, parse, redact
from holdfast.planner.loading import Targets
from holdfast.storage.format.columns import decode_columns, encode_columns
from holdfast.storage.format.digest import digest
from holdfast.storage.format.manifest import Manifest, check_complete
from holdfast.storage.format.packed import Compression
from holdfast.storage.pipeline.image_reader import plan_reads
from holdfast.storage.serving.requests import (
    RequestError,
    asked_of,
    is_authorized,
    range_of,
)

from .lending import tiny_borrowed
from .tiny import tiny

Columns = dict[str, np.ndarray]
INTS = [0, 1, 2, 3, 7, 255, 256, 4095, 4096, 8192, 65536, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, 1 << 53, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 1 << 31, 1 << 64, -(1 << 70), 10**400, 0.0, -0.0, 1.5, 1e308, float("inf"), float("nan"), "", "a", "..", "/etc/passwd", "\0", "\ud800",
    "../../x", "CON", "0", "1" * 5000, [], [[]], {}, [0], [0, 0], [[0, "a", "dict"]], {"a": 1}, {"$int": "0x1"}, {"$bytes": "AAAA"}, {"$numpy": ["<f8", "AAAAAAAAAAA="]},
    {"$numpy": ["(1,,2)f4", "AA=="]}, {"$torch.dtype": "float32"}, {"$torch.dtype": "nn"}, {"$str": "eda080"}, {"$float": "nan"}, {"$complex": ["1", "2"]}, {"$": {}}, "dict", "list", "tuple", "t", "v", "c",
]  # fmt: skip
VOLUME_MAX = 1 << 24


class Script:
    """A sequence of decisions, read from bytes. After the last byte, every decision is 0."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self, below: int) -> int:
        """Return one of 0 … below - 1."""
        taken = self._data[self._at : self._at + (1 if below <= 256 else 2)]
        self._at += len(taken)
        return int.from_bytes(taken, "little") % max(1, below)

    def choice(self, what: Any) -> Any:
        """Return one item of a sequence."""
        return what[self.number(len(what))]

    def rest(self) -> bytes:
        """Return the unused bytes."""
        return self._data[self._at :]


@functools.cache
def base(compression: Compression | None = None, version: int = 1) -> tuple[Columns, dict[str, Any]]:  # fmt: skip
    """Return the parts of a correct manifest."""
    files = tiny_borrowed() if version == 3 else tiny("fuzzed", compression=compression)
    columns, metadata = decode_columns(files["manifest.safetensors"], "the manifest")
    return {name: column.copy() for name, column in columns.items()}, json.loads(
        metadata["holdfast"]
    )


def altered_column(script: Script, columns: Columns) -> None:
    """Change an entry, length, shape or type of a column; exchange or remove it."""
    name = script.choice(sorted(columns))
    column, what = columns[name], script.number(7)
    if what <= 2 and column.size:
        wide = column.astype(np.uint64)
        wide.reshape(-1)[script.number(column.size)] = script.choice(INTS)
        columns[name] = wide
    elif what == 3:
        columns[name] = np.resize(column, (script.number(12), *column.shape[1:]))
    elif what == 4:
        columns[name] = column.reshape(-1) if script.number(2) else column.reshape(-1, 1)
    elif what == 5:
        columns[name] = columns[script.choice(sorted(columns))]
    elif what == 6:
        del columns[name]


def altered_json(script: Script, node: Any) -> None:
    """Replace, remove or repeat something below ``node``."""
    for _ in range(8):
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        if not keys:
            return
        key = script.choice(keys)
        if isinstance(node[key], dict | list) and script.number(4):
            node = node[key]
            continue
        what = script.number(4)
        if what == 0:
            del node[key]
        elif what == 1 and isinstance(node, list):
            node.append(copy.deepcopy(node[key]))
        else:
            node[key] = copy.deepcopy(script.choice(VALUES))
        return


def manifest(data: bytes, compression: Compression | None = None, version: int = 1) -> bool:
    """Alter a manifest in up to four places. It must be refused, or usable."""
    script = Script(data)
    columns, head = base(compression, version)
    columns, head = dict(columns), copy.deepcopy(head)
    for _ in range(script.number(5)):
        altered_json(script, head) if script.number(2) else altered_column(script, columns)
    return decode(encode_columns(columns, {"holdfast": json.dumps(head)}))


def packed(data: bytes) -> bool:
    """Fuzz a manifest of compressed images."""
    return manifest(data, "lz4")


def borrowed(data: bytes) -> bool:
    """Fuzz a manifest of images that share files."""
    return manifest(data, version=3)


def header(data: bytes) -> bool:
    """Take bytes as a whole file, and as a header, with the right checksum."""
    whole, alone = data, len(data).to_bytes(8, "little") + data
    return decode(whole + digest(whole)) | decode(alone + digest(alone))


def text(data: bytes) -> bool:
    """Take bytes as the JSON in the header."""
    return decode(encode_columns(base()[0], {"holdfast": data.decode("utf-8", "replace")}))


def decode(data: bytes) -> bool:
    """Decode a manifest and use it; return whether it was accepted."""
    try:
        m = Manifest.decode(data)
        check_complete(m, "the manifest")
        use(m)
    except (holdfast.CheckpointError, holdfast.UsageError) as error:
        return not str(error)
    return True


def use(m: Manifest) -> None:
    """Use a manifest in every way, except to read images."""
    document("memory://x", m, 1, {})
    list(Outline(m, whole_values=False, depth=None).lines())
    m.tree.paths()
    sizes = m.images.nbytes(m.block_nbytes).tolist()
    for image, nbytes in enumerate([] if m.compression else sizes):
        parts = m.file_ranges(image, 0, nbytes)
        assert sum(part.nbytes for part in parts) == nbytes
        assert all(part.start + part.nbytes <= m.files[part.file].nbytes for part in parts)
    t = m.tensors
    rows = np.flatnonzero((t.alias < 0) & (t.nbytes > 0) & (t.nbytes < VOLUME_MAX))
    for rank in (0, 1, 9):
        t.find_all(t.names, rank)
        for value in m.tree.values:
            try:
                value.of(rank)
            except holdfast.DamagedError:
                pass
    whole = t.shape[rows]
    plan_reads(MemoryDriver("fuzzed"), m, Targets(rows, np.zeros_like(whole), whole, np.zeros_like(rows), whole, np.arange(len(rows))))  # fmt: skip
    assert Manifest.decode(m.encode()).encode() == m.encode()


def uri(data: bytes) -> bool:
    """Parse text as a URI. It must be refused, or print as a URI that parses to itself."""
    said = data.decode("utf-8", "surrogateescape")
    redact(said)
    try:
        parsed = parse(said)
    except holdfast.UriError as error:
        return not str(error)
    assert parse(str(parsed)) == parsed
    assert "\0" not in str(parsed)
    try:
        below = join(parsed, "a", "b.c")
        assert parse(str(below)) == below
    except holdfast.UriError:
        pass
    return True


def config(data: bytes) -> bool:
    """Parse bytes as a configuration file. It must be refused, or set options."""
    used = False
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        Path(file.name).write_bytes(data)
        environment = {"HOLDFAST_CONFIG": file.name}
        for where in ("s3://bucket/run", "file:///a/b"):
            try:
                for option, setting in file_settings(
                    parse(where), None, environment, ("retries",), schemes
                ).items():
                    used = bool(repr((option, setting.source)))
            except holdfast.UsageError as error:
                str(error)
    for option in (size(0, 1 << 62), duration(0, 1e9)):
        try:
            option(data.decode("utf-8", "replace"))
        except ValueError:
            pass
    return used


def request(data: bytes) -> bool:
    """Parse bytes as a request to a keeper. It must be refused, or ask for bytes of an object."""
    script = Script(data)
    nbytes = script.choice(INTS)
    target, _, header = script.rest().decode("utf-8", "surrogateescape").partition("\n")
    assert not is_authorized(header, "0123456789abcdef" * 2)
    try:
        asked = asked_of(target)
        assert asked.key or asked.what != "object"
        assert not asked.key or {"", ".", ".."}.isdisjoint(asked.key.split("/"))
        wanted = range_of(header, nbytes)
        assert wanted is not None
        assert 0 <= wanted.start < wanted.stop <= nbytes
    except RequestError as error:
        assert error.status in (400, 404, 416)
        return False
    return True


TARGETS: dict[str, Callable[[bytes], bool]] = {
    "manifest": manifest, "packed": packed, "borrowed": borrowed, "header": header, "text": text, "uri": uri, "config": config, "request": request,
}  # fmt: skip
"""Functions that return whether their input was used, not refused."""


def seeds(target: str) -> list[bytes]:
    """Return inputs to begin with."""
    columns, head = base()
    whole = encode_columns(columns, {"holdfast": json.dumps(head)})
    scripts = [
        b"\0",
        *(
            bytes([a, b, c, d, 5, 6, 7, 8])
            for a in (1, 4)
            for b in range(4)
            for c in (0, 9, 40)
            for d in (1, 30)
        ),
    ]
    return {
        "manifest": scripts,
        "packed": scripts,
        "borrowed": scripts,
        "header": [whole[:-16], whole[8 : 8 + int.from_bytes(whole[:8], "little")]],
        "text": [json.dumps(head).encode()],
        "uri": [b"s3://bucket:1/a/b?endpoint=http://x:1&retries=3", b"s3://user:pw@bucket/a", b"file:///a%20b", b"/a/b", b"s3:/x", b"hdfs://a:1/b#c"],
        "request": [b"\6/v1/object/run/a\nbytes=0-3", b"\6/v1/list?prefix=%2e%2e\nbytes=-2", b"\4/v1/object/a%00b\nbytes=9-"],
        "config": [b'[common]\nretries = 3\n["s3://bucket"]\nendpoint = "x"\n[profile.a.s3]\nb = 1\n', b"a = [[[[", b"32MiB", b"1.5s"],
    }[target]  # fmt: skip
