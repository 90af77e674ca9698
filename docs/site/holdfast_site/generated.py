"""Pages that are generated from the code: public names, commands, and options of URIs."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from unittest.mock import patch

import holdfast
from holdfast.cli.app import WIDTH, command_parser
from holdfast.drivers.layers.stack import common_options
from holdfast.drivers.options import Option
from holdfast.drivers.registry import driver_class
from holdfast.drivers.schemes import SCHEMES

__all__ = ["api_page", "commands_page", "options_page", "subcommands"]

_SECTIONS = ("Functions", "A training run", "Classes", "Errors")
_TRAINING = ("Checkpointer", "Counters", "Keep", "Keeper", "Resumed")


def api_page() -> str:
    """Return a page with an autodoc directive for every name in ``holdfast.__all__``."""
    lines = [
        "# Every public name",
        "",
        "Generated from the code: signatures and docstrings of the public names.",
    ]
    for section in _SECTIONS:
        lines += ["", f"## {section}", ""]
        for name in holdfast.__all__:
            if _section_of(name) == section:
                lines += _directive(name)
    return "\n".join(lines) + "\n"


def _section_of(name: str) -> str:
    value = getattr(holdfast, name)
    if not inspect.isclass(value):
        return "Functions"
    if issubclass(value, BaseException):
        return "Errors"
    return "A training run" if name in _TRAINING else "Classes"


def _directive(name: str) -> Iterator[str]:
    is_class = inspect.isclass(getattr(holdfast, name))
    yield from (
        "",
        "```{eval-rst}",
        f".. auto{'class' if is_class else 'function'}:: holdfast.{name}",
    )
    if is_class:
        yield "   :members:"
        yield "   :show-inheritance:"
    yield "```"


def commands_page() -> str:
    """Return a page with each command's help and its arguments as tables."""
    lines = ["# Commands and their options", "", "Generated from the command-line parser."]
    with patch.dict("os.environ", {"COLUMNS": str(WIDTH)}):
        for name, parser in subcommands(command_parser()).items():
            lines += _section(name, parser)
    return "\n".join(lines) + "\n"


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command by name; nested commands have both names."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                found[name] = below
                found |= {f"{name} {inner}": one for inner, one in subcommands(below).items()}
    return found


def _section(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from ("", f"## holdfast {name}", "", "```text", parser.format_help().rstrip(), "```", "")
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if not isinstance(a, argparse._HelpAction)]
        if actions:
            rows = [_row(parser, action) for action in actions]
            yield from (f"**{group.title}**", "")
            yield from _table(("argument", "default", "meaning"), rows)
            yield ""


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str, str]:
    metavar = action.metavar or ("|".join(action.choices) if action.choices else "")
    if action.option_strings:
        name = ", ".join(action.option_strings)
        if action.nargs != 0:
            name += f" {metavar or action.dest.upper()}"
    else:
        name = str(metavar or action.dest)
    is_plain = action.default not in (None, False, [], argparse.SUPPRESS)
    default = _cell(str(action.default), code=True) if is_plain else ""
    meaning = (action.help or "") % {"default": action.default, "prog": parser.prog}
    return _cell(name, code=True), default, _cell(meaning)


def options_page() -> str:
    """Return a page with the options of each scheme, and the shared ones."""
    lines = [
        "# Options by scheme",
        "",
        "Generated from the drivers' declarations. `holdfast drivers URI` shows the values in use",
        "and their sources; `name=value` after the `?` of a URI sets one.",
    ]
    for scheme in SCHEMES:
        name = "fsspec+X" if scheme == "fsspec" else scheme
        lines += ["", f"## {name}://", "", *_options(driver_class(_uri_scheme(scheme)).OPTIONS)]
    for remote, title in ((True, "Every scheme behind a network"), (False, "Every other scheme")):
        lines += ["", f"## {title}", "", *_options(common_options(remote=remote))]
    return "\n".join(lines) + "\n"


def _uri_scheme(scheme: str) -> str:
    return "fsspec+memory" if scheme == "fsspec" else scheme


def _options(options: Mapping[str, Option]) -> Iterator[str]:
    if not options:
        yield "Only those that every scheme has."
        return
    rows = [
        (_cell(name, code=True), _default(option), _cell(option.help))
        for name, option in options.items()
    ]
    yield from _table(("option", "default", "meaning"), rows)


def _default(option: Option) -> str:
    if option.default is None or option.default == "":
        return ""
    return _cell(option.text(option.default), code=True)


_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\`*_{}[]<>|"})


def _cell(text: str, *, code: bool = False) -> str:
    """Return a text as a table cell: on one line, with special characters escaped."""
    line = " ".join(text.split())
    if code:
        return "`" + line.replace("|", "\\|") + "`" if line else ""
    return line.translate(_SPECIAL)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" * len(titles)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
