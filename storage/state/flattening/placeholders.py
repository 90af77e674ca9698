"""Finds placeholders: empty tensors in place of parameters that have elements.

Some frameworks keep the elements of parameters elsewhere, and leave tensors of shape (0,) behind. A
state dict of such a module looks normal, and its checkpoint would be complete, verified, and empty.
So a save fails if, on all ranks that have the tensors in question,

- the state has tensors, and not one of them has an element;
- a state dict has a weight of shape (0,), such as ``0.weight``;
- a parameter has no elements, and its optimizer has some for it;

unless the caller passes ``allow_empty=True``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....errors import StateError
from ...format.tree import format_path
from ..flat_state import FlatState

Placeholders = Mapping[str, str]
"""Reasons why a tensor or a part of a state looks like a placeholder, by path."""

_PLACEHOLDER = (0,)
_SHOWN = 8
"""Maximum number of reported parameters that are empty while their optimizer state is not."""


def find_placeholders(flat: FlatState) -> dict[str, str]:
    """Return the placeholders in ``flat`` as seen by this rank. Only names and shapes matter."""
    empty = [row for row, shape in enumerate(flat.shapes) if 0 in shape]
    if not empty:
        return {}
    found: dict[str, str] = {}
    if len(empty) == len(flat.names):
        found["the state"] = f"stores nothing: none of its tensors ({len(empty)}) has an element"
    prefixes = flat.tree.prefixes()
    placeholders = {
        row: flat.names[row].removeprefix(prefixes[flat.containers[row]])
        for row in empty
        if flat.shapes[row] == _PLACEHOLDER
    }
    found |= _without_weights(flat, placeholders)
    found |= _with_moments(flat, placeholders)
    return found


def refuse_placeholders(reported: Sequence[Placeholders | None]) -> None:
    """Raise StateError for a placeholder reported by every rank that has tensors.

    A rank without any reports None.
    """
    found = [of_rank for of_rank in reported if of_rank is not None]
    if not found:
        return
    on_all = set.intersection(*(set(of_rank) for of_rank in found))
    for path, reason in found[0].items():
        if path in on_all:
            raise StateError(
                f"{path} {reason}",
                advice="Its elements may be elsewhere: put DeepSpeed's engine itself, or the "
                "module wrapped by FSDP1, into the state. allow_empty=True saves it as it is.",
            )


def _without_weights(flat: FlatState, placeholders: Mapping[int, str]) -> dict[str, str]:
    """Return the state dicts whose weights have no elements.

    A tensor of shape (0,) that is merely empty is unlikely to be called weight.
    """
    weights: dict[int, list[str]] = {}
    for row, key in placeholders.items():
        if key.endswith(".weight"):
            weights.setdefault(flat.containers[row], []).append(key)
    paths = flat.tree.paths()
    return {
        format_path(paths[container]): f"has {len(keys)} weights of shape (0,), such as {keys[0]!r}"
        for container, keys in weights.items()
    }


def _with_moments(flat: FlatState, placeholders: Mapping[int, str]) -> dict[str, str]:
    """Return the empty parameters whose optimizer state, keyed by name, has elements."""
    by_key = {key: row for row, key in placeholders.items()}
    found: dict[str, str] = {}
    containers = flat.tree.containers
    for row, number in enumerate(flat.containers):
        entry = containers[number]
        if entry.key not in by_key or entry.parent < 0 or containers[entry.parent].key != "state":
            continue
        shape = flat.shapes[row]
        if shape and 0 not in shape:
            text = f"has no elements, but {flat.path(row)} has {list(shape)}"
            found.setdefault(flat.path(by_key[str(entry.key)]), text)
            if len(found) == _SHOWN:
                break
    return found
