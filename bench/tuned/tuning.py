"""Finds the options with which saves and loads at a URI are fastest, with the confidence of the
result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import holdfast

from ...core.units import size_text
from ...drivers.configuration.tuned import Place, TunedProfile, machine_kind
from ...drivers.registry import tuned_place
from ..clearing import clear
from .gain import PAIRS_MIN, Gain, gain_of
from .halving import Halving, ladder
from .plan import TuningPlan
from .space import Space
from .trial import Taken, Trials

__all__ = ["Ends", "Entry", "Tuning", "compared", "options_text", "tuned"]

_SEARCHED = 0.6
"""Share of the time for the search. The rest is for the comparison with the defaults."""
_GIVEN_UP = 3
"""A candidate that was slower in all of this many pairs is dropped."""

Say = Callable[[str], None]


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

    @property
    def outcome(self) -> Mapping[str, str]:
        """The options that drivers use from now on, if a useful profile is kept."""
        if self.is_worth_keeping:
            return self.best
        return self.space.default

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
    trials = Trials(place, plan.nbytes)
    try:
        trials.run(space.default, plan.least_nbytes)  # imports and start-up costs
        began_s = time.perf_counter()
        entries, best = _searched(plan, space, trials, say)
        pairs: list[tuple[Taken, Taken]] = []
        if best != 0:
            left_s = plan.time_limit_s - (time.perf_counter() - began_s)
            nbytes = _nbytes_for_pairs(plan, entries, space.candidates[best], left_s)
            until_s = began_s + plan.time_limit_s
            ends = Ends(until_s, pairs_min=0, gives_up=True, pairs_max=plan.pairs_max)
            pairs = compared(trials, (space.default, space.candidates[best]), nbytes, ends, say)
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
        gain=gain_of([(a.seconds, b.seconds) for a, b in pairs]) if pairs else None,
        save=gain_of([(a.save_s, b.save_s) for a, b in pairs]) if pairs else None,
        load=gain_of([(a.load_s, b.load_s) for a, b in pairs]) if pairs else None,
        seconds=time.perf_counter() - began_s,
        created_s=created_s,
    )


def _searched(plan: TuningPlan, space: Space, trials: Trials, say: Say) -> tuple[list[Entry], int]:
    """Return all trials of the search, and the number of the chosen candidate."""
    began_s = time.perf_counter()
    first = trials.run(space.default, plan.least_nbytes)
    first_s = time.perf_counter() - began_s  # includes everything that trials do not time
    budget_s = max(0.0, _SEARCHED * plan.time_limit_s - (time.perf_counter() - began_s))
    rungs = ladder(
        len(space.candidates),
        budget_s=budget_s,
        bytes_per_s=first.nbytes / first_s,
        least_nbytes=plan.least_nbytes,
        most_nbytes=plan.nbytes,
    )
    halving = Halving(rungs)
    entries: list[Entry] = []
    number = -1
    ends_s = time.perf_counter()
    while (candidate := halving.next()) is not None:
        if halving.number != number:
            number = halving.number
            ends_s += halving.rung.seconds
        options = space.candidates[candidate]
        taken = trials.run(options, halving.rung.nbytes)
        entries.append(Entry(number, options, taken))
        say(
            f"rung {number + 1} of {len(rungs)}: {options_text(options)}: "
            f"{size_text(taken.nbytes)} in {taken.save_s:.3f} + {taken.load_s:.3f} s"
        )
        halving.tell(taken.seconds)
        if time.perf_counter() > ends_s and halving.number == number:
            halving.hurry()
    return entries, halving.ranking[0]


def _nbytes_for_pairs(
    plan: TuningPlan, entries: list[Entry], best: Mapping[str, str], left_s: float
) -> int:
    """Return a state size at which the remaining time allows the fewest pairs that can show a
    difference."""
    last = next(entry.taken for entry in reversed(entries) if entry.options == best)
    affordable = left_s * last.nbytes / last.seconds / (2.5 * PAIRS_MIN)
    return int(min(max(affordable, plan.least_nbytes), plan.nbytes))


@dataclass(frozen=True)
class Ends:
    """Conditions that end a comparison. Times are those of :func:`time.perf_counter`.

    It ends before a pair that would exceed ``until_s``, but not before ``pairs_min``, and after
    ``pairs_max``. With ``gives_up`` it also ends if the second candidate was slower in all of the
    first few pairs, because it will not prove faster then.
    """

    until_s: float
    pairs_min: int = PAIRS_MIN
    gives_up: bool = False
    pairs_max: int = 20


def compared(
    trials: Trials,
    choices: tuple[Mapping[str, str], Mapping[str, str]],
    nbytes: int,
    ends: Ends,
    say: Say = lambda line: None,
) -> list[tuple[Taken, Taken]]:
    """Return pairs of trials of two candidates, which take turns at going first."""
    pairs: list[tuple[Taken, Taken]] = []
    a, b = choices
    began_s = time.perf_counter()
    while len(pairs) < ends.pairs_max:
        now_s = time.perf_counter()
        pair_s = (now_s - began_s) / len(pairs) if pairs else 0.0
        if len(pairs) >= ends.pairs_min and now_s + pair_s > ends.until_s:
            break
        slower = all(of_b.seconds > of_a.seconds for of_a, of_b in pairs)
        if ends.gives_up and slower and len(pairs) >= _GIVEN_UP:
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
