"""Finds the limit of a URI: the client to measure with, and its fastest settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.units import round_up
from ...drivers.registry import serving
from ...drivers.uri import Uri, join
from ..machine import drop_caches
from . import fsspec_files, objects, raw_file, streams
from .alone import Alone
from .client import Client, Setting
from .sweep import fastest_reader, fastest_writer

__all__ = ["Limit", "limit_of"]

KEY = "limit"
"""Key of the data, below the place."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Limit:
    """A client with its fastest setting for writes, and another with the fastest for reads.

    The two may store different data: :meth:`prepare` stores what :meth:`read` reads.
    """

    writing: Client
    reading: Client

    @property
    def name(self) -> str:
        """The client and its setting."""
        if self.writing.name == self.reading.name:
            return self.writing.name
        return f"{self.writing.name}; reads: {self.reading.name}"

    @property
    def nbytes(self) -> int:
        """Bytes that each write and each read moves."""
        return self.writing.nbytes

    def write(self) -> None:
        """Write the data, as durably as a save does on this storage."""
        self.writing.write()

    def prepare(self) -> None:
        """Store the data that :meth:`read` reads."""
        self.reading.write()

    def read(self) -> None:
        """Read all of it."""
        self.reading.read()

    def remove(self) -> None:
        """Delete the data, which need not exist."""
        self.writing.remove()
        if self.reading is not self.writing:
            self.reading.remove()


def limit_of(
    place: Uri, nbytes: int, *, say: Say, slowest: Callable[[float], float] = float
) -> Limit:
    """Return the limit below ``place`` for ``nbytes``, and call ``say`` for each trial.

    If several ranks call this at the same time, each with its own place, ``slowest`` returns the
    slowest rank's seconds, so that all choose the same setting. If no client but our driver speaks
    to the storage, the driver is the limit, and the name says so. Raises the client's errors.
    """
    found = _settings(place, nbytes)
    if found is None:
        alone = Alone(place, nbytes)
        return Limit(alone, alone)
    writing, reading, make_cold = found
    return Limit(
        fastest_writer(writing, settle_s=0.0, say=say, slowest=slowest),
        fastest_reader(reading, settle_s=0.0, make_cold=make_cold, say=say, slowest=slowest),
    )


_Settings = tuple[Sequence[Setting], Sequence[Setting], Callable[[], None]]


def _settings(place: Uri, nbytes: int) -> _Settings | None:
    """Return the settings to try for writes and for reads, and a function that makes reads cold;
    None if there is no client."""
    scheme = serving(place)
    uri = join(place, KEY)
    if scheme in ("file", "lustre"):
        return _on_file_system(Path(place.location), nbytes)
    tried: Sequence[Setting]
    if scheme in ("s3", "gs", "az"):
        tried = objects.settings(uri, nbytes)
    elif scheme == "hdfs":
        tried = streams.settings(uri, nbytes)
    elif scheme.startswith("fsspec+"):
        tried = fsspec_files.settings(uri, nbytes)
    else:
        return None
    return tried, tried, _nothing


def _on_file_system(folder: Path, nbytes: int) -> _Settings:
    folder.mkdir(parents=True, exist_ok=True)
    whole = round_up(nbytes, 4096)
    return (
        raw_file.writing_settings(folder / KEY, whole),
        raw_file.reading_settings(folder / f"{KEY}-read", whole),
        lambda: drop_caches(folder),
    )


def _nothing() -> None:
    pass
