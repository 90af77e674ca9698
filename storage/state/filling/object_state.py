"""Builds the stored state of an object that is not filled in place, in the form the object
expects."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...format.manifest import Manifest
from ...format.tree import Key, Tree, Value, dotted, format_path
from ...format.values import decode_value
from ..adapters.composite import with_present
from ..adapters.deepspeed import zero_of
from ..adapters.module_names import Walked
from ..adapters.objects import StoredDtypes, object_allocator
from ..adapters.optimizer import (
    StoredOptimizer,
    entries_with_present,
    group_allocator,
    has_own_form,
    optimizer_allocator,
    optimizer_parameters,
    stepped,
)
from ..adapters.parameter_groups import StoredGroup, differing_kind, match_groups
from ..adapters.per_rank import OF_RANKS, RANKS, PerRank, is_of_ranks
from ..adapters.stateful import RNGState, has_state
from ..flat_state import Subtree
from .build import build
from .targets import TypedPath, Wanted, typed, typed_paths, value_paths


@dataclass
class ObjectState:
    """A built state, and the rows of the checkpoint that it uses.

    By name, with a text for people: ``missing`` is in the object but not in the checkpoint;
    ``mismatched`` cannot be given back; ``dealt`` is redistributed although no rule says how.
    """

    state: object
    rows: set[int]
    missing: dict[str, str] = field(default_factory=dict)
    mismatched: dict[str, str] = field(default_factory=dict)
    dealt: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """A checkpoint, and the rank of ``world`` that loads it.

    ``wanted`` collects the tensors to fill. ``stored_dtypes``: with ``cast=True``, see
    :func:`..adapters.objects.kept_entry`.
    """

    manifest: Manifest
    rank: int
    world: int
    wanted: Wanted
    stored_dtypes: StoredDtypes | None = None


def build_object_state(
    subtree: Subtree, modules: Sequence[Walked], source: Source, path: TypedPath
) -> ObjectState:
    """Build the state at ``path`` for the object of ``subtree``.

    Its tensors are still empty, and are added to ``source.wanted``. Raises KeyError if nothing is
    stored there.
    """
    restored = _restored(subtree, modules, source, path)
    if not restored.mismatched and not _takes(subtree.owner, restored.state):
        keys = [key for _, key in path]
        restored.mismatched[dotted(keys)] = (
            f"{format_path(keys)}: {_typed(restored.state)} in the checkpoint, which is not the "
            f"state of {_typed(subtree.owner)}"
        )
    return restored


def _typed(value: object) -> str:
    return f"an object of type {type(value).__name__}"


def _restored(
    subtree: Subtree, modules: Sequence[Walked], source: Source, path: TypedPath
) -> ObjectState:
    owner = subtree.owner
    if isinstance(owner, torch.optim.Optimizer) and subtree.present is None:
        return _optimizer(stepped(owner), modules, source, path)
    zero = zero_of(owner)
    if zero is not None:
        with zero.in_groups():
            return _optimizer(zero.base, modules, source, path)
    if isinstance(owner, PerRank):
        return _per_rank(source, path)
    make = None
    if subtree.present is not None:
        make = object_allocator(owner, subtree.present, modules, source.stored_dtypes)
    state, rows = build(source.manifest, source.rank, source.wanted, path, make)
    restored = ObjectState(state, rows)
    if subtree.present is not None:
        keys = tuple(key for _, key in path)
        restored.state = with_present(restored.state, subtree.present, keys, restored.mismatched)
    if not isinstance(owner, RNGState) and hasattr(owner, "state_dict"):
        restored.dealt = _dealt(source, path)
    return restored


def _optimizer(
    optimizer: torch.optim.Optimizer, modules: Sequence[Walked], source: Source, path: TypedPath
) -> ObjectState:
    m = source.manifest
    rank = source.rank
    wanted = source.wanted
    stored = _stored_groups(m, path)
    if stored is None:
        state, rows = build(m, rank, wanted, path)
        return ObjectState(state, rows)

    taken = set[int]()
    make_group = group_allocator(optimizer)

    @functools.cache
    def groups_of(of_rank: int) -> Sequence[Mapping[str, object]]:
        groups, rows = build(m, of_rank, wanted, (*path, *_GROUPS), make_group)
        taken.update(rows)
        return groups if isinstance(groups, list) else []

    groups_of(rank)  # also groups without a parameter of this rank
    parameters = optimizer_parameters(optimizer, modules, stored)
    matched = match_groups(parameters.groups, parameters.keys, stored, rank, groups_of)
    misshapen: dict[str, str] = {}
    make = optimizer_allocator(
        optimizer, parameters, matched, stored, source.stored_dtypes, misshapen
    )
    state, rows = build(m, rank, wanted, path, make)
    assert isinstance(state, dict)  # it has groups
    del state["param_groups"]
    entries = state.pop("state", {})
    keys = [key for _, key in path]
    where = format_path(keys)
    if not isinstance(entries, Mapping):
        text = f"{where}: {_typed(entries)} in the checkpoint, instead of the state of parameters"
        return ObjectState(state, rows, mismatched={dotted(keys): text})
    problems = {}
    for below, text in misshapen.items():
        name = dotted([*keys, below])
        problems[name] = f"{name}: {text}"
    entries = entries_with_present(optimizer, parameters, matched, entries, keys, problems)
    restored = ObjectState(
        StoredOptimizer(entries, state, stored, matched, parameters),
        rows | taken,
        mismatched=problems,
    )
    name = dotted([*keys, "param_groups"])
    for number, text in matched.conflicts.items():
        restored.mismatched[f"{name}.{number}"] = f"{where}: {text}"
    for number, text in matched.new.items():
        restored.missing[f"{name}.{number}"] = f"{where}: {text}"
    other_kind = differing_kind(optimizer, matched.hyperparameters)
    if other_kind:
        restored.missing[name] = f"{where}: {other_kind}"
    return restored


_GROUPS = (typed("param_groups"),)


def _stored_groups(m: Manifest, path: TypedPath) -> list[StoredGroup] | None:
    """Return the optimizer's parameter groups at ``path``, with the parameters of all ranks.

    None if there are no groups.
    """
    base = (*path, *_GROUPS)
    below = {
        c: [key for _, key in keys[len(base) :]]
        for c, keys in enumerate(typed_paths(m.tree))
        if keys[: len(base)] == base
    }
    if not below:
        return None
    groups: dict[int, StoredGroup] = {}
    lists: dict[int, tuple[int, str]] = {}  # container -> (number of the group, name of the list)
    for c, keys in below.items():
        number = keys[0] if keys else None
        if type(number) is int and len(keys) == 1:
            groups[number] = StoredGroup()
        elif type(number) is int and len(keys) == 2 and keys[1] in ("params", "param_names"):
            lists[c] = (number, str(keys[1]))
    names: dict[tuple[int, Key, int], str] = {}  # by (group, index in the list, rank)
    for number, value in _listed(m.tree, lists, "param_names"):
        for ranks, encoded in value.by_rank:
            text = str(decode_value(encoded))
            names.update(((number, value.key, rank), text) for rank in ranks)
    for number, value in _listed(m.tree, lists, "params"):
        for ranks, encoded in value.by_rank:
            key = decode_value(encoded)
            groups[number].ranks.setdefault(key, []).extend(ranks)
            name = names.get((number, value.key, ranks[0]))
            if name is not None:
                groups[number].names[key] = name
    return [groups[number] for number in sorted(groups)]


def _listed(
    tree: Tree, lists: Mapping[int, tuple[int, str]], which: str
) -> Iterator[tuple[int, Value]]:
    """Yield the values in the lists called ``which``, each with the number of its group."""
    for value in tree.values:
        number, listed = lists.get(value.container, (-1, ""))
        if listed == which:
            yield number, value


def _per_rank(source: Source, path: TypedPath) -> ObjectState:
    """Build the state of a PerRank: of all saving ranks, or of this one only if as many load.

    State saved without a PerRank counts as the own part of each rank.
    """
    m = source.manifest
    by_path = dict(zip(value_paths(m.tree), m.tree.values, strict=True))
    saved = by_path.get((*path, typed(RANKS)))
    if saved is not None and (*path, typed(OF_RANKS)) in typed_paths(m.tree):
        if saved.of(source.rank) == source.world:
            own = _own_part(source, path)
            if own is not None:
                return own
        state, rows = build(m, source.rank, source.wanted, path)
        if is_of_ranks(state):
            return ObjectState(state, rows)
    ranks: Sequence[int] = [source.rank]
    if m.world != source.world:
        ranks = range(m.world)
    rows = set[int]()
    states = {}
    for rank in ranks:
        states[str(rank)], used = build(m, rank, source.wanted, path)
        rows |= used
    return ObjectState({RANKS: m.world, OF_RANKS: states}, rows)


def _own_part(source: Source, path: TypedPath) -> ObjectState | None:
    """Return what this rank saved in a PerRank; None if it saved nothing."""
    rank = str(source.rank)
    own = (*path, typed(OF_RANKS), typed(rank))
    try:
        state, rows = build(source.manifest, source.rank, source.wanted, own)
    except KeyError:
        return None
    return ObjectState({RANKS: source.world, OF_RANKS: {rank: state}}, rows)


def _dealt(source: Source, path: TypedPath) -> dict[str, str]:
    """Return a warning if the saving ranks' states differ and another number of ranks loads
    them."""
    m = source.manifest
    if m.world == source.world or not _differs(m, path):
        return {}
    keys = [key for _, key in path]
    text = (
        f"{format_path(keys)}: each of {m.world} ranks saved its own state, but {source.world} "
        f"ranks load it; to choose who gets what, pass holdfast.PerRank(object, rule) in the "
        f"state to load"
    )
    return {dotted(keys): text}


def _differs(m: Manifest, path: TypedPath) -> bool:
    """Return whether an object's values, items or own tensors differ between the saving ranks."""
    inside = [keys[: len(path)] == path for keys in typed_paths(m.tree)]
    owned = m.tensors.owner >= 0
    if any(inside[c] for c in m.container[owned].tolist()):
        return True
    values = [v.by_rank for v in m.tree.values if inside[v.container]]
    ranks = {frozenset(of) for by_rank in values for of, _ in by_rank}
    return len(ranks) > 1


def _takes(value: object, state: object) -> bool:
    """Return whether ``value``, an object with a state, accepts ``state``.

    The check runs before anything is filled: the state's tensors exist, but have no contents yet.
    An object with its own ``load_state_dict`` decides itself which dicts it accepts.
    """
    if isinstance(value, torch.Generator):
        return _is_like(state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return _takes_numpy(state)
    if isinstance(value, np.random.Generator):
        assign = functools.partial(setattr, type(value.bit_generator)(), "state")
        return isinstance(state, Mapping) and _runs(assign, state)
    if isinstance(value, random.Random):
        return _takes_python(state)
    if isinstance(value, torch.optim.Optimizer):
        return _takes_optimizer(value, state)
    zero = zero_of(value)
    if zero is not None:
        return _takes_optimizer(zero.base, state)
    if isinstance(value, RNGState):
        return _takes_global(state)
    if isinstance(value, PerRank):
        return _takes_of_ranks(value, state)
    return isinstance(state, Mapping)


def _takes_optimizer(optimizer: torch.optim.Optimizer, state: object) -> bool:
    if not isinstance(state, StoredOptimizer):
        return isinstance(state, Mapping) and has_own_form(optimizer)
    of_parameters = {key for group in state.stored for key in group.ranks}
    return all(isinstance(state.entries.get(key, {}), Mapping) for key in of_parameters)


def _takes_global(state: object) -> bool:
    return (
        isinstance(state, Mapping)
        and isinstance(state.get("cuda"), list)
        and _is_like(state.get("torch"), torch.get_rng_state())
        and _takes_numpy(state.get("numpy"))
        and _takes_python(state.get("python"))
    )


def _takes_of_ranks(value: PerRank, state: object) -> bool:
    if not isinstance(state, Mapping):
        return False
    if callable(value.rule) or not has_state(value.value):
        return True
    return all(_takes(value.value, each) for each in state[OF_RANKS].values())


def _is_like(state: object, present: torch.Tensor) -> bool:
    return (
        isinstance(state, torch.Tensor)
        and state.dtype == present.dtype
        and state.shape == present.shape
    )


def _takes_numpy(state: object) -> bool:
    return isinstance(state, list | tuple) and _runs(
        np.random.RandomState().set_state, tuple(state)
    )


def _takes_python(state: object) -> bool:
    if not isinstance(state, list | tuple) or len(state) != 3:
        return False
    version, words, gauss = state
    if isinstance(words, np.ndarray):
        words = np.zeros_like(words)  # not read yet, and the last word must be a small number
    elif not isinstance(words, list | tuple):
        return False
    return _runs(random.Random().setstate, (version, tuple(map(int, words)), gauss))


def _runs(function: Callable[[Any], None], state: Any) -> bool:
    """Return whether a throwaway object of the same kind accepts ``state``."""
    try:
        function(state)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):
        return False
    return True
