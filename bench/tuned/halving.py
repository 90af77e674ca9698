"""The search: successive halving, as a pure state machine. It says what to measure next, and is
told how long that took.

Successive halving (Jamieson and Talwalkar, "Non-stochastic best arm identification and
hyperparameter optimization", AISTATS 2016) gives every candidate a small budget, keeps the best
part of them, and gives those a larger one, until one is left. Here a budget is the size of what is
moved, and the number of rounds. What differs from the paper: a machine is noisy, so all candidates
of a rung take turns, and each is judged by how long it took relative to the others in the same
round; and the defaults are never eliminated, since they are what the best is held against.

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
"""One in so many candidates is kept after a rung."""
ROUNDS_MAX = 5
"""Of a rung: more rounds than that are better spent on the comparison with the defaults."""


@dataclass(frozen=True)
class Rung:
    """``candidates``: how many are measured, the defaults among them; ``nbytes``: how much each of
    them moves in a round; ``rounds``: how often; ``seconds``: how long that may take."""

    candidates: int
    nbytes: int
    rounds: int
    seconds: float = math.inf


def ladder(
    candidates: int, *, budget_s: float, bytes_per_s: float, least_nbytes: int, most_nbytes: int
) -> list[Rung]:
    """The rungs of a search among so many candidates, which take ``budget_s`` if all candidates
    move ``bytes_per_s``.

    Each takes an equal part of the time, but enough to measure all its candidates once, if that can
    be. A rung moves more bytes than the one before, from ``least_nbytes`` to ``most_nbytes``; what
    is left of its time becomes more rounds.
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
    """A search among ``rungs[0].candidates`` candidates, which are numbered from 0.

    Ask :meth:`next` what to measure, at the size of :attr:`rung`, and :meth:`tell` how long it
    took; until :meth:`next` returns None. Candidate ``default`` is kept in every rung.
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
        """The one that is climbed now, or was last."""
        return self._rungs[min(self._number, len(self._rungs) - 1)]

    @property
    def number(self) -> int:
        """Of that rung, from 0."""
        return min(self._number, len(self._rungs) - 1)

    @property
    def ranking(self) -> list[int]:
        """The candidates that were not eliminated, the best first."""
        return sorted(self._alive, key=self._score)

    def next(self) -> int | None:
        """The candidate to be measured now; None where the search has ended."""
        if self._ended:
            return None
        self._asked = self._turns[0]
        return self._asked

    def tell(self, seconds: float) -> None:
        """How long the candidate took that :meth:`next` named."""
        assert self._asked is not None
        self._turns.pop(0)
        self._logs.setdefault(self._asked, []).append(math.log(seconds))
        self._asked = None
        if not self._turns:
            self._begin_round()

    def hurry(self) -> None:
        """End the rung now, for its time is over. A round that not all have finished does not
        count; but of the first one those count that have had a turn, and the others are eliminated.
        Without a whole round, what the rung before has found stands."""
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
            # Whatever happens, the defaults have had their turn.
            self._turns.remove(self._default)
            self._turns.insert(0, self._default)

    def _climb(self) -> None:
        """Keep the best, and go on with them; or end."""
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
        """How long a candidate took relative to the others, as a logarithm: the median over
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
