"""``holdfast bench URI --tune``: what is tried, what is found, and what is kept of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import holdfast
from holdfast.bench.tuned.gain import Gain
from holdfast.bench.tuned.plan import TuningPlan, check_tuning
from holdfast.bench.tuned.space import Space, choices
from holdfast.bench.tuned.trial import Taken
from holdfast.bench.tuned.tuning import Entry, Tuning, tuned
from holdfast.cli import app
from holdfast.cli.bench.tuning_command import verdict_lines
from holdfast.drivers.configuration.tuned import TUNABLE, Place, keep_profile
from holdfast.drivers.hdfs.driver import HdfsDriver
from holdfast.drivers.layers.stack import common_options
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.objects.s3 import S3Driver
from holdfast.drivers.options import Option, integer
from holdfast.errors import UsageError

MIB = 1 << 20


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where profiles are kept."""
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
def test_options_are_tried_that_a_driver_declares(
    own: dict[str, Option], names: tuple[str, ...], count: int
) -> None:
    """In all combinations, the defaults first; every value is one that the option takes."""
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


def test_values_that_an_option_refuses_are_not_tried() -> None:
    """And its default is, whatever it is."""
    own = {"threads": Option(integer(1, 8), 3, "")}
    space = choices(own, common_options(remote=False), {})
    assert [candidate["threads"] for candidate in space.candidates] == ["3", "2", "4", "8"]


def test_what_the_user_has_set_is_not_tried(home: Path, tmp_path: Path) -> None:
    """It would win over a profile anyway. A profile that is there is no choice of the user's."""
    uri = f"file://{tmp_path}/s"
    space = check_tuning(TuningPlan(f"{uri}?threads=3", 4 * MIB, 1))
    assert space.fixed == {"threads": "the URI"}
    assert space.candidates == ({"direct": "auto"}, {"direct": "off"})
    whole = check_tuning(TuningPlan(uri, 4 * MIB, 1))
    keep_profile(_made(home), tuning(whole, Gain(1.5, 1.2, 1.8, 8)).profile())
    assert check_tuning(TuningPlan(uri, 4 * MIB, 1)) == whole
    with pytest.raises(UsageError, match=r"no option that could be tuned.*sets"):
        check_tuning(TuningPlan(f"{uri}?threads=3&direct=off", 4 * MIB, 1))


def _made(file: Path) -> Path:
    file.parent.mkdir(parents=True, mode=0o700)
    return file


def tuning(space: Space, gain: Gain | None) -> Tuning:
    """An outcome that chose the last candidate."""
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


def test_only_a_gain_that_is_shown_is_kept() -> None:
    """Of it, what differs from the defaults."""
    space = Space(({"threads": "8", "direct": "auto"}, {"threads": "32", "direct": "auto"}), {})
    for gain in (None, Gain(2.0, 0.0, math.inf, 3), Gain(1.1, 0.99, 1.3, 8)):
        assert not tuning(space, gain).is_worth_keeping
        assert tuning(space, gain).outcome == space.default
    shown = tuning(space, Gain(1.3, 1.1, 1.5, 8))
    assert shown.is_worth_keeping
    assert shown.outcome == space.candidates[1]
    assert shown.profile().options == {"threads": "32"}


def test_what_is_said_follows_from_what_was_found() -> None:
    """That there was too little time, that too few pairs show nothing, and how sure a gain is."""
    space = Space(({"threads": "8"}, {"threads": "32"}), {})
    defaults = verdict_lines(tuning(space, None))
    assert defaults[0] == "The others were not tried in this time. Give a larger --time-limit."
    assert "nothing to keep" in defaults[1]
    few = "\n".join(verdict_lines(tuning(space, Gain(2.0, 0.0, math.inf, 3))))
    assert "2.00 × as fast as with the defaults (from 3 pairs, too few" in few
    assert "nothing to keep" in few
    shown = "\n".join(verdict_lines(tuning(space, Gain(1.3, 1.1, 1.5, 8))))
    assert "(from 1.10 to 1.50 with 95 % confidence, from 8 pairs)" in shown
    assert "nothing to keep" not in shown


@pytest.mark.clocked
@pytest.mark.parametrize("reverse", [False, True])
def test_a_gain_is_found_and_shown(reverse: bool) -> None:
    """With real saves and loads, where one choice delays each operation: it is never chosen, and as
    the default it is shown to be slower. Nothing is left."""
    held_back, free = {"faults": "delay:1,delay_s:0.01"}, {"faults": "off"}
    candidates = (free, held_back) if reverse else (held_back, free)
    uri = f"memory://tuning-{reverse}"
    plan = TuningPlan(uri, MIB, 1, time_limit_s=60, pairs_max=9)
    found = tuned(plan, Space(candidates, {}))
    assert found.best == free
    assert found.is_worth_keeping == (not reverse)
    assert found.outcome == free
    if not reverse:
        assert found.gain is not None
        assert found.gain.pairs == 9
    assert list(holdfast.list_checkpoints(uri)) == []


def test_a_folder_is_tuned_for(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is said is what is kept. With --only-show nothing is."""
    uri = str(tmp_path / "s")
    arguments = ["bench", uri, "--tune", "--size", "4MiB", "--time-limit", "1s"]
    assert app.run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["candidates"] == 10
    assert found["trials"][0]["options"] == found["default"] == {"threads": "8", "direct": "auto"}
    assert (found["kept"] == str(home)) == home.exists()
    home.unlink(missing_ok=True)
    assert app.run([*arguments, "--only-show"]) == 0
    said = capsys.readouterr().out
    assert "defaults  threads=8 direct=auto" in said
    assert not home.exists()
    assert list((tmp_path / "s").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tune", "--forget"], "exclude each other"),
        (["--tune", "--html", "x.html"], "go with none of"),
        (["--tune", "--workload", "raw"], "go with none of"),
        (["--tune", "--time-limit", "soon"], "not a duration"),
        (["--tune", "--time-limit", "0.1"], "too short for tuning"),
        (["--tune", "--size", "1KiB"], "too little"),
        (["--tune", "--size", "900TiB"], "host memory"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(
    arguments: list[str],
    said: str,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With status 2."""
    monkeypatch.chdir(tmp_path)
    assert app.run(["bench", str(tmp_path / "s"), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not home.exists()
    assert not (tmp_path / "s").exists()


def test_nothing_is_measured_for_a_profile_that_would_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where HOLDFAST_CONFIG is set, or others may write to the folder."""
    monkeypatch.setenv("HOLDFAST_CONFIG", "")
    assert app.run(["bench", str(tmp_path / "s"), "--tune"]) == 2
    assert "would not be read" in capsys.readouterr().err
    monkeypatch.delenv("HOLDFAST_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "holdfast").mkdir()
    (tmp_path / "holdfast").chmod(0o777)
    assert app.run(["bench", str(tmp_path / "s"), "--tune"]) == 2
    assert "others may write to" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()
