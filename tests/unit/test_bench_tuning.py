"""``holdfast bench URI --tune``: the options to try, the search, its confidence, and the profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.commands import run, run_json

import holdfast
from holdfast.bench.tuned.halving import Rung, ladder, search
from holdfast.bench.tuned.plan import Space, TuningPlan, check_tuning, choices
from holdfast.bench.tuned.tuning import Entry, Gain, Taken, Tuning, gain_of, tuned
from holdfast.cli.bench.tuning import verdict_lines
from holdfast.drivers.configuration.tuned import TUNABLE, Place, keep_profile
from holdfast.drivers.hdfs.driver import HdfsDriver
from holdfast.drivers.layers.stack import common_options
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.objects.s3 import S3Driver
from holdfast.drivers.options import Option
from holdfast.errors import UsageError

MIB = 1 << 20


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of profiles."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HOLDFAST_CONFIG")
    return tmp_path / "config/holdfast/tuned.toml"


@pytest.mark.parametrize(
    ("own", "names", "count"),
    [
        (LocalDriver.OPTIONS, ("threads", "direct"), 10),
        (S3Driver.OPTIONS, ("part_size", "concurrency"), 20),
        (HdfsDriver.OPTIONS, ("streams", "max_concurrency"), 16),
        ({}, ("max_concurrency",), 4),
    ],
)
def test_declared_options_are_tried(own: dict[str, Option], names: Any, count: int) -> None:
    """All combinations are tried, the defaults first. The option accepts every value."""
    common = common_options(remote=True)
    space = choices(own, common, {})
    assert len(space.candidates) == count
    known = {**common, **own}
    for candidate in space.candidates:
        assert tuple(candidate) == names
        for name, text in candidate.items():
            known[name].parse(text)
    for name, text in space.default.items():
        assert known[name].parse(text) == known[name].default
    assert set(names) <= set(TUNABLE)


def test_options_of_the_user_are_not_tried(home: Path, tmp_path: Path) -> None:
    """The user's options win over a profile anyway. An existing profile is no user's choice."""
    uri = f"file://{tmp_path}/s"
    space = check_tuning(TuningPlan(f"{uri}?threads=3", 4 * MIB, 1))
    assert space.fixed == {"threads": "the URI"}
    assert space.candidates == ({"direct": "auto"}, {"direct": "off"})
    whole = check_tuning(TuningPlan(uri, 4 * MIB, 1))
    home.parent.mkdir(parents=True, mode=0o700)
    keep_profile(home, tuning(whole, Gain(1.5, 1.2, 1.8, 8)).profile())
    assert check_tuning(TuningPlan(uri, 4 * MIB, 1)) == whole
    with pytest.raises(UsageError, match=r"no option that could be tuned.*sets"):
        check_tuning(TuningPlan(f"{uri}?threads=3&direct=off", 4 * MIB, 1))


def tuning(space: Space, gain: Gain | None) -> Tuning:
    """Return an outcome that chose the last candidate."""
    return Tuning(
        uri="file:///x",
        place=Place("file:///x"),
        space=space,
        entries=(Entry(0, space.default, Taken(1.0, 1.0, MIB)),),
        best=space.candidates[-1],
        nbytes=MIB,
        gain=gain,
        save=gain,
        load=gain,
        seconds=1.0,
        created_s=1.9e9,
    )


SPACE = Space(({"threads": "8", "direct": "auto"}, {"threads": "32", "direct": "auto"}), {})


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        (None, "The others were not tried in this time. Give a larger --time-limit."),
        (Gain(2.0, 0.0, math.inf, 3), "2.00 × as fast as with the defaults (from 3 pairs, too few"),
        (Gain(1.1, 0.99, 1.3, 8), "(from 0.99 to 1.30 with 95 % confidence, from 8 pairs)"),
        (Gain(1.3, 1.1, 1.5, 8), "(from 1.10 to 1.50 with 95 % confidence, from 8 pairs)"),
    ],
)
def test_only_a_significant_gain_is_kept(gain: Gain | None, said: str) -> None:
    """The profile has the options that differ from the defaults; the conclusions say why."""
    found = tuning(SPACE, gain)
    lines = "\n".join(verdict_lines(found))
    assert said in lines
    significant = gain is not None and gain.low > 1
    assert found.is_worth_keeping == significant == ("nothing to keep" not in lines)
    if significant:
        assert found.profile().options == {"threads": "32"}


@pytest.mark.nightly(5)
@pytest.mark.clocked
@pytest.mark.parametrize("reverse", [False, True])
def test_a_gain_is_found_and_shown(reverse: bool) -> None:
    """A choice that delays real saves and loads is never made, and significantly slower."""
    held_back, free = {"faults": "delay:1,delay_s:0.01"}, {"faults": "off"}
    candidates = (free, held_back) if reverse else (held_back, free)
    uri = f"memory://tuning-{reverse}"
    plan = TuningPlan(uri, MIB, 1, time_limit_s=60, pairs_max=9)
    found = tuned(plan, Space(candidates, {}))
    assert found.best == free
    assert found.is_worth_keeping == (not reverse)
    if not reverse:
        assert found.gain is not None
        assert found.gain.pairs == 9
    assert list(holdfast.list_checkpoints(uri)) == []


def test_a_folder_is_tuned_for(home: Path, tmp_path: Path) -> None:
    """The profile is the printed one. With --only-show nothing is kept."""
    arguments = ["bench", tmp_path / "s", "--tune", "--size", "4MiB", "--time-limit", "1s"]
    found = run_json(*arguments)
    assert found["candidates"] == 10
    assert found["trials"][0]["options"] == found["default"] == {"threads": "8", "direct": "auto"}
    assert (found["kept"] == str(home)) == home.exists()
    home.unlink(missing_ok=True)
    assert "defaults  threads=8 direct=auto" in run(*arguments, "--only-show").stdout
    assert not home.exists()
    assert list((tmp_path / "s").iterdir()) == []


RUNGS = [Rung(20, 64 * MIB, 1), Rung(7, 256 * MIB, 2), Rung(3, 512 * MIB, 3)]


def searched(seconds_per_mib: Sequence[float], default: int = 0) -> tuple[list[int], list[int]]:
    """Search among candidates that take so long. Return the ranking, and the order of turns."""
    turns = []

    def measure(number: int, candidate: int) -> float:
        turns.append(candidate)
        return seconds_per_mib[candidate] * RUNGS[number].nbytes / MIB

    return search(RUNGS, measure, default=default), turns


def bowl(best: int, count: int = 20) -> list[float]:
    """Return times that grow by 8 % with each step away from the best."""
    return [0.001 * 1.08 ** abs(candidate - best) for candidate in range(count)]


@pytest.mark.parametrize("best", [0, 7, 19])
def test_without_noise_the_best_is_found(best: int) -> None:
    """The best may also be the default."""
    ranking, turns = searched(bowl(best))
    assert ranking[0] == best
    assert len(turns) == 20 + 2 * 7 + 3 * 3


def test_a_machine_that_slows_down_hits_all_alike() -> None:
    """Rounds that take five times as long change nothing: candidates are judged within them."""
    times = bowl(5)
    turns: list[tuple[int, int]] = []

    def measure(number: int, candidate: int) -> float:
        turns.append((number, candidate))
        round_number = turns.count((number, candidate))
        return times[candidate] * (1.0 if round_number % 2 else 5.0)

    assert search(RUNGS, measure)[0] == 5


def test_the_default_is_in_every_rung() -> None:
    """It is the baseline of the best, however slow it is, and it has the first turn."""
    ranking, turns = searched(bowl(2), default=19)
    assert 19 in ranking
    assert turns[0] == 19
    assert turns.count(19) == 1 + 2 + 3


def test_a_rung_whose_time_is_over_keeps_what_it_has_measured() -> None:
    """Candidates without a turn drop out, and rungs without a complete round keep the ranking."""
    rungs = [replace(rung, seconds=1.0) for rung in RUNGS]
    turns: list[int] = []

    def measure(number: int, candidate: int) -> float:
        turns.append(candidate)
        late = len(turns) > 5
        return 1.0 / (1 + candidate) if late else 1.0 + candidate  # late ones reverse the ranking

    ranking = search(rungs, measure, clock=lambda: 1e9 if len(turns) >= 5 else 0.0)
    assert ranking == sorted(turns[:5])[:3]
    assert ranking[0] == 0


def test_rungs_cost_what_they_may() -> None:
    """Each takes an equal part of the time, or one round. Sizes grow within their bounds."""
    rungs = ladder(20, budget_s=30, bytes_per_s=1e9, least_nbytes=64 * MIB, most_nbytes=1024 * MIB)
    assert [rung.candidates for rung in rungs] == [20, 7, 3]
    assert rungs[0].nbytes == int(10 * 1e9 / 20)
    assert [rung.nbytes for rung in rungs[1:]] == [1024 * MIB, 1024 * MIB]
    assert [rung.rounds for rung in rungs] == [1, 1, 3]
    slow = ladder(20, budget_s=1, bytes_per_s=1e6, least_nbytes=64 * MIB, most_nbytes=1024 * MIB)
    assert {(rung.nbytes, rung.rounds) for rung in slow} == {(64 * MIB, 1)}
    assert sum(rung.seconds for rung in slow) == pytest.approx(1)
    assert slow[0].seconds / slow[2].seconds == pytest.approx(20 / 3)


def test_the_interval_is_that_of_the_signed_rank_test() -> None:
    """8 Walsh averages of ten pairs lie below it, as in tables of Wilcoxon's test."""
    logs = [0.1 * 2**number for number in range(10)]
    found = gain_of([(math.exp(value), 1.0) for value in logs])
    assert found is not None
    walsh = sorted((a + b) / 2 for i, a in enumerate(logs) for b in logs[i:])
    assert found.low == pytest.approx(math.exp(walsh[8]))
    assert found.high == pytest.approx(math.exp(walsh[-9]))
