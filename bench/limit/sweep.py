"""Finds a client's fastest setting on a storage: tries each once, on as many bytes as a time limit
allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..machine import flush
from .client import Setting

S = TypeVar("S", bound=Setting)
Say = Callable[[str], None]
Slowest = Callable[[float], float]

SWEEP_S = 20.0
"""Approximate time for all trials of a sweep, without the warm-up."""
WARM_UP_NBYTES = 16 << 20
TRIAL_NBYTES_MAX = 256 << 20


def fastest_writer(settings: Sequence[S], *, say: Say, slowest: Slowest = float) -> S:
    """Return the setting that writes fastest, and leave nothing behind. ``slowest`` maps this
    rank's seconds to those of the slowest rank that sweeps at the same time."""

    def trial(setting: S, before: S | None) -> float:
        flush()  # so that one trial does not slow the next
        took_s = _timed(setting.write)
        setting.remove()
        return took_s

    return _swept(settings, trial, "writing", say, slowest)


def fastest_reader(
    settings: Sequence[S],
    *,
    make_cold: Callable[[], None],
    say: Say,
    slowest: Slowest = float,
) -> S:
    """Return the setting that reads fastest, and leave nothing behind. ``make_cold`` is called
    before each trial; ``slowest`` is as for :func:`fastest_writer`."""

    def trial(setting: S, before: S | None) -> float:
        if before is None or before.stored != setting.stored:
            setting.write()
        make_cold()
        flush()  # so that one trial does not slow the next
        return _timed(setting.read)

    best = _swept(settings, trial, "reading", say, slowest)
    for setting in settings:
        setting.remove()
    return best


def _swept(
    settings: Sequence[S],
    trial: Callable[[S, S | None], float],
    verb: str,
    say: Say,
    slowest: Slowest,
) -> S:
    """Try each setting at trial size, until the time is over, and return the fastest at full size.

    The trial size follows from the speed of a first write. That write also imports and connects, so
    that the first trial is like the others. ``trial`` gets the setting before it as well.
    """
    first = settings[0]
    warm_up = first.at_size(min(first.nbytes, WARM_UP_NBYTES))
    rate = warm_up.nbytes / slowest(_timed(warm_up.write))
    warm_up.remove()
    affordable = int(rate * SWEEP_S / len(settings))
    nbytes = max(WARM_UP_NBYTES, min(TRIAL_NBYTES_MAX, affordable))
    tried: list[tuple[float, S]] = []
    for setting in settings:
        before = tried[-1][1] if tried else None
        small = setting.at_size(min(setting.nbytes, nbytes))
        tried.append((slowest(trial(small, before)), small))
        say(f"limit of {verb}: {setting.name}: {tried[-1][0]:.3f} s")
        if sum(took_s for took_s, _ in tried) > SWEEP_S:
            break
    _, best = min(tried, key=lambda each: each[0])
    return best.at_size(first.nbytes)


def _timed(run: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s
