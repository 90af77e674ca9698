"""``holdfast report``: text, JSON, trace and page of one save, several, and none."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import fresh_uri
from support.commands import run, run_json
from support.recorded import NBYTES, listed, record, save_of, slow_write, stage

import holdfast
from holdfast.bench.measured.result import Measurement, Phase, encoded
from holdfast.cli.report.html import report_page
from holdfast.storage.format.save_telemetry import SaveTelemetry, encode_head, encode_record
from holdfast.storage.operations.reporting.report_saves import RecordedSave

STATE: dict[str, Any] = {"w": torch.arange(99.0)}


def with_slow_rank(uri: Path, key: str = "data/x") -> SaveTelemetry:
    """Replace the stored telemetry: of three ranks, only the last spent time, 5 s, on writes."""
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


def test_one_save_is_shown_with_its_stragglers(tmp_path: Path) -> None:
    """Stragglers, stages, ranks and operations are shown; keys are no control sequences."""
    holdfast.save(tmp_path, STATE, step=5)
    with_slow_rank(tmp_path, key="\x1b[31mred")
    out = run("report", str(tmp_path)).stdout
    assert "step     5\n" in out
    assert "rank 2: slow device or network: write took 5.00 s" in out
    assert "\x1b" not in out
    assert "\\x1b[31mred" in out
    for name in ("capture", "hash", "write", "upload_commit", "merge", "manifest"):
        assert f"\n  {name} " in out


def test_json_has_all_of_it(tmp_path: Path) -> None:
    """The document has the stored figures, and the findings."""
    holdfast.save(tmp_path, STATE, step=5)
    telemetry = with_slow_rank(tmp_path)
    (save,) = run_json("report", str(tmp_path))["saves"]
    assert (save["step"], save["path"], save["problem"]) == (5, "", None)
    assert [rank["rank"] for rank in save["telemetry"]["ranks"]] == [0, 1, 2]
    stages = save["telemetry"]["ranks"][2]["stages"]
    assert stages["write"]["busy_s"] == 5.0
    assert set(stages) == set(telemetry.ranks[2].stages)
    (slow,) = save["stragglers"]
    assert (slow["rank"], slow["stage"], slow["cause"]) == (2, "write", "slow device or network")
    assert slow["text"].startswith("rank 2: slow device or network: ")


def test_a_run_is_shown_save_by_save(tmp_path: Path) -> None:
    """Missing and damaged telemetry is reported, and hides no other save."""
    for step in (1, 2, 3, 4):
        telemetry: Any = "off" if step == 2 else "on"
        holdfast.save(tmp_path / str(step), STATE, step=step, telemetry=telemetry)
    with_slow_rank(tmp_path / "4")
    (path,) = (tmp_path / "3").rglob("telemetry*")
    path.write_bytes(b"foreign")
    out = run("report", str(tmp_path)).stdout
    assert "its save recorded no telemetry" in out
    assert "cannot be read" in out
    assert "rank 2, write: slow device or network" in out
    assert "rank 2: slow device or network, 5.00 s lost in 1 of 2 saves" in out
    saves = run_json("report", str(tmp_path))["saves"]
    assert [save["step"] for save in saves] == [1, 2, 3, 4]
    assert [save["telemetry"] is None for save in saves] == [False, True, True, False]


def test_borrowed_bytes_and_whole_saves_are_shown(tmp_path: Path) -> None:
    """Each incremental save says how much it has not written, or why it has written everything."""
    w = torch.arange(float(1 << 18))
    uri = fresh_uri()
    with holdfast.Checkpointer(uri, every=1, incremental=True, when_busy="wait") as ckpt:
        for step in (1, 2):
            ckpt.step(step, {"w": w, "step": step})
    holdfast.save(f"{uri}/whole", STATE, step=3)
    found = [run("report", f"{uri}/{name}").stdout for name in ("step-00000001", "step-00000002")]
    assert "borrowed 0 B; there is no earlier checkpoint\n" in found[0]
    assert "borrowed 1.00 MiB\n" in found[1]
    lines = run("report", uri).stdout.splitlines()[2:5]
    assert [line.split("  ")[-1].strip() for line in lines] == [
        "0 B; there is no earlier checkpoint", "1.00 MiB", "-",
    ]  # fmt: skip
    saves = run_json("report", uri)["saves"]
    ranks = [save["telemetry"]["ranks"][0] for save in saves]
    assert [rank["borrowed_nbytes"] // (1 << 19) for rank in ranks] == [0, 2, 0]
    assert [bool(rank["why_whole"]) for rank in ranks] == [True, False, False]


@pytest.mark.parametrize("damaged", [False, True])
def test_without_telemetry_the_answer_is_no(tmp_path: Path, damaged: bool) -> None:
    """The message says whether it is missing or damaged; no page is written."""
    holdfast.save(tmp_path / "c", STATE, telemetry="on" if damaged else "off")
    for path in tmp_path.rglob("telemetry*"):
        path.write_bytes(b"foreign")
    printed = run("report", tmp_path / "c", "--html", tmp_path / "page", status=1)
    assert printed.stdout == ""
    assert ("cannot be read" if damaged else "recorded no telemetry") in printed.stderr
    assert not (tmp_path / "page").exists()
    assert "no checkpoint at or below" in run("report", tmp_path / "none", status=1).stderr


def test_a_trace_and_a_page_are_written(tmp_path: Path) -> None:
    """The report is printed as well. A file that cannot be written is an error."""
    uri = str(tmp_path / "c")
    holdfast.save(uri, STATE, step=7)
    trace, page = tmp_path / "trace.json", tmp_path / "report.html"
    printed = run("report", uri, "--trace", trace, "--html", page)
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"process_name", "write", "manifest"} <= names
    assert "step     7" in printed.stdout
    assert "upload_commit" in read(page.read_text(encoding="utf-8")).text
    for option in ("--trace", "--html"):
        assert "cannot be written" in run("report", uri, option, tmp_path / "no/t", status=2).stderr


def test_rates_are_compared_with_a_measurement(tmp_path: Path) -> None:
    """Shares of the rate of ``holdfast bench`` and of its limit are given, with caveats."""
    uri = tmp_path / "run"
    for step in (1, 2):
        holdfast.save(uri / str(step), STATE, step=step)
        with_slow_rank(uri / str(step))
    phases = (Phase("write limit", 1200, (1.0, 1.0)), Phase("save", 1200, (2.0, 2.0)))
    result = tmp_path / "bench.json"
    config, invalid = {"nbytes": 1, "ranks": 1}, {"save": ("short",)}
    found = Measurement("x", 1.0, config, {}, phases, invalid=invalid)
    result.write_text(encoded(found))
    first = str(uri / "1")
    (save,) = run_json("report", first, "--bench", str(result))["saves"]
    rate = save["telemetry"]["nbytes"] / 6.0
    shares = {"share": rate / 600, "share_of_limit": rate / 1200}
    assert save["bench"] == pytest.approx(shares)
    (save,) = run_json("report", first)["saves"]
    assert save["bench"] is None
    out = run("report", first, "--bench", str(result)).stdout
    assert f"{rate / 600:.0%} of the 0.00 GB/s of save" in out
    assert "measured with 1 rank; the measurement is marked as INVALID" in out
    assert "of bench" in run("report", uri, "--bench", result).stdout
    assert "cannot be read" in run("report", first, "--bench", tmp_path / "none", status=2).stderr


URI = "s3://bucket/run"


class _Reader(HTMLParser):
    """Reads the text and the attributes of a page, and checks that each element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.words)


def read(page: str) -> _Reader:
    """Read a page to its end."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def shown(*saves: SaveTelemetry) -> _Reader:
    """Read the page of these saves."""
    return read(report_page(URI, [RecordedSave(listed(save.step), save) for save in saves]))


def lanes(reader: _Reader) -> Sequence[str]:
    """Return the names of lanes and rows: each drawn rank has two."""
    return re.findall(r"^rank \d+$", reader.text, re.MULTILINE)


def test_the_page_of_one_save_names_its_stragglers() -> None:
    """It has the terminal's words, and the pictures and tables."""
    reader = shown(save_of({1: {"write": stage(8.0, NBYTES)}}, world=3))
    assert "rank 1: slow device or network: write took 8.00 s, 4.0 times the typical" in reader.text
    for title in ("Ranks over time", "Bytes by rank", "Latency of writes", "Stages, by busy time"):
        assert title in reader.text
    assert reader.tags.count("svg") == 5
    assert lanes(reader) == ["rank 0", "rank 1", "rank 2"] * 2


def test_outliers_of_many_ranks_are_drawn() -> None:
    """A sample of ranks is drawn, and several share a row; the page says how many are omitted."""
    reader = shown(save_of({777: {"write": stage(9.0, NBYTES)}}, world=1000))
    assert "rank 777" in lanes(reader)
    assert "976 ranks are not shown" in reader.text
    for row in ("ranks 0–15", "ranks 768–783", "ranks 992–999"):
        assert row in reader.text


def test_the_page_of_a_run_shows_its_saves_over_time() -> None:
    """The newest is open. The table has a save without telemetry, with the reason."""
    saves = [replace(save_of({}), step=step) for step in (100, 200, 300)]
    known = [RecordedSave(listed(save.step), save) for save in saves]
    reader = read(report_page(URI, [*known, RecordedSave(listed(400), None, "it is damaged")]))
    assert "Duration of a save, by step" in reader.text
    assert "it is damaged" in reader.text
    assert reader.tags.count("details") == 3
    assert reader.attributes.count(("open", "open")) == 1


def test_names_from_files_are_text() -> None:
    """Tags and control characters in names of stages, keys and URIs are shown, and do nothing."""
    slow = replace(record(0), slowest=(slow_write(0, "\x1b[31m<b>"),))
    hostile = replace(slow, stages={"<script>alert(1)</script>": stage(1.0)})
    save = replace(save_of({}), ranks={0: hostile})
    page = report_page('"><img src=x>', [RecordedSave(listed(1), save)])
    reader = read(page)
    assert not {"script", "img", "b"} & set(reader.tags)
    assert "<script>alert(1)</script>" in reader.text
    assert "\\x1b[31m<b>" in reader.text
    assert "\x1b" not in page
