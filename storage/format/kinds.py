"""Kinds of dicts: what a dict of a state was when it was saved, where it was no plain one.

Only the kinds listed here are stored, by name; nothing stored decides which class is imported.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any

__all__ = ["as_kind", "kind_of", "like"]

_FACTORIES: tuple[type, ...] = (bool, dict, float, int, list, set, str, tuple)

_KINDS: dict[str, Callable[[Mapping[Any, Any]], dict[Any, Any]]] = {
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    "defaultdict": lambda items: defaultdict(None, items),
}
_KINDS.update(
    {f"defaultdict({factory.__name__})": partial(defaultdict, factory) for factory in _FACTORIES}
)


def kind_of(node: Mapping[Any, Any]) -> str | None:
    """The name of what ``node`` is beyond a dict; empty for a plain dict, None for a type that has
    no name here."""
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


def as_kind(kind: str, items: dict[Any, Any]) -> dict[Any, Any]:
    """A dict of the kind with this name. A name of a later release is no reason to refuse the rest:
    it stays a dict."""
    make = _KINDS.get(kind)
    return items if make is None else make(items)


def like(present: object, stored: Any) -> Any:
    """``stored``, with every plain dict made of the type that ``present`` has at the same place.

    For checkpoints in which kinds of dicts are not stored: the object that takes the state back
    knows what it had.
    """
    if type(stored) in (list, tuple):
        known = present if isinstance(present, list | tuple) else ()
        return type(stored)(like(a, b) for a, b in zip_longest(known[: len(stored)], stored))
    if not isinstance(stored, dict):
        return stored
    held = present if isinstance(present, Mapping) else {}
    for key, item in stored.items():
        stored[key] = like(held.get(key), item)
    if type(stored) is dict and isinstance(present, dict) and type(present) is not dict:
        return _refilled(present, stored)
    return stored


def _refilled(present: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """A dict of the type of ``present``, with these items. Only types that are known: others have
    rules of their own."""
    if isinstance(present, defaultdict):
        return defaultdict(present.default_factory, items)
    kind = kind_of(present)
    return as_kind(kind, items) if kind else items
