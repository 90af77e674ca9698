"""The search of ``holdfast bench --tune``: what it finds on curves with noise, what it costs, and
how sure a gain is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from holdfast.bench.tuned.gain import PAIRS_MIN, gain_of
from holdfast.bench.tuned.halving import Halving, Rung, ladder

MIB = 1 << 20
RUNGS = [Rung(20, 64 * MIB, 1), Rung(7, 256 * MIB, 2), Rung(3, 512 * MIB, 3)]


def searched(
    seconds_per_mib: Sequence[float],
    rungs: Sequence[Rung] = RUNGS,
    *,
    noise: Callable[[], float] = lambda: 1.0,
    default: int = 0,
) -> tuple[Halving, list[int]]:
    """A search among candidates that take so long, times ``noise``, and the order of its turns."""
    halving = Halving(rungs, default=default)
    turns = []
    while (candidate := halving.next()) is not None:
        turns.append(candidate)
        halving.tell(seconds_per_mib[candidate] * halving.rung.nbytes / MIB * noise())
    return halving, turns


def bowl(best: int, count: int = 20) -> list[float]:
    """Times that grow by 8 % with each step away from the best, as concurrencies do."""
    return [0.001 * 1.08 ** abs(candidate - best) for candidate in range(count)]


@pytest.mark.parametrize("best", [0, 7, 19])
def test_without_noise_the_best_is_found(best: int) -> None:
    """Wherever it is, also where it is the default."""
    halving, turns = searched(bowl(best))
    assert halving.ranking[0] == best
    assert len(turns) == 20 + 2 * 7 + 3 * 3


def test_noise_of_a_tenth_costs_a_step_at_most() -> None:
    """In 200 searches the choice is the best or its neighbour, 8 % away, nine times in ten, though
    every time is off by a tenth, and one in twenty by a factor of two."""
    good = 0
    for seed in range(200):
        noisy = random.Random(seed)
        times = bowl(noisy.randrange(20))

        def noise(noisy: random.Random = noisy) -> float:
            return noisy.lognormvariate(0, 0.1) * (2 if noisy.random() < 0.05 else 1)

        halving, _ = searched(times, noise=noise)
        good += times[halving.ranking[0]] < 1.09 * min(times)
    assert good >= 180


def test_a_machine_that_slows_down_hits_all_alike() -> None:
    """Rounds during which everything takes five times as long change nothing, for candidates are
    judged within their round."""
    times = bowl(5)
    halving = Halving(RUNGS)
    number = -1
    factor = 1.0
    turn = 0
    while (candidate := halving.next()) is not None:
        if halving.number != number:
            number, turn = halving.number, 0
        factor = 5.0 if turn // len(halving.ranking) % 2 else 1.0
        turn += 1
        halving.tell(times[candidate] * factor)
    assert halving.ranking[0] == 5


def test_the_default_is_in_every_rung() -> None:
    """It is what the best is held against, however slow it is; and it has its turn first."""
    halving, turns = searched(bowl(2), default=19)
    assert 19 in halving.ranking
    assert turns[0] == 19
    assert turns.count(19) == 1 + 2 + 3


def test_a_rung_whose_time_is_over_keeps_what_it_has_measured() -> None:
    """Of the first rung those that had a turn; of a later one what the rung before has found."""
    halving = Halving(RUNGS)
    for _ in range(5):
        candidate = halving.next()
        assert candidate is not None
        halving.tell(1.0 + candidate)
    halving.hurry()
    assert len(halving.ranking) == 5
    before = halving.ranking
    assert halving.next() == 0
    halving.tell(1.0)
    halving.hurry()
    assert halving.ranking == before[:3]
    halving.hurry()
    assert halving.next() is None
    assert halving.ranking == before[:3]


def test_a_round_that_was_not_finished_does_not_count() -> None:
    """Those that had two turns are not judged by more rounds than the others."""
    halving = Halving([Rung(3, MIB, 2)])
    for _ in range(3):
        candidate = halving.next()
        assert candidate is not None
        halving.tell(3.0 - candidate)
    assert halving.ranking == [2, 1, 0]
    slow = halving.next()
    assert slow is not None
    halving.tell(1000.0)
    halving.hurry()
    assert halving.next() is None
    assert halving.ranking == [2, 1, 0]


def test_rungs_cost_what_they_may() -> None:
    """Each takes an equal part of the time, but enough for one round if that can be; sizes grow,
    and stay between their bounds."""
    rungs = ladder(20, budget_s=30, bytes_per_s=1e9, least_nbytes=64 * MIB, most_nbytes=1024 * MIB)
    assert [rung.candidates for rung in rungs] == [20, 7, 3]
    assert rungs[0].nbytes == int(10 * 1e9 / 20)
    assert [rung.nbytes for rung in rungs[1:]] == [1024 * MIB, 1024 * MIB]
    assert [rung.rounds for rung in rungs] == [1, 1, 3]
    slow = ladder(20, budget_s=1, bytes_per_s=1e6, least_nbytes=64 * MIB, most_nbytes=1024 * MIB)
    assert {(rung.nbytes, rung.rounds) for rung in slow} == {(64 * MIB, 1)}
    assert sum(rung.seconds for rung in slow) == pytest.approx(1)
    assert slow[0].seconds / slow[2].seconds == pytest.approx(20 / 3)


def test_few_pairs_show_nothing() -> None:
    """Five pairs, however far apart, have no interval of 95 %; six have."""
    few = gain_of([(2.0, 1.0)] * (PAIRS_MIN - 1))
    assert (few.ratio, few.low, few.high) == (pytest.approx(2.0), 0.0, math.inf)
    assert not few.is_shown
    enough = gain_of([(2.0 + 0.01 * number, 1.0) for number in range(PAIRS_MIN)])
    assert enough.is_shown
    assert (enough.low, enough.high) == (pytest.approx(2.0), pytest.approx(2.05))


def test_the_interval_is_that_of_the_signed_rank_test() -> None:
    """Of ten pairs, 8 Walsh averages lie below it, as tables of Wilcoxon's test have it."""
    logs = [0.1 * 2**number for number in range(10)]
    found = gain_of([(math.exp(value), 1.0) for value in logs])
    walsh = sorted((a + b) / 2 for i, a in enumerate(logs) for b in logs[i:])
    assert found.low == pytest.approx(math.exp(walsh[8]))
    assert found.high == pytest.approx(math.exp(walsh[-9]))


def test_no_gain_is_shown_where_there_is_none() -> None:
    """Of 400 comparisons of equals at most one in twenty-five shows a gain: 2.5 % are allowed."""
    shown = 0
    for seed in range(400):
        noisy = random.Random(seed)
        pairs = [(noisy.lognormvariate(0, 0.2), noisy.lognormvariate(0, 0.2)) for _ in range(8)]
        shown += gain_of(pairs).is_shown
    assert shown <= 16
