"""Small values as text. Values whose decoding needs torch, which imports slowly, stay encoded."""

from __future__ import annotations

import json
from typing import Any

from ..errors import DamagedError
from ..storage.format.tree import ByRank, Value
from ..storage.format.values import decode_value
from .text import printable, ranks_text

_CHARS_MAX = 60
_GROUPS_MAX = 3


def value_text(value: Value, world: int, *, whole: bool) -> str:
    """Return a value as text: ``0.1``; if ranks differ, ``0.1 (ranks 0–3); 0.2 (ranks 4–7)``. Cut
    it to one line unless ``whole`` is set."""
    groups = value.by_rank
    if len(groups) == 1 and len(set(groups[0][0])) == world:
        return _shortened(encoded_text(groups[0][1]), whole)
    return _groups_text(groups, whole)


def by_rank_text(groups: ByRank) -> str:
    """Return a value as one line of text, without knowing the number of ranks."""
    if len(groups) == 1:
        return _shortened(encoded_text(groups[0][1]), whole=False)
    return _groups_text(groups, whole=False)


def _groups_text(groups: ByRank, whole: bool) -> str:
    shown = groups
    if not whole:
        shown = groups[:_GROUPS_MAX]
    texts = [
        f"{_shortened(encoded_text(encoded), whole)} ({ranks_text(ranks)})"
        for ranks, encoded in shown
    ]
    rest = len(groups) - len(shown)
    if rest:
        texts.append(f"and {rest} more")
    return "; ".join(texts)


def encoded_text(encoded: Any) -> str:
    """Return an encoded value as Python would write it, or as JSON if its form is unknown."""
    if isinstance(encoded, dict) and len(encoded) == 1:
        ((name, content),) = encoded.items()
        if name == "$torch.dtype":
            return printable(f"torch.{content}")
        if name in ("$torch.device", "$torch.Size"):
            return printable(f"{name[1:]}({content!r})")
    try:
        value = decode_value(encoded)
    except DamagedError:
        value = None if encoded is None else json.dumps(encoded)
    try:
        return printable(repr(value))
    except ValueError:
        assert isinstance(value, int)  # it has more digits than Python converts
        return hex(value)


def _shortened(text: str, whole: bool) -> str:
    if whole or len(text) <= _CHARS_MAX:
        return text
    return f"{text[: _CHARS_MAX - 1]}… ({len(text):,} characters)"
