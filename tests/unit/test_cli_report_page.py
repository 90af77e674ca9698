"""``holdfast report --html``: the page, as text. In a browser it is looked at beside the tests of
servers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from support.recorded import NBYTES, listed, record, save_of, slow_write, stage

import holdfast
from holdfast.cli import app
from holdfast.cli.report.html import report_page
from holdfast.storage.format.save_telemetry import SaveTelemetry
from holdfast.storage.operations.reporting.report_saves import RecordedSave

URI = "s3://bucket/run"


class _Reader(HTMLParser):
    """Reads a page: the text and the attributes in it, and whether each element is closed."""

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
    """The page, read to its end."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def shown(*saves: SaveTelemetry) -> _Reader:
    """The page of these saves."""
    return read(report_page(URI, [RecordedSave(listed(save.step), save) for save in saves]))


def lanes(reader: _Reader) -> Sequence[str]:
    """The names of lanes and rows: each rank that is drawn has two."""
    return re.findall(r"^rank \d+$", reader.text, re.MULTILINE)


def test_the_page_of_one_save_names_its_stragglers() -> None:
    """In the words of the terminal; and the pictures and tables are there."""
    reader = shown(save_of({1: {"write": stage(8.0, NBYTES)}}, world=3))
    assert "rank 1: slow device or network: write took 8.00 s, 4.0 times the typical" in reader.text
    for title in ("Ranks over time", "Bytes by rank", "Latency of writes", "Stages, by busy time"):
        assert title in reader.text
    assert reader.tags.count("svg") == 5
    assert lanes(reader) == ["rank 0", "rank 1", "rank 2"] * 2


def test_a_save_of_one_rank_is_compared_with_nobody() -> None:
    """No line says that nobody stands out, and no picture compares it."""
    reader = shown(save_of({}, world=1))
    assert "stands out" not in reader.text.replace("What stands out is framed.", "")
    assert "Bytes by rank" not in reader.text


def test_of_many_ranks_those_that_stand_out_are_drawn() -> None:
    """Others stand for the rest, and the page says how many are left out. Of the heat map no rank
    is left out: several share a row."""
    reader = shown(save_of({777: {"write": stage(9.0, NBYTES)}}, world=1000))
    assert "rank 777" in lanes(reader)
    assert "976 ranks are not shown" in reader.text
    assert "ranks 0–15" in reader.text
    assert "ranks 768–783" in reader.text
    assert "ranks 992–999" in reader.text


def test_the_page_of_a_run_shows_its_saves_over_time() -> None:
    """The newest is open; a save of which nothing is known is in the table, with the reason."""
    saves = [replace(save_of({}), step=step) for step in (100, 200, 300)]
    known = [RecordedSave(listed(save.step), save) for save in saves]
    reader = read(report_page(URI, [*known, RecordedSave(listed(400), None, "it is damaged")]))
    assert "Duration of a save, by step" in reader.text
    assert "it is damaged" in reader.text
    assert reader.tags.count("details") == 3
    assert reader.attributes.count(("open", "open")) == 1


def test_what_comes_from_files_is_text() -> None:
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


def test_the_page_asks_for_nothing() -> None:
    """Its policy forbids everything but its own style, and no attribute names an address."""
    reader = shown(save_of({}))
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in reader.attributes
    names = {name for name, _ in reader.attributes}
    assert not {"src", "href", "style", "srcset", "action"} & names
    assert not [name for name in names if name.startswith("on")]


def test_figures_of_nothing_are_drawn() -> None:
    """A save that took no time, of no bytes, in which nothing was counted."""
    stages = {"plan": stage(0.0, count=0, first_s=0.0, last_s=0.0, histogram=())}
    ranks = {rank: replace(record(rank), nbytes=0, stages=stages) for rank in range(2)}
    reader = shown(replace(save_of({}), seconds=0.0, ranks=ranks))
    assert "nan" not in reader.text
    assert "Latency of writes" not in reader.text


def test_the_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside what is printed; where it cannot be written, that is an error."""
    holdfast.save(tmp_path / "c", {"w": torch.arange(9.0)}, step=7)
    path = tmp_path / "report.html"
    assert app.run(["report", str(tmp_path / "c"), "--html", str(path)]) == 0
    assert "step     7" in capsys.readouterr().out
    assert "upload_commit" in read(path.read_text(encoding="utf-8")).text
    assert app.run(["report", str(tmp_path / "c"), "--html", str(tmp_path / "no/r")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_where_nothing_is_known_no_page_is_written(tmp_path: Path) -> None:
    """The answer is no, as without the option."""
    holdfast.save(tmp_path / "c", {"w": torch.arange(9.0)}, telemetry="off")
    assert app.run(["report", str(tmp_path / "c"), "--html", str(tmp_path / "r")]) == 1
    assert not (tmp_path / "r").exists()
