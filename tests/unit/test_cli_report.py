"""``holdfast report``: what it prints of one save, of several, and of none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.bench.measured.result import Measurement, Phase, encoded
from holdfast.cli import app
from holdfast.storage.format.save_telemetry import (
    SaveTelemetry,
    encode_head,
    encode_record,
)

STATE: dict[str, Any] = {"w": torch.arange(99.0)}


def document(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    """What ``report --json`` prints."""
    assert app.run(["report", "--json", *arguments]) == status
    return json.loads(capsys.readouterr().out)


def with_slow_rank(uri: Path, key: str = "data/x") -> SaveTelemetry:
    """Replace the stored telemetry: three ranks have saved. Two wrote in no time, however long the
    save took; the last one wrote for 5 s."""
    with holdfast.open(uri) as checkpoint:
        stored = checkpoint.telemetry()
    assert stored is not None
    own = stored.ranks[0]
    quick = {**own.stages, "write": replace(own.stages["write"], busy_s=0.0, seconds=0.0)}
    ranks = {rank: replace(own, rank=rank, stages=quick, slowest=()) for rank in range(2)}
    write = replace(own.stages["write"], busy_s=5.0, seconds=5.0)
    slow = replace(own.slowest[0], rank=2, stage="write", key=key, seconds=5.0)
    stages = {**own.stages, "write": write}
    ranks[2] = replace(own, rank=2, stages=stages, slowest=(slow,))
    telemetry = replace(stored, world=3, seconds=6.0, ranks=ranks)
    (path,) = uri.rglob("telemetry*")
    path.write_bytes(encode_head(telemetry) + b"".join(map(encode_record, ranks.values())))
    return telemetry


def test_one_save_is_shown_with_its_stragglers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who was slow comes first, then stages, ranks and operations; nothing in a key reaches the
    terminal as a control sequence."""
    holdfast.save(tmp_path, STATE, step=5)
    with_slow_rank(tmp_path, key="\x1b[31mred")
    assert app.run(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "step     5\n" in out
    assert "rank 2: slow device or network: write took 5.00 s" in out
    assert "\x1b" not in out
    assert "\\x1b[31mred" in out
    for name in ("capture", "hash", "write", "upload_commit", "merge", "manifest"):
        assert f"\n  {name} " in out


def test_json_has_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is stored, and what it shows."""
    holdfast.save(tmp_path, STATE, step=5)
    telemetry = with_slow_rank(tmp_path)
    (save,) = document(capsys, str(tmp_path))["saves"]
    assert (save["step"], save["path"], save["problem"]) == (5, "", None)
    assert [rank["rank"] for rank in save["telemetry"]["ranks"]] == [0, 1, 2]
    stages = save["telemetry"]["ranks"][2]["stages"]
    assert stages["write"]["busy_s"] == 5.0
    assert set(stages) == set(telemetry.ranks[2].stages)
    (slow,) = save["stragglers"]
    assert (slow["rank"], slow["stage"], slow["cause"]) == (2, "write", "slow device or network")
    assert slow["text"].startswith("rank 2: slow device or network: ")


def test_a_run_is_shown_save_by_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One without telemetry and one whose telemetry is damaged say so, and hide no other."""
    for step in (1, 2, 3, 4):
        telemetry: Any = "off" if step == 2 else "on"
        holdfast.save(tmp_path / str(step), STATE, step=step, telemetry=telemetry)
    with_slow_rank(tmp_path / "4")
    (path,) = (tmp_path / "3").rglob("telemetry*")
    path.write_bytes(b"foreign")
    assert app.run(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "its save recorded no telemetry" in out
    assert "cannot be read" in out
    assert "rank 2, write: slow device or network" in out
    assert "rank 2: slow device or network, 5.00 s lost in 1 of 2 saves" in out
    saves = document(capsys, str(tmp_path))["saves"]
    assert [(save["step"], save["telemetry"] is None) for save in saves] == [
        (1, False),
        (2, True),
        (3, True),
        (4, False),
    ]


@pytest.mark.parametrize("damaged", [False, True])
def test_where_nothing_is_known_the_answer_is_no(
    tmp_path: Path, damaged: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where what is stored is damaged: the message says which it is."""
    holdfast.save(tmp_path, STATE, telemetry="on" if damaged else "off")
    for path in tmp_path.rglob("telemetry*"):
        path.write_bytes(b"foreign")
    assert app.run(["report", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("cannot be read" if damaged else "recorded no telemetry") in captured.err


def test_where_there_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As for ``ls``."""
    assert app.run(["report", str(tmp_path)]) == 1
    assert "no checkpoint at or below" in capsys.readouterr().err


def test_a_trace_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside what is printed; a file that cannot be written is an error."""
    holdfast.save(tmp_path / "c", STATE)
    trace = tmp_path / "trace.json"
    assert app.run(["report", str(tmp_path / "c"), "--trace", str(trace)]) == 0
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"process_name", "write", "manifest"} <= names
    assert app.run(["report", str(tmp_path / "c"), "--trace", str(tmp_path / "no/t")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_rates_are_held_against_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a part of the rate of saves in ``holdfast bench``, and of its limit; what makes the two
    hard to compare is said."""
    uri = tmp_path / "run"
    for step in (1, 2):
        holdfast.save(uri / str(step), STATE, step=step)
        with_slow_rank(uri / str(step))
    phases = (
        Phase("write limit", 1200, (1.0, 1.0)),
        Phase("save", 1200, (2.0, 2.0)),
    )
    result = tmp_path / "bench.json"
    config, invalid = {"nbytes": 1, "ranks": 1}, {"save": ("short",)}
    found = Measurement("x", 1.0, config, {}, phases, invalid=invalid)
    result.write_text(encoded(found))
    first = str(uri / "1")
    (save,) = document(capsys, first, "--bench", str(result))["saves"]
    rate = save["telemetry"]["nbytes"] / 6.0
    assert save["bench"] == {
        "share": pytest.approx(rate / 600),
        "share_of_limit": pytest.approx(rate / 1200),
    }
    (save,) = document(capsys, first)["saves"]
    assert save["bench"] is None
    assert app.run(["report", first, "--bench", str(result)]) == 0
    out = capsys.readouterr().out
    assert f"{rate / 600:.0%} of the 0.00 GB/s of save" in out
    assert "measured with 1 rank; the measurement is marked as INVALID" in out
    assert app.run(["report", str(uri), "--bench", str(result)]) == 0
    assert "of bench" in capsys.readouterr().out
    assert app.run(["report", first, "--bench", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err
