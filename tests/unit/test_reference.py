"""The reference that is written by hand says what the code declares."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest
import torch
from holdfast_site.generated import subcommands
from prometheus_client import CollectorRegistry

import holdfast
from holdfast import errors
from holdfast.cli.app import command_parser
from holdfast.drivers.layers.stack import common_options
from holdfast.drivers.registry import driver_class
from holdfast.drivers.schemes import SCHEMES
from holdfast.storage.integrations.prometheus import export_metrics

REFERENCE = Path(__file__).parents[2] / "docs/reference"


def text_of(page: str) -> str:
    """A page of the reference."""
    return (REFERENCE / page).read_text()


def rows(text: str) -> list[list[str]]:
    """The cells of every row of the tables in a text."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def tree_in(text: str) -> list[tuple[int, str]]:
    """The names in a drawing of the tree of errors, each with its depth."""
    lines = re.findall(r"^    ([│ ├└─]*)(\w+Error)\b(?: \((\w+)\))?", text, re.MULTILINE)
    return [(len(rule) // 4, f"{name} {builtin}".strip()) for rule, name, builtin in lines]


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    """In the reference, in the docstring, and in the classes: names, parents and builtin errors."""
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
    """With its labels, and none besides: what a save and a load leave in the registry."""
    registry = CollectorRegistry()
    uri = f"memory://{uuid.uuid4().hex}/step-1"
    state = {"w": torch.ones(4), "step": 1}
    stop = export_metrics(registry)
    try:
        holdfast.save(uri, state)
        holdfast.load(uri, into=state)
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
    """The names of all options that drivers and layers declare."""
    names = {*common_options(remote=True), *common_options(remote=False)}
    for scheme in SCHEMES:
        cls = driver_class("fsspec+memory" if scheme == "fsspec" else scheme)
        names |= set(cls.OPTIONS)
    return names


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "http", "hdfs", "file", "lustre", "peer"])
def test_every_option_of_a_scheme_is_explained(scheme: str) -> None:
    """Some page tells what each option of a driver is for, and calls it by its name."""
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
    """Each public name is explained on the page of the API, or on that of errors."""
    pages = ("api.md", "errors.md", "telemetry.md", "metrics.md")
    words = {word for page in pages for word in re.findall(r"\w+", text_of(page))}
    assert sorted(set(holdfast.__all__) - words) == []
