"""The search for the best candidate: successive halving.

Successive halving (Jamieson and Talwalkar, "Non-stochastic best arm identification and
hyperparameter optimization", AISTATS 2016) gives every candidate a small budget, keeps the best
share of them, and gives those a larger one, until one is left. Here a budget is the size of the
state and the number of rounds.

Two things differ from the paper. Machines are noisy, so all candidates of a rung take turns, and
each is judged by its time relative to the others in the same round. And the defaults are never
eliminated, because they are the baseline of the best candidate.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

KEPT = 3
"""A rung keeps one in this many candidates."""
ROUNDS_MAX = 5
"""Limit of rounds in a rung. Further rounds are better spent on the comparison with the
defaults."""


@dataclass(frozen=True)
class Rung:
    """One rung of the search.

    ``candidates`` includes the defaults. Each of them moves ``nbytes`` in each of ``rounds``. All
    of it may take ``seconds``.
    """

    candidates: int
    nbytes: int
    rounds: int
    seconds: float = math.inf


def ladder(
    candidates: int, *, budget_s: float, bytes_per_s: float, least_nbytes: int, most_nbytes: int
) -> list[Rung]:
    """Return the rungs of a search. They take ``budget_s`` if all candidates move ``bytes_per_s``.

    Each rung takes an equal share of the time, but if possible enough to measure all its candidates
    once. The bytes grow from rung to rung, from ``least_nbytes`` to ``most_nbytes``. The rest of a
    rung's time goes into more rounds.
    """
    counts = [candidates]
    while counts[-1] > KEPT:
        counts.append(max(2, math.ceil(counts[-1] / KEPT)))
    equal_s = budget_s / len(counts)
    wanted_s = [max(equal_s, count * least_nbytes / bytes_per_s) for count in counts]
    part = budget_s / sum(wanted_s)
    rungs = []
    for count, rung_s in zip(counts, wanted_s, strict=True):
        affordable = part * rung_s * bytes_per_s / count
        nbytes = int(min(max(affordable, least_nbytes), most_nbytes))
        rounds = int(min(max(affordable / nbytes, 1), ROUNDS_MAX))
        rungs.append(Rung(count, nbytes, rounds, part * rung_s))
    return rungs


def search(
    rungs: Sequence[Rung],
    measure: Callable[[int, int], float],
    *,
    default: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
) -> list[int]:
    """Search among ``rungs[0].candidates`` candidates, numbered from 0, and return those of the
    last rung, best first.

    ``measure(number, candidate)`` returns the seconds of a candidate at the size of the rung of
    that number. Candidate ``default`` stays in every rung. When a rung's time is over by ``clock``,
    its incomplete round does not count, except the first one, which eliminates the candidates that
    had no turn. Without a complete round, the results of the previous rung stand.
    """
    order = random.Random(seed)
    alive = list(range(rungs[0].candidates))
    earlier: _Logs = {}
    ends_s = clock()
    for number, rung in enumerate(rungs):
        if len(alive) < 2:
            break
        ends_s += rung.seconds
        logs: _Logs = {}
        for candidate in _turns(alive, rung.rounds, default, order):
            logs.setdefault(candidate, []).append(math.log(measure(number, candidate)))
            if clock() > ends_s:
                break
        complete = min(len(logs.get(candidate, ())) for candidate in alive)
        if complete:
            logs = {candidate: each[:complete] for candidate, each in logs.items()}
        elif earlier:
            logs = earlier
        else:
            alive = [candidate for candidate in alive if candidate in logs]
        alive.sort(key=_scores(logs).__getitem__)
        for following in rungs[number + 1 : number + 2]:
            del alive[following.candidates :]
            if default not in alive:
                alive[-1] = default
        earlier = {candidate: logs[candidate] for candidate in alive}
    return alive


_Logs = dict[int, list[float]]
"""Logarithms of the seconds of each candidate, by round."""


def _turns(alive: Sequence[int], rounds: int, default: int, order: random.Random) -> Iterator[int]:
    """Yield the candidates in a new order in each round. The defaults go first of all, so that they
    are measured in any case."""
    for number in range(rounds):
        turns = list(alive)
        order.shuffle(turns)
        if number == 0:
            turns.remove(default)
            turns.insert(0, default)
        yield from turns


def _scores(logs: _Logs) -> dict[int, float]:
    """Return the time of each candidate relative to the others, as a logarithm: the median over
    rounds."""
    means = [fmean(times) for times in zip(*logs.values(), strict=True)]
    return {
        candidate: median(mine - mean for mine, mean in zip(times, means, strict=True))
        for candidate, times in logs.items()
    }
