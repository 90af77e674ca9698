"""The search for the best candidate: successive halving, as a pure state machine.

Successive halving (Jamieson and Talwalkar, "Non-stochastic best arm identification and
hyperparameter optimization", AISTATS 2016) gives every candidate a small budget, keeps the best
share of them, and gives those a larger one, until one is left. Here a budget is the size of the
state and the number of rounds.

Two things differ from the paper. Machines are noisy, so all candidates of a rung take turns, and
each is judged by its time relative to the others in the same round. And the defaults are never
eliminated, because they are the baseline of the best candidate.

Scope: no I/O, no clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

__all__ = ["KEPT", "Halving", "Rung", "ladder"]

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


class Halving:
    """A search among ``rungs[0].candidates`` candidates, numbered from 0.

    Call :meth:`next` for the candidate to measure at the size of :attr:`rung`, and :meth:`tell`
    with its time, until :meth:`next` returns None. Candidate ``default`` stays in every rung.
    """

    def __init__(self, rungs: Sequence[Rung], *, default: int = 0, seed: int = 0) -> None:
        self._rungs = list(rungs)
        self._default = default
        self._random = random.Random(seed)
        self._alive = list(range(rungs[0].candidates))
        self._number = 0
        self._logs: dict[int, list[float]] = {}
        self._earlier: dict[int, list[float]] = {}
        self._turns: list[int] = []
        self._asked: int | None = None
        self._ended = len(self._alive) == 1
        self._begin()

    @property
    def rung(self) -> Rung:
        """The current rung, or the last one."""
        return self._rungs[min(self._number, len(self._rungs) - 1)]

    @property
    def number(self) -> int:
        """Number of that rung, from 0."""
        return min(self._number, len(self._rungs) - 1)

    @property
    def ranking(self) -> list[int]:
        """The remaining candidates, best first."""
        return sorted(self._alive, key=self._score)

    def next(self) -> int | None:
        """Return the candidate to measure now; None at the end of the search."""
        if self._ended:
            return None
        self._asked = self._turns[0]
        return self._asked

    def tell(self, seconds: float) -> None:
        """Record the time of the candidate that :meth:`next` named."""
        assert self._asked is not None
        self._turns.pop(0)
        self._logs.setdefault(self._asked, []).append(math.log(seconds))
        self._asked = None
        if not self._turns:
            self._begin_round()

    def hurry(self) -> None:
        """End the current rung because its time is over.

        An incomplete round does not count, except the first one, which eliminates the candidates
        that had no turn. Without a complete round, the results of the previous rung stand.
        """
        if self._ended:
            return
        whole = min(len(self._logs.get(candidate, ())) for candidate in self._alive)
        if whole:
            self._logs = {c: logs[:whole] for c, logs in self._logs.items()}
        elif self._number == 0:
            self._alive = [c for c in self._alive if c in self._logs or c == self._default]
        else:
            self._logs = self._earlier
        self._climb()

    def _begin(self) -> None:
        self._logs = {}
        self._rounds = 0
        self._begin_round()

    def _begin_round(self) -> None:
        if self._rounds == self.rung.rounds:
            self._climb()
            return
        self._rounds += 1
        self._turns = list(self._alive)
        self._random.shuffle(self._turns)
        if self._rounds == 1:
            # Let the defaults go first, so that they are measured in any case.
            self._turns.remove(self._default)
            self._turns.insert(0, self._default)

    def _climb(self) -> None:
        """Keep the best and start the next rung, or end the search."""
        if self._number + 1 == len(self._rungs) or len(self._alive) < 2:
            self._ended = True
            return
        self._earlier = self._logs
        kept = self.ranking[: self._rungs[self._number + 1].candidates]
        if self._default not in kept:
            kept[-1] = self._default
        self._number += 1
        self._alive = sorted(kept)
        self._earlier = {c: logs for c, logs in self._earlier.items() if c in kept}
        self._begin()

    def _score(self, candidate: int) -> float:
        """Return the time of a candidate relative to the others, as a logarithm: the median over
        rounds."""
        logs = self._logs.get(candidate)
        if not logs:
            return math.inf
        rounds = range(len(logs))
        means = [
            fmean(other[number] for other in self._logs.values() if number < len(other))
            for number in rounds
        ]
        return median(logs[number] - means[number] for number in rounds)
