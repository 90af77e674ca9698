"""Selects and renames tensors for conversion between formats. A ``*`` in a name stands for any
text. A selection includes everything below its names; rules match whole names. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from ....errors import UsageError
from ...format.part import Selection, names_in
from ..loading.renames import misspellings

T = TypeVar("T")

_NAMES_SHOWN = 5


def chosen(names: Iterable[str], only: Selection) -> list[str]:
    """Return the names in a selection. Raises UsageError if one of its names selects nothing."""
    known = list(names)
    patterns = names_in(only)
    if not patterns:
        return known
    found: set[str] = set()
    for pattern in patterns:
        matches = list(filter(_selector([pattern]).fullmatch, known))
        if not matches:
            questions = [f"{text[0].upper()}{text[1:]}" for text in misspellings([pattern], known)]
            rule = "A tuple has the keys of one name, a list several names; * stands for any text."
            raise UsageError(
                f"no tensor has a name like {pattern!r}", advice=" ".join([*questions, rule])
            )
        found.update(matches)
    return [name for name in known if name in found]


def _selector(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return a regex that matches the names of a selection, and all names below them."""
    either = "|".join(_regex(pattern).pattern for pattern in patterns)
    return re.compile(rf"(?:{either})(?:\..*)?", re.DOTALL)


def first_match(rules: Mapping[str, T], name: str) -> T | None:
    """Return the value of the first matching pattern, or None."""
    for pattern, found in rules.items():
        if _regex(pattern).fullmatch(name):
            return found
    return None


def without(names: Iterable[str], skip: Selection) -> list[str]:
    """Return the names outside a selection; all if it is empty."""
    patterns = names_in(skip)
    if not patterns:
        return list(names)
    return list(itertools.filterfalse(_selector(patterns).fullmatch, names))


def renamed(names: Sequence[str], rules: Mapping[str, str]) -> dict[str, str]:
    """Return the new name of each name: by the first matching rule, or unchanged. A rule maps a
    pattern to a replacement, whose n-th ``*`` stands for the text matched by the pattern's n-th
    ``*``. Raises UsageError for a rule that matches no name, and for colliding names."""
    compiled = [(_regex(pattern), pattern, new) for pattern, new in rules.items()]
    unused = dict.fromkeys(rules)
    found: dict[str, str] = {}
    for name in names:
        found[name] = name
        for regex, pattern, new in compiled:
            match = regex.fullmatch(name)
            if match is not None:
                unused.pop(pattern, None)
                found[name] = _filled(new, match.groups())
                break
    if unused:
        raise UsageError(
            f"no tensor has a name like {next(iter(unused))!r}, which is to be renamed"
        )
    _check_clashes(found)
    return found


def refuse_values(names: Iterable[str], only: Selection) -> None:
    """Raise UsageError if the selection includes non-tensors, which other formats cannot hold."""
    patterns = names_in(only)
    found = list(filter(_selector(patterns).fullmatch, names) if patterns else names)
    if not found:
        return
    shown = ", ".join(map(repr, found[:_NAMES_SHOWN]))
    if len(found) > _NAMES_SHOWN:
        shown += f" and {len(found) - _NAMES_SHOWN:,} more"
    raise UsageError(
        f"only tensors can be exported and imported, and these are not tensors: {shown}",
        advice="Choose tensors by their names, such as only='model'.",
    )


def rules_of(texts: Iterable[str]) -> dict[str, str]:
    """Parse rules given as ``OLD=NEW``. Raises UsageError."""
    rules: dict[str, str] = {}
    for text in texts:
        old, equals, new = text.partition("=")
        if not equals or not old or not new:
            raise UsageError(
                f"{text!r} is not a rule", advice="A rule is OLD=NEW, such as 'model.*=*'."
            )
        if old in rules:
            raise UsageError(f"two rules are for {old!r}")
        rules[old] = new
    for old, new in rules.items():
        if new.count("*") > old.count("*"):
            raise UsageError(f"the rule {old}={new} has more * in the new name than in the old one")
    return rules


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile("(.*?)".join(map(re.escape, pattern.split("*"))), re.DOTALL)


def _filled(new: str, parts: Sequence[str]) -> str:
    texts = new.split("*")
    filled = texts[0]
    for part, text in zip(parts, texts[1:], strict=False):
        filled += part + text
    return filled


def _check_clashes(found: Mapping[str, str]) -> None:
    by_new: dict[str, str] = {}
    for old, new in found.items():
        other = by_new.setdefault(new, old)
        if other != old:
            raise UsageError(
                f"{other!r} and {old!r} would both be named {new!r}",
                advice="Rename one of them, or choose fewer tensors.",
            )
