"""The documentation as a site: links, navigation, and the pages that are made from the code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from holdfast_site.pages import contents_of, find_pages, on_site, sections_of
from support.commands import finished

ROOT = Path(__file__).parents[2]


def moved(text: str, document: str = "docs/how-to/page.md") -> str:
    """The text of a document, as the site has it."""
    pages = find_pages(ROOT) | {Path(document): Path(document).relative_to("docs")}
    return on_site(text, Path(document), ROOT, pages)[0]


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("../reference/cli.md#exit-status", "../reference/cli.md#exit-status"),
        ("../README.md", "../index.md"),
        ("../../README.md", "../project/README.md"),
        ("../../ARCHITECTURE.md", "../project/ARCHITECTURE.md"),
        ("../../storage/api.py", "../files/storage/api.py"),
        ("../examples/holdfast-sqlite", "../examples/holdfast-sqlite/README.md"),
        ("https://example.org/x.md", "https://example.org/x.md"),
        ("#below", "#below"),
    ],
)
def test_links_lead_where_they_led(link: str, expected: str) -> None:
    """Links lead to pages of the site, to copies of files, or out of it, also over a line end."""
    assert moved(f"See [a\n`b`]({link}).") == f"See [a\n`b`]({expected})."


def test_a_link_to_nothing_is_an_error() -> None:
    """It names the document and the link."""
    with pytest.raises(ValueError, match=r"docs/how-to/page\.md: the link \.\./gone\.md"):
        moved("[gone](../gone.md)")


def test_the_navigation_has_every_page() -> None:
    """The front page links every page, and every link of a page has a target."""
    sections = sections_of(moved((ROOT / "docs/README.md").read_text(), "docs/README.md"))
    pages = find_pages(ROOT)
    for document in pages:  # raises ValueError for a broken link
        on_site((ROOT / document).read_text(), document, ROOT, pages)
    records = contents_of((ROOT / "docs/decisions/README.md").read_text())
    named = {page for pages in sections.values() for page in pages}
    named |= {"index.md", *(f"decisions/{record}" for record in records)}
    assert {page.as_posix() for page in pages.values()} - named == set()


def test_sphinx_refuses_what_leads_nowhere(tmp_path: Path) -> None:
    """An anchor that no heading has, and a page that is not in the navigation, fail the build."""
    source = tmp_path / "source"
    source.mkdir()
    links = "[x](here.md#nowhere) [y](here.md#there)"
    (source / "index.md").write_text(f"# Index\n\n{links}\n\n```{{toctree}}\nhere\n```\n")
    (source / "here.md").write_text("# Here\n\n## There\n")
    (source / "lost.md").write_text("# Lost\n")
    options = ["--fail-on-warning", "--keep-going", "--quiet", "--conf-dir", ROOT / "docs/site"]
    command = [sys.executable, "-m", "sphinx", *options, source, tmp_path / "html"]
    done = finished(command, cwd=tmp_path)
    warnings = [line for line in done.stderr.splitlines() if "WARNING:" in line]
    assert done.returncode == 1
    assert len(warnings) == 2
    assert "nowhere" in done.stderr
    assert "lost.md" in done.stderr
