"""Pages of reports and measurements, and the documentation's site, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from support.browser import Browser, browsing, contrast, find_chromium, luminance
from support.recorded import NBYTES, listed, save_of, stage

from holdfast.bench.measured import result
from holdfast.bench.measured.result import Measurement, Operations, Phase
from holdfast.cli.bench.page import measurement_page
from holdfast.cli.report.html import report_page
from holdfast.core.histogram import BUCKETS
from holdfast.storage.format.save_telemetry import SaveTelemetry
from holdfast.storage.operations.reporting.report_saves import RecordedSave

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="Chromium is not installed: make test-servers"
)

ASK = """(() => {
  const inner = document.documentElement.clientWidth;
  const drawn = [...document.querySelectorAll('details[open] svg, main > svg, figure svg')];
  const words = [...document.querySelectorAll('main > * , main > details[open] *')]
    .filter(e => e.textContent.trim() && e.getClientRects().length);
  const box = e => e.getBoundingClientRect();
  const legible = e => parseFloat(getComputedStyle(e).fontSize) >= 9.5;
  return {
    wide: document.documentElement.scrollWidth - inner,
    drawn: drawn.length,
    empty: drawn.filter(e => !e.childElementCount || box(e).height < 15).length,
    outside: drawn.flatMap(svg => [...svg.querySelectorAll('rect, text')].filter(
      e => box(e).right > box(svg).right + 1 || box(e).left < box(svg).left - 1)).length,
    small: words.filter(e => !legible(e)).length,
    ground: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.body).color,
  };
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Run one browser for all tests of this file."""
    with browsing(tmp_path_factory.mktemp("chromium")) as running:
        yield running


CONFIG = {"nbytes": 10**9, "runs": 5, "ranks": 4}


def pages() -> dict[str, list[SaveTelemetry]]:
    """Return saves of one rank, of some, of a thousand, and a run."""
    slow = {5: {"write": stage(9.0, NBYTES), "open": stage(1.0, retries=3)}}
    return {
        "one rank": [save_of({}, world=1)],
        "eight ranks": [save_of(slow)],
        "a thousand ranks": [save_of(slow, world=1000)],
        "a run": [
            replace(save_of(slow), step=500 * n, seconds=6.0 + n % 3, created_s=1e9 + 60 * n)
            for n in range(1, 40)
        ],
    }


@pytest.mark.nightly(13)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", pages())
def test_a_browser_shows_the_page(browser: Browser, name: str, dark: bool, tmp_path: Path) -> None:
    """All of the page and its pictures is visible and legible, and only the file is requested."""
    saves = [RecordedSave(listed(save.step), save) for save in pages()[name]]
    path = tmp_path / "report.html"
    path.write_text(report_page("s3://bucket/run", saves), encoding="utf-8")
    assert_shown(browser, path, dark, tmp_path / "seen.png")


def assert_shown(browser: Browser, path: Path, dark: bool, picture: Path) -> None:
    """Check the claims of the test above."""
    seen = browser.look(path, ASK, dark=dark, picture=picture)
    assert seen.complaints == []
    assert seen.requested == [path.as_uri()]
    answer: dict[str, Any] = seen.answer
    assert contrast(answer.pop("ground"), answer.pop("ink")) > 10
    assert answer.pop("drawn") >= 4
    assert answer == {"wide": 0, "empty": 0, "outside": 0, "small": 0}
    assert_drawn(picture, dark)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_a_measurement(browser: Browser, dark: bool, tmp_path: Path) -> None:
    """The page of ``holdfast bench`` is as legible as a report's."""
    rounds = tuple((1.0 + n / 20, 0.7, 0.9, 0.8) for n in range(5))
    seconds = tuple(map(max, rounds))
    writes = Operations(80, 5 * 10**9, tuple(n % 7 if 15 < n < 22 else 0 for n in range(BUCKETS)))
    phases = tuple(
        Phase(name, 10**9, seconds, ranks_s=rounds, operations={"write": writes})
        for name in (result.WRITE_LIMIT, result.READ_LIMIT, *result.LIMITS, *result.DELETING)
    )
    machine = {"cpu": "2 × Intel(R) Xeon(R) Processor @ 2.80GHz", "file system": "ext4"}
    found = Measurement("s3://bucket/x", 1.9e9, CONFIG, machine, phases)
    path = tmp_path / "bench.html"
    path.write_text(measurement_page(found), encoding="utf-8")
    assert_shown(browser, path, dark, tmp_path / "seen.png")


def assert_drawn(picture: Path, dark: bool) -> None:
    """Check that the picture shows something, and that most of it is the background."""
    pixels = imread(picture)[..., :3].mean(axis=-1)
    ground = np.median(pixels)
    assert (ground < 0.2) == dark
    assert 0.01 < np.mean(np.abs(pixels - ground) > 0.1) < 0.6


def test_a_script_in_a_page_does_not_run(browser: Browser, tmp_path: Path) -> None:
    """The page's policy stops a script that passed the escaping."""
    saves = [RecordedSave(listed(1), save_of({}))]
    page = report_page("s3://bucket/run", saves)
    hostile = "<script>document.title = 'run'</script><img src='http://127.0.0.1:9/x'>"
    path = tmp_path / "report.html"
    path.write_text(page.replace("<main>", "<main>" + hostile), encoding="utf-8")
    seen = browser.look(path, "document.title", picture=tmp_path / "seen.png")
    assert seen.answer == "Saves of s3://bucket/run"
    assert len(seen.complaints) == 2  # proves that complaints are noticed


# The documentation's site, opened from its files


SITE = Path(__file__).parents[2] / "build/docs/html"
built = pytest.mark.skipif(
    not (SITE / "index.html").exists(), reason="the site is not built: make docs"
)

ASK_SITE = """(() => {
  const style = getComputedStyle(document.body);
  return {
    ground: style.backgroundColor,
    ink: getComputedStyle(document.querySelector('article')).color,
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    words: document.querySelector('article').innerText.split(/\\s+/).length,
    linked: document.querySelectorAll('.sidebar-tree a').length,
  };
})()"""

PAGES = ["index.html", "tutorial/first-checkpoint.html", "reference/code/options.html"]


@pytest.mark.nightly(5)
@built
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_a_browser_shows_the_site(browser: Browser, page: str, dark: bool, tmp_path: Path) -> None:
    """All of the page is visible and legible, with its navigation, and no request leaves it."""
    seen = browser.look(SITE / page, ASK_SITE, dark=dark, picture=tmp_path / "seen.png")
    assert seen.complaints == []
    assert outside(seen.requested) == []
    answer: dict[str, Any] = seen.answer
    assert (luminance(answer["ground"]) < luminance(answer["ink"])) == dark
    assert contrast(answer["ground"], answer["ink"]) > 7
    assert answer["wide"] == 0
    assert answer["words"] > 50
    assert answer["linked"] > 50


def outside(requested: list[str]) -> list[str]:
    """Return the addresses that are neither files of the site nor written in it."""
    return [url for url in requested if not url.startswith((f"{SITE.as_uri()}/", "data:"))]


@built
def test_the_search_works_without_a_server(browser: Browser, tmp_path: Path) -> None:
    """Its index is a script among the files. A word of one page finds that page."""
    ask = "Search._performSearch(...Search._parseQuery('radosgw')).map(found => found[0])"
    seen = browser.look(SITE / "search.html", ask, picture=tmp_path / "seen.png")
    assert seen.complaints == []
    assert outside(seen.requested) == []
    assert f"{SITE.as_uri()}/searchindex.js" in seen.requested
    assert "reference/object-stores" in seen.answer
    assert "how-to/use-with-lightning" not in seen.answer
