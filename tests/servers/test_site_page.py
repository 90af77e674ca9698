"""The documentation's site in a real browser, opened from its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import Browser, browsing, contrast, find_chromium, luminance

SITE = Path(__file__).parents[2] / "build/docs/html"

pytestmark = [
    pytest.mark.skipif(
        find_chromium() is None, reason="Chromium is not installed: make test-servers"
    ),
    pytest.mark.skipif(
        not (SITE / "index.html").exists(), reason="the site is not built: make docs"
    ),
]

ASK = """(() => {
  const style = getComputedStyle(document.body);
  const box = document.querySelector('article').getBoundingClientRect();
  return {
    ground: style.backgroundColor,
    ink: getComputedStyle(document.querySelector('article')).color,
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    words: document.querySelector('article').innerText.split(/\\s+/).length,
    linked: document.querySelectorAll('.sidebar-tree a').length,
    width: Math.round(box.width),
  };
})()"""

PAGES = ["index.html", "tutorial/first-checkpoint.html", "reference/code/options.html"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all tests of this file."""
    with browsing(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest.mark.nightly(5)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_a_browser_shows_the_site(browser: Browser, page: str, dark: bool, tmp_path: Path) -> None:
    """Without a complaint and without a request that leaves the folder; text can be told from its
    ground, nothing sticks out, and the navigation is there."""
    seen = browser.look(SITE / page, ASK, dark=dark, picture=tmp_path / "seen.png")
    assert seen.complaints == []
    assert outside(seen.requested) == []
    answer: dict[str, Any] = seen.answer
    assert (luminance(answer["ground"]) < luminance(answer["ink"])) == dark
    assert contrast(answer["ground"], answer["ink"]) > 7
    assert answer["wide"] == 0
    assert answer["words"] > 50
    assert answer["linked"] > 50


def outside(requested: list[str]) -> list[str]:
    """The addresses that are neither files of the site nor written in it."""
    return [url for url in requested if not url.startswith((f"{SITE.as_uri()}/", "data:"))]


def test_the_search_works_without_a_server(browser: Browser, tmp_path: Path) -> None:
    """Its index is a script among the files: a word of one page finds that page."""
    ask = "Search._performSearch(...Search._parseQuery('radosgw')).map(found => found[0])"
    seen = browser.look(SITE / "search.html", ask, picture=tmp_path / "seen.png")
    assert seen.complaints == []
    assert outside(seen.requested) == []
    assert f"{SITE.as_uri()}/searchindex.js" in seen.requested
    assert "reference/object-stores" in seen.answer
    assert "how-to/use-with-lightning" not in seen.answer
