"""Parameter groups: finds the stored group for each parameter group of an optimizer.

Groups are matched by the names of their parameters, never by position, because a refactoring may
build them in another order. Pure, except for reading the optimizer's own lists.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

_OF_THE_JOB = ("params", "param_names")
"""Entries of a group that belong to the running job."""

_OF_SCHEDULERS = frozenset(
    ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
)
"""Entries that torch's schedulers add to a group."""


ParameterKey = Hashable
"""A parameter's identity in a checkpoint: its name, or its number in the optimizer."""


@dataclass
class StoredGroup:
    """A parameter group of a checkpoint.

    ``ranks``: by key (a name or a number) of each parameter, the ranks whose optimizer had it in
    this group. ``names``: the names by number, from torch's ``param_names``.
    """

    ranks: dict[ParameterKey, list[int]] = field(default_factory=dict)
    names: dict[ParameterKey, str] = field(default_factory=dict)


@dataclass
class Matched:
    """The result of matching an optimizer's groups with stored ones.

    ``keys``: the checkpoint key of a parameter, by id. ``hyperparameters``: one entry per group of
    the optimizer; None leaves the group as it is. ``new`` and ``conflicts``: mismatches, by group
    number.
    """

    keys: dict[int, ParameterKey] = field(default_factory=dict)
    hyperparameters: list[dict[str, object] | None] = field(default_factory=list)
    new: dict[int, str] = field(default_factory=dict)
    conflicts: dict[int, str] = field(default_factory=dict)


def match_groups(
    groups: Sequence[Sequence[object]],
    names: Mapping[int, Sequence[ParameterKey]],
    stored: Sequence[StoredGroup],
    rank: int,
    groups_of: Callable[[int], Sequence[Mapping[str, object]]],
) -> Matched:
    """Match the groups of an optimizer, each given by its parameters, with stored ones.

    ``names``: by id of each parameter, its possible keys in the checkpoint, most likely first.
    ``groups_of(rank)``: the groups that a rank saved, with their hyperparameters.
    """
    found = Matched()
    rank = _stands_for(stored, rank)
    held = _held(stored)
    sources: list[list[tuple[int, int]]] = []
    numbered = all(type(key) is int for group in stored for key in group.ranks)
    for number, group in enumerate(groups):
        places: dict[tuple[int, int], None] = {}
        missing = []
        for parameter in group:
            place = _place(names[id(parameter)], held, rank)
            if place is None:
                missing.append(names[id(parameter)][0])
                continue
            key, where = place
            found.keys[id(parameter)] = key
            places[where] = None
        if missing:
            found.new[number] = _said_of_new(number, missing, numbered)
        sources.append(list(places))
    _check_numbers(found, groups, stored, rank, numbered)
    empty = [number for number, group in enumerate(groups) if not group]
    _match_empty(sources, empty, stored, rank)
    for number, places_of in enumerate(sources):
        found.hyperparameters.append(_taken(found, number, places_of, groups_of))
    return found


def _stands_for(stored: Sequence[StoredGroup], rank: int) -> int:
    """Return the saving rank whose values ``rank`` gets: itself, or ``rank`` modulo their
    number."""
    saved = sorted({r for group in stored for ranks in group.ranks.values() for r in ranks})
    if rank in saved or not saved:
        return rank
    return saved[rank % len(saved)]


Held = dict[ParameterKey, list[tuple[int, list[int]]]]
"""By key of a parameter, the groups that contain it, each with the ranks that had it there."""


def _held(stored: Sequence[StoredGroup]) -> Held:
    held: Held = {}
    for number, group in enumerate(stored):
        for key, ranks in group.ranks.items():
            held.setdefault(key, []).append((number, ranks))
    return held


def _place(
    keys: Sequence[ParameterKey], held: Held, rank: int
) -> tuple[ParameterKey, tuple[int, int]] | None:
    """Return a parameter's stored key, the number of its group, and a rank that had it there.

    The rank is this one, if it saved the parameter at all.
    """
    for key in keys:
        places = held.get(key)
        if places:
            number, ranks = next((place for place in places if rank in place[1]), places[0])
            return key, (number, rank if rank in ranks else min(ranks))
    return None


def _said_of_new(number: int, missing: Sequence[ParameterKey], numbered: bool) -> str:
    shown = ", ".join(map(repr, missing[:5]))
    if len(missing) > 5:
        shown += ", …"
    hint = ""
    if type(missing[0]) is int and not numbered:
        hint = "; they are stored by name: put the module into the state too"
    elif type(missing[0]) is not int and numbered:
        hint = "; they are stored by number, without their module: load them without it"
    return f"parameter group {number}: no group of the checkpoint has the parameters {shown}{hint}"


def _check_numbers(
    found: Matched,
    groups: Sequence[Sequence[object]],
    stored: Sequence[StoredGroup],
    rank: int,
    numbered: bool,
) -> None:
    """Record a conflict if parameters are stored by number and the groups have changed size.

    Numbers identify parameters only while all groups are unchanged.
    """
    if not numbered or found.new or any(group.names for group in stored):
        return
    theirs = [sum(rank in ranks for ranks in group.ranks.values()) for group in stored]
    ours = list(map(len, groups))
    if theirs != ours:
        found.conflicts[0] = (
            f"parameters are stored by number, in groups of {theirs}; the optimizer's groups have "
            f"{ours} parameters"
        )


def _match_empty(
    sources: list[list[tuple[int, int]]], ours: list[int], stored: Sequence[StoredGroup], rank: int
) -> None:
    """Match groups without parameters, which have no names to match by.

    They match by position if all other groups are at their old positions; otherwise by order, if
    the checkpoint has equally many. Otherwise they stay as they are.
    """
    theirs = [number for number, group in enumerate(stored) if not group.ranks]
    in_place = all(where == number for number, places in enumerate(sources) for where, _ in places)
    if in_place and len(sources) == len(stored):
        theirs = ours
    if len(theirs) == len(ours):
        for number, where in zip(ours, theirs, strict=True):
            sources[number] = [(where, rank)]


def _taken(
    found: Matched,
    number: int,
    places: Sequence[tuple[int, int]],
    groups_of: Callable[[int], Sequence[Mapping[str, object]]],
) -> dict[str, object] | None:
    """Return the hyperparameters of the stored groups, recording a conflict if they differ."""
    taken: dict[str, object] | None = None
    for where, of_rank in places:
        groups = groups_of(of_rank)
        if where >= len(groups):
            continue
        given = {key: value for key, value in groups[where].items() if key not in _OF_THE_JOB}
        if taken is None:
            taken = given
            first = where
            continue
        differing = sorted(
            str(key)
            for key in taken.keys() | given.keys()
            if not _same(taken.get(key), given.get(key), where == first)
        )
        if differing:
            found.conflicts[number] = (
                f"parameter group {number} has parameters of groups {first} and {where} of the "
                f"checkpoint, which differ "
                f"in {', '.join(differing)}"
            )
    return taken


def _same(a: object, b: object, one_group: bool) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return one_group  # not read yet
    return repr(a) == repr(b)


def differing_kind(
    optimizer: torch.optim.Optimizer, taken: Sequence[Mapping[str, object] | None]
) -> str | None:
    """Return evidence that the checkpoint is of another kind of optimizer (AdamW, SGD); else None.

    Extra or missing hyperparameters alone prove nothing: releases of torch and users add some.
    """
    stored = {key for group in taken if group is not None for key in group}
    known = (
        {key for group in optimizer.param_groups for key in group}
        | optimizer.defaults.keys()
        | _OF_SCHEDULERS
    )
    extra = sorted(map(str, stored - known))
    absent = sorted(map(str, optimizer.defaults.keys() - stored))
    if not stored or not extra or not absent:
        return None
    return (
        f"the checkpoint is of another kind of optimizer: it has {', '.join(extra)}, "
        f"and {type(optimizer).__name__} has {', '.join(absent)}"
    )
