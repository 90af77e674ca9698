"""The limit of an fsspec file system: fsspec alone, with one file or many."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...drivers.uri import Uri
from ..machine import sync_tree
from .client import bare_driver, ranges

PART_NBYTES = 16 << 20
BATCH = 8
"""Parts to send or receive at a time."""
_LOCAL = ("fsspec+file", "fsspec+local")


@dataclass(frozen=True)
class FsspecFiles:
    """One file, opened and written in parts; or, with ``piped``, a file per part, several at a
    time.

    Both are read by ``cat_ranges``. Each run makes a new connection, as saves and loads do.
    """

    uri: Uri
    nbytes: int
    piped: bool = False

    @property
    def name(self) -> str:
        """Name, such as "fsspec's s3, one file"."""
        protocol = self.uri.scheme.removeprefix("fsspec+")
        if self.piped:
            return f"fsspec's {protocol}, {BATCH} files of {PART_NBYTES >> 20} MiB at a time"
        return f"fsspec's {protocol}, one file"

    @property
    def stored(self) -> object:
        """See :class:`.client.Setting`."""
        return self.piped

    def write(self) -> None:
        """Write the file or files; on a local disk durably."""
        data = np.random.default_rng(0).bytes(min(PART_NBYTES, self.nbytes))
        with self._connected() as (fs, path):
            fs.makedirs(path, exist_ok=True)
            if self.piped:
                self._pipe(fs, path, data)
            else:
                self._write_one(fs, path, data)
            if self.uri.scheme in _LOCAL:
                sync_tree(Path(path))

    def _write_one(self, fs: Any, path: str, data: bytes) -> None:
        with fs.open(f"{path}/whole", "wb", block_size=PART_NBYTES) as file:
            for start, stop in ranges(self.nbytes, PART_NBYTES):
                file.write(data[: stop - start])

    def _pipe(self, fs: Any, path: str, data: bytes) -> None:
        parts = enumerate(ranges(self.nbytes, PART_NBYTES))
        while batch := list(itertools.islice(parts, BATCH)):
            fs.pipe({f"{path}/{number}": data[: stop - start] for number, (start, stop) in batch})

    def read(self) -> None:
        """Read everything."""
        with self._connected() as (fs, path):
            parts = enumerate(ranges(self.nbytes, PART_NBYTES))
            while batch := list(itertools.islice(parts, BATCH)):
                self._cat(fs, path, batch)

    def _cat(self, fs: Any, path: str, batch: list[tuple[int, tuple[int, int]]]) -> None:
        if self.piped:
            paths = [f"{path}/{number}" for number, _ in batch]
            starts = [0] * len(batch)
        else:
            paths = [f"{path}/whole"] * len(batch)
            starts = [start for _, (start, _) in batch]
        lengths = [stop - start for _, (start, stop) in batch]
        stops = [start + length for start, length in zip(starts, lengths, strict=True)]
        received = fs.cat_ranges(paths, starts, stops, on_error="raise")
        if [len(data) for data in received] != lengths:
            raise OSError(f"{sum(lengths)} bytes were asked for, and others came")

    def remove(self) -> None:
        """Delete everything."""
        with self._connected() as (fs, path), contextlib.suppress(FileNotFoundError):
            fs.rm(path, recursive=True)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[tuple[Any, str]]:
        """Yield the file system, and the path of ``uri`` on it."""
        tree = bare_driver(self.uri)._tree
        try:
            yield tree.fs, tree.path("")
        finally:
            tree.disconnect()


def settings(uri: Uri, nbytes: int) -> list[FsspecFiles]:
    """Return the settings to try, for writes and reads."""
    return [FsspecFiles(uri, nbytes, piped) for piped in (False, True)]
