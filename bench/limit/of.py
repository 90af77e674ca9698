"""Finds the limit of a URI: the client to measure with, and its fastest settings.

A sweep tries each setting once, on as many bytes as a time limit allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ...core.units import round_up
from ...drivers.registry import serving
from ...drivers.uri import Uri, join
from ..alone.transfer import ALIGN_NBYTES, Transfer
from ..machine import drop_caches, flush
from . import fsspec_files, objects, raw_file, streams
from .client import Client, Setting

KEY = "limit"
"""Key of the data, below the place."""
SWEEP_S = 20.0
"""Approximate time for all trials of a sweep, without the warm-up."""
WARM_UP_NBYTES = 16 << 20
TRIAL_NBYTES_MAX = 256 << 20
Say = Callable[[str], None]
Settings = Callable[[int], Sequence[Setting]]
"""Returns the settings of a client for a number of bytes, always the same in the same order."""


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
    writing: Settings
    make_cold = _nothing
    if scheme in ("file", "lustre"):
        folder = Path(place.location)
        folder.mkdir(parents=True, exist_ok=True)
        nbytes = round_up(nbytes, ALIGN_NBYTES)
        writing = partial(raw_file.writing_settings, folder / KEY)
        reading: Settings = partial(raw_file.reading_settings, folder / f"{KEY}-read")
        make_cold = partial(drop_caches, folder)
    elif scheme in ("s3", "gs", "az"):
        writing = reading = partial(objects.settings, uri)
    elif scheme == "hdfs":
        writing = reading = partial(streams.settings, uri)
    elif scheme.startswith("fsspec+"):
        writing = reading = partial(fsspec_files.settings, uri)
    else:
        alone = Alone(place, nbytes)
        return Limit(alone, alone)
    return Limit(
        fastest_writer(writing, nbytes, say=say, slowest=slowest),
        fastest_reader(reading, nbytes, make_cold=make_cold, say=say, slowest=slowest),
    )


def _nothing() -> None:
    """Do nothing: caches of servers cannot be dropped."""


def fastest_writer(
    settings: Settings, nbytes: int, *, say: Say, slowest: Callable[[float], float] = float
) -> Setting:
    """Return the setting that writes ``nbytes`` fastest, and leave nothing behind."""

    def trial(setting: Setting, before: Setting | None) -> float:
        flush()  # so that one trial does not slow the next
        took_s = _timed(setting.write)
        setting.remove()
        return took_s

    return _swept(settings, nbytes, trial, "writing", say, slowest)


def fastest_reader(
    settings: Settings,
    nbytes: int,
    *,
    make_cold: Callable[[], None],
    say: Say,
    slowest: Callable[[float], float] = float,
) -> Setting:
    """Return the setting that reads ``nbytes`` fastest, and leave nothing behind. ``make_cold`` is
    called before each trial."""

    def trial(setting: Setting, before: Setting | None) -> float:
        if before is None or before.stored != setting.stored:
            setting.write()
        make_cold()
        flush()  # so that one trial does not slow the next
        return _timed(setting.read)

    best = _swept(settings, nbytes, trial, "reading", say, slowest)
    for setting in settings(nbytes):
        setting.remove()
    return best


def _swept(
    settings: Settings,
    nbytes: int,
    trial: Callable[[Setting, Setting | None], float],
    verb: str,
    say: Say,
    slowest: Callable[[float], float],
) -> Setting:
    """Try each setting at trial size, until the time is over, and return the fastest at full size.

    The trial size follows from the speed of a first write. That write also imports and connects, so
    that the first trial is like the others. ``trial`` gets the setting before it as well.
    """
    warm_up = settings(min(nbytes, WARM_UP_NBYTES))[0]
    rate = warm_up.nbytes / slowest(_timed(warm_up.write))
    warm_up.remove()
    affordable = int(rate * SWEEP_S / len(settings(nbytes)))
    trial_nbytes = max(WARM_UP_NBYTES, min(TRIAL_NBYTES_MAX, affordable))
    times_s: list[float] = []
    before = None
    for setting in settings(min(nbytes, trial_nbytes)):
        times_s.append(slowest(trial(setting, before)))
        say(f"limit of {verb}: {setting.name}: {times_s[-1]:.3f} s")
        before = setting
        if sum(times_s) > SWEEP_S:
            break
    return settings(nbytes)[times_s.index(min(times_s))]


def _timed(run: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s
