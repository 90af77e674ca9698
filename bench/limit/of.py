"""Finds the limit of a URI: the client to measure with, and its fastest settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ...core.units import round_up
from ...drivers.registry import serving
from ...drivers.uri import Uri, join
from ..alone.transfer import ALIGN_NBYTES, Transfer
from ..machine import drop_caches
from . import fsspec_files, objects, raw_file, streams
from .client import Client, Setting
from .sweep import fastest_reader, fastest_writer

KEY = "limit"
"""Key of the data, below the place."""
Say = Callable[[str], None]


class Alone(Transfer):
    """Our driver without the engine: writes and reads one object of ``nbytes``, rounded up to 4096,
    below ``place``.

    Next to the limit it shows whether the driver or the engine is slow. It is the limit itself if
    no other client speaks to the storage.
    """

    def __init__(self, place: Uri, nbytes: int) -> None:
        super().__init__(place, "alone", round_up(nbytes, ALIGN_NBYTES))
        self.name = f"our driver of {place.scheme}:// alone"
        self.prepare()


class Limit(NamedTuple):
    """A client with its fastest setting for writes, and another with the fastest for reads. The two
    may store different data."""

    writing: Client
    reading: Client


def limit_of(
    place: Uri, nbytes: int, *, say: Say, slowest: Callable[[float], float] = float
) -> Limit:
    """Return the limit below ``place`` for ``nbytes``, and call ``say`` for each trial.

    If several ranks call this at the same time, each with its own place, ``slowest`` returns the
    slowest rank's seconds, so that all choose the same setting. If no client but our driver speaks
    to the storage, the driver is the limit, and the name says so. Raises the client's errors.
    """
    scheme = serving(place)
    uri = join(place, KEY)
    writing: Sequence[Setting]
    make_cold = _nothing
    if scheme in ("file", "lustre"):
        folder = Path(place.location)
        folder.mkdir(parents=True, exist_ok=True)
        whole = round_up(nbytes, ALIGN_NBYTES)
        writing = raw_file.writing_settings(folder / KEY, whole)
        reading: Sequence[Setting] = raw_file.reading_settings(folder / f"{KEY}-read", whole)
        make_cold = partial(drop_caches, folder)
    elif scheme in ("s3", "gs", "az"):
        writing = reading = objects.settings(uri, nbytes)
    elif scheme == "hdfs":
        writing = reading = streams.settings(uri, nbytes)
    elif scheme.startswith("fsspec+"):
        writing = reading = fsspec_files.settings(uri, nbytes)
    else:
        alone = Alone(place, nbytes)
        return Limit(alone, alone)
    return Limit(
        fastest_writer(writing, say=say, slowest=slowest),
        fastest_reader(reading, make_cold=make_cold, say=say, slowest=slowest),
    )


def _nothing() -> None:
    """Do nothing: caches of servers cannot be dropped."""
