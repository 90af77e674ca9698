"""Finds the options with which saves and loads at a URI are fastest, with the confidence of the
result.

A trial measures one candidate with the real engine: a durable save and a load. These are what
tuning should speed up. The driver alone would prefer other settings: it computes no checksums,
copies no tensors and has all memory and processors to itself; and it accepts any part size, while
the engine writes chunks of one size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import holdfast

from ...core.units import size_text
from ...drivers.configuration.tuned import Place, TunedProfile, machine_kind
from ...drivers.registry import tuned_place
from ...drivers.uri import Uri, join
from ..machine import evict
from ..measured.plan import local_folder
from ..place import clear
from ..states import State, build, flat_tensors, nbytes_of
from .halving import ladder, search
from .plan import Space, TuningPlan

_SEARCHED = 0.6
"""Share of the time for the search. The rest is for the comparison with the defaults."""
_GIVEN_UP = 3
"""A candidate that was slower in all of this many pairs is dropped."""

CONFIDENCE = 0.95
PAIRS_MIN = 6
"""Fewer pairs cannot show anything with a confidence of 95 %, whatever their values."""
_NAME = "tuned"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Taken:
    """Times of a save and a load of ``nbytes``."""

    save_s: float
    load_s: float
    nbytes: int

    @property
    def seconds(self) -> float:
        """Total of both. An option applies to both, and both count equally."""
        return self.save_s + self.load_s


class _Trials:
    """Saves and loads below ``place``. The largest state, of about ``most_nbytes``, is built at
    once."""

    def __init__(self, place: Uri, most_nbytes: int) -> None:
        self._place = place
        self._folder = local_folder(place)
        self._whole = flat_tensors(build(most_nbytes / (1 << 30)))
        self._whole_nbytes = nbytes_of(self._whole)

    def run(self, options: Mapping[str, str], nbytes: int) -> Taken:
        """Save and load about ``nbytes`` with these options. The load is verified and, on a local
        file system, cold. Raises the errors of saves and loads."""
        state = self._part(nbytes)
        uri = str(join(self._place, _NAME))
        began_s = time.perf_counter()
        holdfast.save(uri, state, storage_options=options)
        save_s = time.perf_counter() - began_s
        if self._folder is not None:
            evict(Path(self._folder))  # enough after a durable save, which leaves no dirty pages
        began_s = time.perf_counter()
        holdfast.load(uri, into=state, storage_options=options)
        load_s = time.perf_counter() - began_s
        clear(join(self._place, _NAME))
        return Taken(save_s, load_s, nbytes_of(state))

    def _part(self, nbytes: int) -> State:
        """Return the first rows of all tensors: as many as make ``nbytes``."""
        part = nbytes / self._whole_nbytes
        if part >= 1:
            return self._whole
        return {
            name: tensor[: max(1, round(len(tensor) * part))]
            for name, tensor in self._whole.items()
        }


@dataclass(frozen=True)
class Gain:
    """A speed-up ``ratio``. ``low`` and ``high`` bound its confidence interval, from 0 to infinity
    if there are too few pairs."""

    ratio: float
    low: float
    high: float
    pairs: int

    @property
    def is_shown(self) -> bool:
        """Return whether it is faster, with confidence."""
        return self.low > 1


@dataclass(frozen=True)
class Entry:
    """One trial of the search: its rung, its options and its times."""

    rung: int
    options: Mapping[str, str]
    taken: Taken


@dataclass(frozen=True)
class Tuning:
    """Result of tuning.

    ``best`` holds the chosen options, which may be the defaults. ``gain`` is the speed-up of saves
    and loads with them, from rounds that took no part in the choice; ``save`` and ``load`` are the
    speed-ups of each alone. These are None if the defaults were chosen.
    """

    uri: str
    place: Place
    space: Space
    entries: tuple[Entry, ...]
    best: Mapping[str, str]
    nbytes: int
    gain: Gain | None
    save: Gain | None
    load: Gain | None
    seconds: float
    created_s: float

    @property
    def tried(self) -> int:
        """Number of candidates tried."""
        return len({tuple(entry.options.items()) for entry in self.entries})

    @property
    def is_worth_keeping(self) -> bool:
        """Return whether the best options are faster than the defaults, with confidence."""
        return self.gain is not None and self.gain.is_shown

    def profile(self) -> TunedProfile:
        """Return the profile to keep, without options that equal the defaults. Call it only if the
        result is worth keeping."""
        assert self.gain is not None
        changed = {n: text for n, text in self.best.items() if text != self.space.default[n]}
        return TunedProfile(
            self.place,
            machine_kind(),
            changed,
            self.created_s,
            self.gain.ratio,
            self.gain.low,
            self.gain.high,
        )


def options_text(options: Mapping[str, str]) -> str:
    """Return options as text, such as ``part_size=32MiB concurrency=64``."""
    return " ".join(f"{name}={text}" for name, text in options.items())


def tuned(plan: TuningPlan, space: Space, say: Say = lambda line: None) -> Tuning:
    """Tune for a storage with a plan that :func:`.plan.check_tuning` has accepted, and call ``say``
    for each trial.

    Everything is written to a new folder below the URI, which is deleted afterwards, also on
    interruption. Raises the errors of saves and loads.
    """
    created_s = time.time()
    place = plan.new_place()
    trials = _Trials(place, plan.nbytes)
    try:
        trials.run(space.default, plan.least_nbytes)  # imports and start-up costs
        began_s = time.perf_counter()
        entries, best = _searched(plan, space, trials, say)
        pairs: list[tuple[Taken, Taken]] = []
        if best != 0:
            left_s = plan.time_limit_s - (time.perf_counter() - began_s)
            nbytes = _nbytes_for_pairs(plan, entries, space.candidates[best], left_s)
            pairs = _compared(
                trials,
                (space.default, space.candidates[best]),
                nbytes,
                began_s + plan.time_limit_s,
                plan.pairs_max,
                say,
            )
    finally:
        clear(place)
        holdfast.release_memory()
    return Tuning(
        uri=plan.parsed.redacted,
        place=tuned_place(plan.parsed),
        space=space,
        entries=tuple(entries),
        best=space.candidates[best],
        nbytes=pairs[0][0].nbytes if pairs else entries[-1].taken.nbytes,
        gain=gain_of([(a.seconds, b.seconds) for a, b in pairs]),
        save=gain_of([(a.save_s, b.save_s) for a, b in pairs]),
        load=gain_of([(a.load_s, b.load_s) for a, b in pairs]),
        seconds=time.perf_counter() - began_s,
        created_s=created_s,
    )


def _searched(plan: TuningPlan, space: Space, trials: _Trials, say: Say) -> tuple[list[Entry], int]:
    """Return all trials of the search, and the number of the chosen candidate."""
    began_s = time.perf_counter()
    first = trials.run(space.default, plan.least_nbytes)
    first_s = time.perf_counter() - began_s  # includes everything that trials do not time
    rungs = ladder(
        len(space.candidates),
        budget_s=max(0.0, _SEARCHED * plan.time_limit_s - first_s),
        bytes_per_s=first.nbytes / first_s,
        least_nbytes=plan.least_nbytes,
        most_nbytes=plan.nbytes,
    )
    entries: list[Entry] = []

    def measure(number: int, candidate: int) -> float:
        options = space.candidates[candidate]
        taken = trials.run(options, rungs[number].nbytes)
        entries.append(Entry(number, options, taken))
        say(
            f"rung {number + 1} of {len(rungs)}: {options_text(options)}: "
            f"{size_text(taken.nbytes)} in {taken.save_s:.3f} + {taken.load_s:.3f} s"
        )
        return taken.seconds

    return entries, search(rungs, measure)[0]


def _nbytes_for_pairs(
    plan: TuningPlan, entries: list[Entry], best: Mapping[str, str], left_s: float
) -> int:
    """Return a state size at which the remaining time allows the fewest pairs that can show a
    difference."""
    last = next(entry.taken for entry in reversed(entries) if entry.options == best)
    affordable = left_s * last.nbytes / last.seconds / (2.5 * PAIRS_MIN)
    return int(min(max(affordable, plan.least_nbytes), plan.nbytes))


def _compared(
    trials: _Trials,
    choices: tuple[Mapping[str, str], Mapping[str, str]],
    nbytes: int,
    until_s: float,
    pairs_max: int,
    say: Say,
) -> list[tuple[Taken, Taken]]:
    """Return pairs of trials of two candidates, which take turns at going first.

    No pair begins that would exceed ``until_s``, a time of :func:`time.perf_counter`. It also ends
    if the second candidate was slower in all of the first few pairs, because it will not prove
    faster then.
    """
    pairs: list[tuple[Taken, Taken]] = []
    a, b = choices
    began_s = time.perf_counter()
    while len(pairs) < pairs_max:
        now_s = time.perf_counter()
        pair_s = (now_s - began_s) / len(pairs) if pairs else 0.0
        slower = all(of_b.seconds > of_a.seconds for of_a, of_b in pairs)
        if now_s + pair_s > until_s or (slower and len(pairs) >= _GIVEN_UP):
            break
        if len(pairs) % 2:
            of_b = trials.run(b, nbytes)
            of_a = trials.run(a, nbytes)
        else:
            of_a = trials.run(a, nbytes)
            of_b = trials.run(b, nbytes)
        pairs.append((of_a, of_b))
        say(
            f"pair {len(pairs)}: {options_text(a)}: {of_a.seconds:.3f} s, {options_text(b)}: "
            f"{of_b.seconds:.3f} s"
        )
    return pairs


def gain_of(pairs: Sequence[tuple[float, float]]) -> Gain | None:
    """Return the speed-up from pairs of (seconds before, seconds after), one for each round; None
    without pairs.

    It is the estimate of Hodges and Lehmann (1963) for the logarithms of the ratios, with the
    interval of Wilcoxon's signed-rank test (1945). The interval is exact for few pairs and assumes
    only a symmetric distribution, which alternating the order ensures. One pair that was disturbed
    by other load counts like any other, however extreme it is.
    """
    if not pairs:
        return None
    logs = [math.log(before / after) for before, after in pairs]
    walsh = sorted((a + b) / 2 for i, a in enumerate(logs) for b in logs[i:])
    ratio = math.exp(median(walsh))
    rank = _rank(len(logs))
    if rank is None:
        return Gain(ratio, 0.0, math.inf, len(logs))
    return Gain(ratio, math.exp(walsh[rank]), math.exp(walsh[-1 - rank]), len(logs))


def _rank(count: int) -> int | None:
    """Return the number of Walsh averages below the interval, or None without an interval.

    It is the largest k such that the sum of the positive ranks is at most k with a probability of
    at most 2.5 %.
    """
    ways = [1]
    for rank in range(1, count + 1):
        longer = ways + [0] * rank
        for total, number in enumerate(ways):
            longer[total + rank] += number
        ways = longer
    allowed = (1 - CONFIDENCE) / 2 * 2.0**count
    below = 0
    for total, number in enumerate(ways):
        below += number
        if below > allowed:
            return total - 1 if total else None
    return None
