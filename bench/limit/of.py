"""Finds the limit of a URI: which client it is measured by, and the settings that are fastest
there."""

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
"""What is written and read lies there, below the place."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Limit:
    """A client with the setting that writes fastest, and the same with that which reads fastest.

    What is written is not what is read: :meth:`prepare` stores that, in the way in which it is read
    fastest.
    """

    writing: Client
    reading: Client

    @property
    def name(self) -> str:
        """Which client it is, and how it is set."""
        if self.writing.name == self.reading.name:
            return self.writing.name
        return f"{self.writing.name}; reads: {self.reading.name}"

    @property
    def nbytes(self) -> int:
        """How much each write and each read moves."""
        return self.writing.nbytes

    def write(self) -> None:
        """Write it, as durably as a save is on this storage."""
        self.writing.write()

    def prepare(self) -> None:
        """Store what :meth:`read` reads."""
        self.reading.write()

    def read(self) -> None:
        """Read all of it."""
        self.reading.read()

    def remove(self) -> None:
        """Delete what was written. Nothing there is no error."""
        self.writing.remove()
        if self.reading is not self.writing:
            self.reading.remove()


def limit_of(
    place: Uri, nbytes: int, *, say: Say, slowest: Callable[[float], float] = float
) -> Limit:
    """The limit of what lies below ``place``, for ``nbytes``; ``say`` is told of each trial. Where
    several ranks call this, each for a place of its own, ``slowest`` gives the seconds of the one
    that was slowest: then all choose the same setting.

    A storage for which no client but our driver is known has that for its limit, and the name says
    so. Raises what the client raises where it cannot write or read.
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
    """What is tried for writing and for reading, and what makes reads cold; None where there is no
    client."""
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
