"""Kinds of dicts: the type of each dict of a state that was not a plain dict when saved.

Only the kinds listed here are stored, by name. Stored data never decides which class is imported.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
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


def like(present: object, stored: object) -> object:
    """Return ``stored``, with plain dicts converted to the type that ``present`` has in their
    place.

    For checkpoints that do not store kinds of dicts: the object being restored knows what it had.
    """
    if type(stored) is list or type(stored) is tuple:
        if isinstance(present, list | tuple):
            present_items = present[: len(stored)]
        else:
            present_items = ()
        pairs = zip_longest(present_items, stored)
        return type(stored)(like(here, item) for here, item in pairs)
    if not isinstance(stored, dict):
        return stored
    by_key: Mapping[object, object] = {}
    if isinstance(present, Mapping):
        by_key = present
    for key, item in stored.items():
        stored[key] = like(by_key.get(key), item)
    if type(stored) is dict and isinstance(present, dict) and type(present) is not dict:
        return _refilled(present, stored)
    return stored


def _refilled(present: object, items: dict[K, V]) -> dict[K, V]:
    """Return a dict of the type of ``present`` with these items; a plain dict if that type is
    unknown, since it may have rules of its own."""
    if isinstance(present, defaultdict):
        return defaultdict(present.default_factory, items)
    kind = kind_of(present)
    if not kind:
        return items
    return as_kind(kind, items)
