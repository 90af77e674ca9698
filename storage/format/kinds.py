"""Kinds of dicts: the type of each dict of a state that was not a plain dict when saved.

Only the kinds listed here are stored, by name. Stored data never decides which class is imported.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

_FACTORIES: tuple[type, ...] = (bool, dict, float, int, list, set, str, tuple)

K = TypeVar("K")
V = TypeVar("V")

# Values of a Counter in a state need not be ints, although Counter's own type says so.
_KINDS: dict[str, Callable[[], dict[Any, Any]]] = {
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    "defaultdict": defaultdict,
}
_KINDS.update(
    {f"defaultdict({factory.__name__})": partial(defaultdict, factory) for factory in _FACTORIES}
)


def kind_of(node: object) -> str | None:
    """Return the name of the kind of ``node``: empty for a plain dict, None for an unknown type."""
    if type(node) is dict:
        return ""
    if type(node) in (Counter, OrderedDict):
        return type(node).__name__
    if type(node) is defaultdict:
        if node.default_factory is None:
            return "defaultdict"
        if node.default_factory in _FACTORIES:
            return f"defaultdict({node.default_factory.__name__})"
    return None


def as_kind(kind: str, items: dict[K, V]) -> dict[K, V]:
    """Return a dict of the named kind.

    A kind added by a later release stays a plain dict, which is no reason to refuse the rest.
    """
    make = _KINDS.get(kind)
    if make is None:
        return items
    made: dict[K, V] = make()
    made.update(items)
    return made
