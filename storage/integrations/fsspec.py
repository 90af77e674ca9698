"""``holdfast://``: a committed checkpoint as a read-only fsspec file system.

    <name>.npy                  a tensor, for numpy; if numpy has its dtype
    <name>.safetensors          a tensor, alone in a safetensors file; if safetensors has its dtype
    tensors.csv                 the list of tensors: name, shape, dtype, bytes, shards, ranks
    values.json                 the small values: path and value, as rank 0 saved them
    images/<rank>.safetensors   the image of a rank, uncompressed

Use ``open("holdfast://model.wq.npy::s3://bucket/run/step-500")``, or
``HoldfastFileSystem("s3://bucket/run/step-500")``. Names are percent-encoded except for letters,
digits, ``_``, ``.``, ``-`` and ``~``; a tensor that differs per rank is named ``<name>@<rank>``.
Tensor files are generated on the fly: a read fetches and verifies only the blocks that hold the
wanted bytes. Files under ``images/`` are not verified. Needs numpy only, no torch.
"""

from __future__ import annotations

import csv
import io
import json
import posixpath
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import ClassVar
from urllib.parse import quote

import numpy as np
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from ...core import safetensors
from ...core.forks.cached import cached_property
from ...errors import UsageError
from ..format.values import encode_value
from ..operations.reading.reader import Checkpoint, TensorInfo
from ..operations.reading.reader import open as open_checkpoint

__all__ = ["HoldfastFileSystem"]

_IMAGES = "images"
_NUMPY_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
"""Dtypes that numpy itself has, under the same names as torch."""


@dataclass(frozen=True, slots=True)
class _File:
    """One file: ``head``, then ``nbytes`` of content; ``read(start, stop)`` returns a range."""

    head: bytes
    nbytes: int
    read: Callable[[int, int], bytes]

    @property
    def size(self) -> int:
        return len(self.head) + self.nbytes

    def range(self, begin: int, end: int) -> bytes:
        begin = max(0, min(begin, self.size))
        end = max(0, min(end, self.size))
        start = max(0, begin - len(self.head))
        stop = max(0, end - len(self.head))
        data = self.head[begin:end]
        if start < stop:
            data += self.read(start, stop)
        return data


class HoldfastFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The files of one checkpoint.

    Opens the checkpoint at first use, and keeps to that one. If it is replaced, further reads raise
    ReplacedError; a new instance shows the new one.
    """

    protocol: ClassVar[str] = "holdfast"
    root_marker = ""
    cachable = False  # otherwise fsspec would reuse an instance with an old checkpoint

    def __init__(
        self,
        fo: str = "",
        *,
        target_protocol: str | None = None,
        target_options: Mapping[str, object] | None = None,
        **kwargs: object,
    ) -> None:
        """Prepare to open the checkpoint at ``fo``, its URI; fsspec prescribes the name.

        ``target_options``: options of its storage.
        """
        super().__init__(**kwargs)
        if not fo:
            raise UsageError(
                "a holdfast:// path needs its checkpoint",
                advice=(
                    "holdfast://model.wq.npy::s3://bucket/run/step-500, or HoldfastFileSystem(uri)."
                ),
            )
        self._uri = fo
        if target_protocol and "://" not in fo:
            self._uri = f"{target_protocol}://{fo}"
        self._options = dict(target_options or {})

    def ls(
        self, path: str, detail: bool = True, **kwargs: object
    ) -> list[str] | list[dict[str, object]]:
        """List a folder. There are two: the root, and ``images``."""
        path = self._strip_protocol(path)
        if path in self._files:
            names = [path]
        elif path in ("", _IMAGES):
            names = [name for name in self._files if posixpath.dirname(name) == path]
            if path == "":
                names.append(_IMAGES)
        else:
            raise FileNotFoundError(path)
        if not detail:
            return names
        return [self.info(name) for name in names]

    def info(self, path: str, **kwargs: object) -> dict[str, object]:
        path = self._strip_protocol(path)
        if path in ("", _IMAGES):
            return {"name": path, "size": 0, "type": "directory"}
        return {
            "name": path,
            "size": self._file(path).size,
            "type": "file",
            "created": self._checkpoint.created_s,
        }

    def created(self, path: str) -> datetime:
        """Return when the checkpoint was committed: its files have no time of their own."""
        return datetime.fromtimestamp(self._checkpoint.created_s, UTC)

    modified = created

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: object
    ) -> bytes:
        """Return exactly these bytes, and read no others; negative positions count from the end."""
        file = self._file(self._strip_protocol(path))
        begin, stop, _ = slice(start, end).indices(file.size)
        return file.range(begin, stop)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: Mapping[str, object] | None = None,
        **kwargs: object,
    ) -> AbstractBufferedFile:
        if mode != "rb":
            raise PermissionError("a checkpoint is read-only; holdfast.save writes one")
        file = self._file(path)
        return _OpenFile(
            self,
            path,
            mode,
            block_size or "default",
            cache_options=cache_options,
            size=file.size,
            **kwargs,
        )

    def _file(self, path: str) -> _File:
        try:
            return self._files[path]
        except KeyError as error:
            raise FileNotFoundError(path) from error

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        checkpoint = open_checkpoint(self._uri, storage_options=self._options)
        checkpoint.close_when_collected()  # with this file system, which has no close()
        return checkpoint

    @cached_property
    def _files(self) -> dict[str, _File]:
        checkpoint = self._checkpoint
        files = {
            name: file
            for info in checkpoint.tensors.values()
            for name, file in _files_of(checkpoint, info)
        }
        files["tensors.csv"] = _in_memory(_table(checkpoint))
        files["values.json"] = _in_memory(_values(checkpoint))
        for rank, nbytes in checkpoint.images.items():
            files[f"{_IMAGES}/{rank}.safetensors"] = _File(
                b"", nbytes, partial(checkpoint.read_image, rank)
            )
        return files


class _OpenFile(AbstractBufferedFile):  # type: ignore[misc]
    DEFAULT_BLOCK_SIZE = 16 << 20  # one chunk, the block size of sequential reads

    def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = self.fs.cat_file(self.path, start, end)
        return data


def _files_of(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[tuple[str, _File]]:
    """Yield the names and files of one tensor; if it differs per rank, for each rank."""
    for owner in info.owners or (None,):
        name = quote(info.name, safe="", errors="surrogatepass")
        if owner is not None:
            name += f"@{owner}"

        def read(start: int, stop: int, rank: int = owner or 0) -> bytes:
            return checkpoint.read_bytes(info.name, start, stop, rank=rank)

        if info.dtype in _NUMPY_DTYPES:
            yield f"{name}.npy", _File(_npy_header(info), info.nbytes, read)
        if info.dtype in safetensors.DTYPES and info.name != safetensors.METADATA:
            yield f"{name}.safetensors", _File(_safetensors_header(info), info.nbytes, read)


def _npy_header(info: TensorInfo) -> bytes:
    head = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(np.dtype(info.dtype))
    np.lib.format.write_array_header_1_0(
        head, {"descr": descr, "fortran_order": False, "shape": info.shape}
    )
    return head.getvalue()


def _safetensors_header(info: TensorInfo) -> bytes:
    entry = safetensors.entry(safetensors.DTYPES[info.dtype], info.shape, 0, info.nbytes)
    text = f"{{{json.dumps(info.name)}:{entry}}}".encode()
    return safetensors.framed(text, safetensors.framed_nbytes(len(text), 8))


def _table(checkpoint: Checkpoint) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", "shape", "dtype", "nbytes", "shards", "ranks", "owners", "alias_of"])
    for t in checkpoint.tensors.values():
        lists = [" ".join(map(str, numbers)) for numbers in (t.shape, t.ranks, t.owners)]
        writer.writerow(
            [t.name, lists[0], t.dtype, t.nbytes, t.shards, lists[1], lists[2], t.alias_of]
        )
    return text.getvalue().encode("utf-8", "backslashreplace")


def _values(checkpoint: Checkpoint) -> bytes:
    records = [
        {"path": path, "value": encode_value(value, path)} for path, value in checkpoint.values()
    ]
    return json.dumps(records).encode()


def _in_memory(content: bytes) -> _File:
    return _File(content, 0, lambda start, stop: b"")
