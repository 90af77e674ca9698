"""Finds a client's fastest setting on a storage: tries each once, on as many bytes as a time limit
allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..machine import flush
from .client import Client, Setting

__all__ = ["fastest_reader", "fastest_writer"]

S = TypeVar("S", bound=Setting)
Say = Callable[[str], None]
Slowest = Callable[[float], float]

SWEEP_S = 20.0
"""Approximate time for all trials of a sweep, without the warm-up."""
WARM_UP_NBYTES = 16 << 20
TRIAL_NBYTES_MAX = 256 << 20


def fastest_writer(
    settings: Sequence[S], *, settle_s: float, say: Say, slowest: Slowest = float
) -> S:
    """Return the setting that writes fastest, and leave nothing behind. ``slowest`` maps this
    rank's seconds to those of the slowest rank that sweeps at the same time."""
    tried: list[tuple[float, S]] = []
    for setting in _trials(settings, slowest):
        _rest(settle_s)
        tried.append((slowest(_timed(setting.write)), setting))
        setting.remove()
        say(f"limit of writing: {setting.name}: {tried[-1][0]:.3f} s")
        if _is_enough(tried):
            break
    return _chosen(tried, settings)


def fastest_reader(
    settings: Sequence[S],
    *,
    settle_s: float,
    make_cold: Callable[[], None],
    say: Say,
    slowest: Slowest = float,
) -> S:
    """Return the setting that reads fastest, and leave nothing behind. ``make_cold`` is called
    before each trial; ``slowest`` is as for :func:`fastest_writer`."""
    tried: list[tuple[float, S]] = []
    for setting in _trials(settings, slowest):
        if not tried or tried[-1][1].stored != setting.stored:
            setting.write()
        make_cold()
        _rest(settle_s)
        tried.append((slowest(_timed(setting.read)), setting))
        say(f"limit of reading: {setting.name}: {tried[-1][0]:.3f} s")
        if _is_enough(tried):
            break
    for _, setting in tried:
        setting.remove()
    return _chosen(tried, settings)


def _trials(settings: Sequence[S], slowest: Slowest) -> list[S]:
    """Return the settings at trial size, which follows from the speed of a first write. That write
    also imports and connects, so that the first trial is like the others."""
    first = settings[0]
    warm_up = first.at_size(min(first.nbytes, WARM_UP_NBYTES))
    rate = warm_up.nbytes / slowest(_timed(warm_up.write))
    warm_up.remove()
    affordable = int(rate * SWEEP_S / len(settings))
    nbytes = max(WARM_UP_NBYTES, min(TRIAL_NBYTES_MAX, affordable))
    return [setting.at_size(min(setting.nbytes, nbytes)) for setting in settings]


def _rest(settle_s: float) -> None:
    """Flush and wait, so that one trial does not slow the next."""
    flush()
    time.sleep(settle_s)


def _is_enough(tried: Sequence[tuple[float, Client]]) -> bool:
    return sum(took_s for took_s, _ in tried) > SWEEP_S


def _chosen(tried: Sequence[tuple[float, S]], settings: Sequence[S]) -> S:
    """Return the fastest setting at full size."""
    best = min(tried, key=lambda each: each[0])[1]
    return best.at_size(settings[0].nbytes)


def _timed(run: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s
