"""Conversion of objects in a trainer's checkpoint, other than tensors and small values, by value.

The dicts that trainers save already hold the states of their objects, and occasionally a namespace
of arguments, a path or a set. These are stored as dicts that name their type, and converted back
when loaded. An object with a state of its own would come back as a dict, so it is refused. Anything
else is passed on to the save, which refuses values that have no codec.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

from ...errors import DamagedError, StateError
from ..format.tree import Key, format_path
from ..state.adapters.stateful import has_state

__all__ = ["from_stored", "to_stored"]

_TYPE = "holdfast.type"
_VALUE = "value"
_DEPTH_MAX = 200
"""The save refuses deeper nesting."""


@dataclass(frozen=True, slots=True)
class _Form:
    """The stored form of a type: its name there, and the conversions."""

    name: str
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


_FORMS: dict[type, _Form] = {
    Namespace: _Form("argparse.Namespace", vars, lambda value: Namespace(**value)),
    SimpleNamespace: _Form("types.SimpleNamespace", vars, lambda value: SimpleNamespace(**value)),
    PurePath: _Form("pathlib.Path", str, Path),
    set: _Form("set", list, set),
    frozenset: _Form("frozenset", list, frozenset),
}
_BY_NAME = {form.name: form for form in _FORMS.values()}


def to_stored(value: object, keys: tuple[Key, ...] = ()) -> Any:
    """Convert ``value``, which is at ``keys`` of a state, into a form that Holdfast can save.

    Raises StateError for an object with a state.
    """
    if has_state(value):
        raise StateError(
            f"{format_path(keys)} is a {type(value).__name__}, and would come back as a dict",
            advice="Save its state_dict(), or leave it out: a load cannot rebuild it.",
        )
    if len(keys) > _DEPTH_MAX:
        return value
    # A value of a derived type may be more than its value. Paths all mean the same.
    form = _FORMS.get(PurePath if isinstance(value, PurePath) else type(value))
    if form is not None:
        return {_TYPE: form.name, _VALUE: to_stored(form.encode(value), keys)}
    return _with_items(value, lambda key, item: to_stored(item, (*keys, key)))


def from_stored(value: object) -> Any:
    """Invert :func:`to_stored`. Raises DamagedError for a form that it never produces."""
    value = _with_items(value, lambda _, item: from_stored(item))
    if not isinstance(value, Mapping) or _TYPE not in value:
        return value
    try:
        return _BY_NAME[value[_TYPE]].decode(value[_VALUE])
    except (KeyError, TypeError) as error:
        raise DamagedError(f"a stored value is not of a known form: {value!r:.200}") from error


def _with_items(value: object, function: Callable[[Key, object], object]) -> object:
    """Return ``value`` with ``function(key, item)`` for each item, if it is a container.

    Returns ``value`` itself if nothing changes, so that it keeps its type.
    """
    if isinstance(value, Mapping):
        made = {key: function(key, item) for key, item in value.items()}
        same = all(made[key] is item for key, item in value.items())
        return value if same else made
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [function(key, item) for key, item in enumerate(value)]
        same = all(new is item for new, item in zip(items, value, strict=True))
        return value if same else type(value)(items)
    return value
