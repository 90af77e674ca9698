"""Measures the quality of ``holdfast bench --tune``: a full sweep of all candidates at full size,
and then the tuning, on the same storage.

The outcome is judged: the chosen options if a gain is shown, else the defaults. The times of the
sweep do not judge it, because its fastest candidate is also its luckiest. Instead, the two are
measured again in alternation. ``--uri`` names the storage, by default a folder. ``make bench-server
PROGRAM=tuning SERVER=s3`` starts a server first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..core.units import size_text
from .clearing import clear
from .machine import describe
from .measured.plan import local_folder
from .options import GIB, Options, options, parser, work_folder
from .report import Report, Series, Target
from .tuned.gain import Gain, gain_of
from .tuned.plan import TuningPlan, check_tuning
from .tuned.space import Space
from .tuned.trial import Trials
from .tuned.tuning import Ends, Tuning, compared, options_text, tuned

__all__: list[str] = []

SHARE_OF_BEST = 0.95
SHARE_OF_TIME = 0.1
_SHOWN = 5
_JUDGED_S = 30.0
_LEAST_LIMIT_S = 1.0
_PAIRS_MAX = 20


def _say(line: str) -> None:
    print(f"  {line}", flush=True)


def _swept(plan: TuningPlan, space: Space, rounds: int) -> list[Series]:
    """Measure a save and a load with every candidate in turn, round after round."""
    place = plan.new_place()
    trials = Trials(place, plan.nbytes)
    found = [Series(options_text(choice)) for choice in space.candidates]
    try:
        trials.run(space.default, plan.least_nbytes)  # imports and start-up costs
        pairs = list(zip(space.candidates, found, strict=True))
        for number in range(rounds):
            for choice, series in pairs[:: -1 if number % 2 else 1]:
                series.seconds.append(trials.run(choice, plan.nbytes).seconds)
            _say(f"round {number + 1} of {rounds} of the sweep is done")
    finally:
        clear(place)
    return found


def _judged(
    plan: TuningPlan, best: Mapping[str, str], outcome: Mapping[str, str], *, tiny: bool
) -> Gain:
    """Return how many times as fast the outcome is as the best options of the sweep."""
    if best == outcome:
        return Gain(1.0, 1.0, 1.0, 0)
    place = plan.new_place()
    trials = Trials(place, plan.nbytes)
    try:
        trials.run(best, plan.nbytes)
        pairs_max = 1 if tiny else _PAIRS_MAX
        ends = Ends(time.perf_counter() + _JUDGED_S, pairs_max=pairs_max)
        pairs = compared(trials, (best, outcome), plan.nbytes, ends, _say)
    finally:
        clear(place)
    return gain_of([(a.seconds, b.seconds) for a, b in pairs])


def _report(given: Options, uri: str) -> Report:
    plan = TuningPlan(uri, int(given.gib * GIB), given.runs)
    space = check_tuning(plan)
    if given.tiny:
        space = Space(space.candidates[:4], space.fixed)
    began_s = time.perf_counter()
    swept = _swept(plan, space, given.runs)
    sweep_s = time.perf_counter() - began_s
    # The tuning gets just the time allowed; the question is whether it keeps to that, and what it
    # finds.
    limit_s = max(_LEAST_LIMIT_S, SHARE_OF_TIME * sweep_s)
    found = tuned(TuningPlan(uri, plan.nbytes, given.runs, time_limit_s=limit_s), space, _say)
    order = sorted(range(len(swept)), key=lambda number: swept[number].median)
    best = space.candidates[order[0]]
    judged = _judged(plan, best, found.outcome, tiny=given.tiny)
    targets = [
        Target(
            "rate of the outcome, of that of the sweep's best",
            judged.ratio,
            SHARE_OF_BEST,
            at_least=True,
        ),
        Target(
            "time of the tuning, of that of the sweep",
            found.seconds / sweep_s,
            SHARE_OF_TIME,
            at_least=False,
        ),
    ]
    return Report(
        "tuning",
        f"Tuning: {size_text(plan.nbytes)}, {len(space.candidates)} choices, {given.runs} rounds",
        describe(Path(local_folder(plan.parsed) or "."))
        | {"page cache": "evicted file by file before each load"},
        ["", "median s", "min s", "of the best"],
        _rows(swept, order, found),
        [] if given.tiny else targets,
        _notes(found, best, judged, sweep_s),
        swept,
    )


def _rows(swept: Sequence[Series], order: Sequence[int], found: Tuning) -> list[list[str]]:
    """Return the rows of the sweep's best, the defaults, and the tuning's choice."""
    best_s = swept[order[0]].median
    shown = [*order[:_SHOWN], 0, found.space.candidates.index(found.best)]
    return [
        [
            swept[number].name,
            f"{swept[number].median:.3f}",
            f"{min(swept[number].seconds):.3f}",
            f"{best_s / swept[number].median:.0%}",
        ]
        for number in dict.fromkeys(shown)
    ]


def _notes(found: Tuning, best: Mapping[str, str], judged: Gain, sweep_s: float) -> list[str]:
    notes = [
        f"sweep: {sweep_s:.0f} s; its best: {options_text(best)}",
        f"tuning: {found.seconds:.1f} s, {len(found.entries)} trials; its choice: "
        f"{options_text(found.best)}",
    ]
    if judged.pairs:
        notes.append(
            f"the outcome beside the best, measured again in {judged.pairs} pairs: "
            f"{judged.ratio:.3f} × as fast (from {judged.low:.3f} to {judged.high:.3f})"
        )
    if found.gain is not None:
        notes.append(
            f"the choice beside the defaults: {found.gain.ratio:.3f} × as fast (from "
            f"{found.gain.low:.3f} to {found.gain.high:.3f}, {found.gain.pairs} pairs): "
            f"{'kept' if found.is_worth_keeping else 'not kept'}"
        )
    return notes


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep, tune and print."""
    arguments = parser("tuning", __doc__, gib=0.5, runs=5)
    arguments.add_argument("--uri", help="where to measure (default: a folder in --dir)")
    parsed = arguments.parse_args(argv)
    given = options(parsed)
    with work_folder(given.folder) as folder:
        uri = parsed.uri or folder.as_uri()
        _report(given, uri).emit(given.json, given.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
