"""The hand-written reference says what the code declares, and the site has all pages."""

from __future__ import annotations

import re
import sys
import uuid
from pathlib import Path

import pytest
import torch
from holdfast_site.generated import subcommands
from holdfast_site.pages import contents_of, find_pages, on_site, sections_of
from prometheus_client import CollectorRegistry
from support.commands import finished

import holdfast
from holdfast import errors
from holdfast.cli.app import command_parser
from holdfast.drivers.layers.stack import common_options
from holdfast.drivers.registry import driver_class
from holdfast.drivers.schemes import SCHEMES
from holdfast.storage.integrations.prometheus import export_metrics

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"


def text_of(page: str) -> str:
    """Return a page of the reference."""
    return (REFERENCE / page).read_text()


def rows(text: str) -> list[list[str]]:
    """Return the cells of every row of the tables in a text."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def tree_in(text: str) -> list[tuple[int, str]]:
    """Return the names in a drawing of the tree of errors, each with its depth."""
    lines = re.findall(r"^    ([│ ├└─]*)(\w+Error)\b(?: \((\w+)\))?", text, re.MULTILINE)
    return [(len(rule) // 4, f"{name} {builtin}".strip()) for rule, name, builtin in lines]


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    """Reference, docstring and classes agree on names, parents and builtin errors."""
    drawn = tree_in(text_of("errors.md"))
    assert drawn == tree_in(errors.__doc__ or "")
    path: list[str] = []
    for depth, entry in drawn:
        name, _, builtin = entry.partition(" ")
        bases = [base.__name__ for base in getattr(errors, name).__bases__]
        parent = path[depth - 1] if depth else "Exception"
        assert bases == [parent, *([builtin] if builtin else [])]
        path[depth:] = [name]
    assert {entry.split()[0] for _, entry in drawn} == set(errors.__all__)


def test_every_metric_is_in_the_table() -> None:
    """The table has exactly the metrics that operations leave in the registry, with labels."""
    registry = CollectorRegistry()
    uri = f"memory://{uuid.uuid4().hex}/step-1"
    state = {"w": torch.ones(4), "step": 1}
    stop = export_metrics(registry)
    try:
        holdfast.save(uri, state)
        holdfast.load(uri, into=state)
        with holdfast.publish(uri) as publisher:
            publisher.push(1, {"w": torch.ones(4)}).wait()
        families = list(registry.collect())
    finally:
        stop()
    found = {}
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = {label for sample in family.samples for label in sample.labels} - {"le"}
    listed = {
        name.strip("`"): set(re.findall(r"`(\w+)`", labels))
        for name, labels, *_ in rows(text_of("metrics.md"))
        if name.startswith("`holdfast_")
    }
    assert listed == found


@pytest.mark.parametrize("command", sorted(subcommands(command_parser())))
def test_every_option_of_a_command_is_explained(command: str) -> None:
    """No other option is explained. ``--json`` is explained once, for all commands."""
    commands = subcommands(command_parser())
    parser = commands[command]
    options = {o for a in parser._actions for o in a.option_strings if o.startswith("--")}
    options -= {"--help", "--json"}
    sections = re.split(r"^## ", text_of("cli.md"), flags=re.MULTILINE)
    below = tuple(f"`holdfast {name}" for name in commands if name.startswith(f"{command} "))
    own = [section for section in sections if section.startswith(f"`holdfast {command}")]
    text = "".join(section for section in own if not section.startswith(below))
    if command == "bench":
        text += text_of("bench.md")
    named = " ".join(code for row in rows(text) for code in re.findall(r"`([^`]*)`", row[0]))
    listed = set(re.findall(r"--[a-z][\w-]*", named))
    mentioned = set(re.findall(r"--[a-z][\w-]*", text))
    assert listed - options - {"--json"} == set()
    assert options - mentioned == set()


def declared_options() -> set[str]:
    """Return the names of all options that drivers and layers declare."""
    names = {*common_options(remote=True), *common_options(remote=False)}
    for scheme in SCHEMES:
        cls = driver_class("fsspec+memory" if scheme == "fsspec" else scheme)
        names |= set(cls.OPTIONS)
    return names


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "http", "hdfs", "file", "lustre", "peer"])
def test_every_option_of_a_scheme_is_explained(scheme: str) -> None:
    """Some page explains each option of a driver, under its name."""
    pages = [*REFERENCE.glob("*.md"), *(REFERENCE.parent / "how-to").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    names = driver_class(scheme).OPTIONS
    missing = [n for n in names if not re.search(rf"[`?&]{n}[`=]", text)]
    assert missing == []


HOW_TOS = [f"how-to/use-{topic}.md" for topic in ("hdfs", "lustre", "object-storage")]


@pytest.mark.parametrize("page", ["reference/layers.md", "reference/peer.md", *HOW_TOS])
def test_no_page_explains_an_option_that_is_gone(page: str) -> None:
    """Each option in the first column of a table of options is declared by a driver or a layer."""
    text = (REFERENCE.parent / page).read_text()
    tables = re.findall(r"^\| option .*\n(?:\|.*\n)+", text, re.MULTILINE)
    cells = " ".join(row[0] for table in tables for row in rows(table)[1:])
    named = set(re.findall(r"`([a-z_]+)(?:=[^`]*)?`", cells))
    assert named
    assert named - declared_options() == set()


def test_the_api_page_names_everything() -> None:
    """The page of the API or the page of errors explains each public name."""
    pages = ("api.md", "errors.md", "telemetry.md", "metrics.md")
    words = {word for page in pages for word in re.findall(r"\w+", text_of(page))}
    assert sorted(set(holdfast.__all__) - words) == []


# The documentation as a site: links, navigation, and what fails its build


def moved(text: str, document: str = "docs/how-to/page.md") -> str:
    """Return the text of a document, as the site has it."""
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
