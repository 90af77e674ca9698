"""Optimizers: their state by parameter names, so that it fits any job with those parameters.

The saved form equals that of torch's ``get_optimizer_state_dict``. A load does not depend on the
optimizer's present state, which a new one does not have: the stored entries determine the tensors,
and each is created like the parameter it belongs to.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypedDict, TypeGuard, cast
from weakref import WeakSet

import torch
from torch.distributed.tensor import DTensor

from ....errors import StateError
from ..compat import plain_state_dict
from .allocation import Allocate, Entry, empty_for, fits, fitting, value_at
from .composite import with_present
from .exact_dtypes import exact_values
from .flat_parts import FlatPart, FlatStates, joined
from .module_names import Walked
from .objects import Held, StoredDtypes, kept_entry
from .parameter_groups import Matched, ParameterKey, StoredGroup
from .shards import Shard


class _PackedGroup(TypedDict):
    """A packed parameter group; it also contains hyperparameters."""

    params: list[int]


class _Packed(TypedDict):
    """A state dict in torch's form, possibly with more keys."""

    state: Mapping[object, object]
    param_groups: list[_PackedGroup]


_log = logging.getLogger(__name__)
_warned: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Optimizers whose orphans have been reported."""


@dataclass(frozen=True)
class OptimizerParameters:
    """The parameters of an optimizer, as a checkpoint has them.

    ``by_owner``: by id of a parameter of the optimizer, the parameters contained in it, unless it
    is just itself. ``keys``: possible keys of each in the checkpoint, by id. ``orphans``:
    parameters that are in no module of the state while the others have names, as texts for people.
    """

    groups: list[list[Held]]
    by_owner: Mapping[int, list[FlatPart]]
    keys: Mapping[int, list[ParameterKey]]
    orphans: Sequence[str] = ()

    def held_in(self, owner: torch.Tensor) -> Sequence[Held]:
        """Return the parameters contained in ``owner``, a parameter of the optimizer."""
        return self.by_owner.get(id(owner), [owner])


@dataclass(frozen=True)
class StoredOptimizer:
    """The state of an optimizer, built from a checkpoint, and its match with the loading optimizer.

    ``entries``: the state by parameter key. ``rest``: everything else stored, except groups.
    ``stored``: the groups of the checkpoint.
    """

    entries: Mapping[object, object]
    rest: Mapping[str, object]
    stored: list[StoredGroup]
    matched: Matched
    parameters: OptimizerParameters


def optimizer_state(
    optimizer: torch.optim.Optimizer, modules: Iterable[Walked], path: str = "the optimizer"
) -> dict[str, object]:
    """Return state and hyperparameters, by fqn if one of ``modules`` has all parameters.

    Otherwise they are keyed by torch's numbering. Parameters that no module has (orphans) keep
    their numbers, with a warning.

    The form equals that of torch's ``get_optimizer_state_dict``, except that an optimizer without a
    step has no state and gets none: torch's helper would take a step to create some. Anything an
    optimizer keeps besides the state of its parameters is taken as it is. Raises StateError for
    entries that cannot be named.
    """
    refuse_unknown(optimizer, path)
    optimizer = stepped(optimizer)
    named = _named_by_module(optimizer, modules)
    _check_states(optimizer, path)
    packed = plain_state_dict(optimizer)
    if named is None or not _is_usual(packed):
        return packed
    if named.orphans and optimizer not in _warned:
        _warned.add(optimizer)
        _log.warning("%s: %s", type(optimizer).__name__, _said_of_orphans(named.orphans))
    owners = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    held = {
        number: [(named.keys[id(p)][0], p) for p in named.held_in(owner)]
        for number, owner in enumerate(owners)
    }
    state: dict[object, object] = {}
    for key, entry in packed["state"].items():
        entries = [(key, entry)]
        if type(key) is int and key in held:
            entries = [(name, _entry_of(p, entry, path)) for name, p in held[key]]
        for name, own in entries:
            if name in state:
                raise StateError(
                    f'{path}["state"] has two entries that would both be named {name!r}'
                )
            state[name] = own
    groups = [
        {**group, "params": [name for number in group["params"] for name, _ in held[number]]}
        for group in packed["param_groups"]
    ]
    return {**packed, "state": state, "param_groups": groups}


def _said_of_orphans(orphans: Sequence[str]) -> str:
    shown = ", ".join(orphans[:5])
    if len(orphans) > 5:
        shown += f" and {len(orphans) - 5} more"
    return (
        f"{shown}: in no module of the state. Their optimizer state is stored by number, that of "
        f"all other parameters by name. If a layer was replaced after the optimizer was created, "
        f"the optimizer does not train the new layer: create it again, and load with strict=False"
    )


def _entry_of(parameter: Held, entry: object, path: str) -> object:
    """Return the part of its owner's entry that belongs to ``parameter``."""
    if isinstance(parameter, FlatPart):
        return parameter.state(entry, f'{path}["state"]["{parameter.names[0]}"]')
    return entry


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that holds the state.

    That is the inner one of a ZeroRedundancyOptimizer, which steps this rank's parameters; any
    other optimizer is returned itself.
    """
    if _is_redundancy_free(optimizer):
        return cast(torch.optim.Optimizer, vars(optimizer)["optim"])
    return optimizer


def _is_redundancy_free(optimizer: torch.optim.Optimizer) -> bool:
    # Checked by name: importing the class compiles functions, which takes seconds.
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


def refuse_unknown(optimizer: torch.optim.Optimizer, path: str) -> None:
    """Raise StateError for optimizers whose state cannot be taken from this rank."""
    if _is_redundancy_free(optimizer) and not isinstance(
        vars(optimizer).get("optim"), torch.optim.Optimizer
    ):
        raise StateError(
            f"{path} is a ZeroRedundancyOptimizer that steps during the backward pass of "
            f"DistributedDataParallel, with an inner optimizer that has no state dict",
            advice="Create it without overlap_with_ddp.",
        )


def present_layout(optimizer: torch.optim.Optimizer) -> dict[str, object] | None:
    """Return the state dict of an optimizer with a custom form, such as flat names; else None.

    Optimizers of torch's form are not asked: a new one has no state, and the stored state
    determines the entries.
    """
    optimizer = stepped(optimizer)
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return None
    packed = plain_state_dict(optimizer)
    if _is_usual(packed):
        return None
    return packed


def has_own_form(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's state dict may have a custom form."""
    try:
        return present_layout(optimizer) is not None
    except Exception:  # the user's code: it may have no state before it is loaded
        return True


def _is_usual(packed: Mapping[str, object]) -> TypeGuard[_Packed]:
    return isinstance(packed.get("state"), Mapping) and isinstance(packed.get("param_groups"), list)


def _check_states(optimizer: torch.optim.Optimizer, path: str) -> None:
    """Raise StateError for a state that torch's ``state_dict`` cannot name, or would lose."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    known = {id(p) for p in every}
    for key in optimizer.state:
        if isinstance(key, torch.Tensor):
            if id(key) not in known:
                raise StateError(
                    f"{path} has a state for a tensor of shape {tuple(key.shape)} that is in none "
                    f"of its parameter groups",
                    advice="Delete it from optimizer.state, or add the tensor to a group.",
                )
        elif type(key) is int and 0 <= key < len(every):
            raise StateError(
                f"{path}: optimizer.state has the key {key}, which is also the number of a "
                f"parameter",
                advice="Use a string as the key of a state that belongs to no parameter.",
            )


def optimizer_allocator(
    optimizer: torch.optim.Optimizer,
    held: OptimizerParameters,
    matched: Matched,
    stored: Iterable[StoredGroup],
    stored_dtypes: StoredDtypes | None,
    problems: dict[str, str],
) -> Allocate:
    """Return a function that allocates tensors of this optimizer's state.

    Existing tensors are reused if they fit; new ones are created like their parameter.
    ``stored_dtypes``: see :func:`.objects.kept_entry`. Moments whose shape differs from their
    parameter's are added to ``problems``, by name.
    """
    parameters = _by_key(held, matched)
    of_parameters = {key for group in stored for key in group.ranks}
    state = cast(Mapping[object, object], optimizer.state)  # not all keys are tensors
    flat = FlatStates(state)

    def make(entry: Entry) -> torch.Tensor | Shard | None:
        if entry.keys[0] == "param_groups":
            return None  # allocated by group_allocator
        if entry.keys[0] != "state" or len(entry.keys) == 1:
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        key = entry.keys[1]
        parameter = parameters.get(key)
        if parameter is None and key in of_parameters:
            return None
        holder: object = parameter
        if parameter is None:
            holder = key
        elif isinstance(parameter, FlatPart):
            holder = parameter.owner
        present = value_at(state.get(holder), entry.keys[2:])
        entry = kept_entry(entry, present, parameter, stored_dtypes)
        if isinstance(parameter, FlatPart):
            return flat.tensor(parameter, entry)
        if parameter is not None and _is_misshapen(optimizer, parameter, present, entry):
            problems[".".join(map(str, entry.keys))] = (
                f"shape {list(entry.shape)} in the checkpoint, of a parameter of shape "
                f"{list(parameter.shape)}"
            )
        return _filled(optimizer, parameter, present, entry)

    return make


def _filled(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor | None, present: object, entry: Entry
) -> torch.Tensor | Shard:
    if isinstance(present, Shard):
        return fitting(present, entry)
    if fits(present, entry):
        return present.detach()
    every = (p for group in optimizer.param_groups for p in group["params"])
    reference = next(every, None) if parameter is None else parameter
    if isinstance(present, torch.Tensor) and present.ndim:
        reference = present
    if reference is None or (
        entry.keys[-1] == "step" and not entry.shape
    ):  # torch keeps steps on the CPU
        return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    return empty_for(reference, entry)


_MOMENTS = frozenset((
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "grad_avg",
    "acc_delta", "exp_inf", "ax", "prev", "step_size",
))  # fmt: skip
"""State that optimizers of torch keep in the shape of the parameter."""


def _is_misshapen(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, present: object, entry: Entry
) -> bool:
    """Return whether ``entry`` is a moment whose shape differs from its parameter's.

    Moments are those of torch's optimizers, and tensors that the optimizer already has in the shape
    of ``parameter``.
    """
    shape = tuple(parameter.shape)
    shapes = [shape, ()]
    if isinstance(parameter, DTensor):
        shapes.append(tuple(parameter.to_local().shape))
    if entry.own or len(entry.keys) != 3 or entry.shape in shapes:
        return False
    kind = type(optimizer)
    usual = torch.optim.Optimizer
    if kind.load_state_dict is not usual.load_state_dict or kind.state_dict is not usual.state_dict:
        return False  # its code may use any shape
    if isinstance(present, torch.Tensor):
        return tuple(present.shape) == shape
    source = str(getattr(kind.step, "__module__", ""))
    return entry.keys[-1] in _MOMENTS and source.startswith("torch.optim.")


def _by_key(held: OptimizerParameters, matched: Matched) -> dict[ParameterKey, Held]:
    return {matched.keys[id(p)]: p for group in held.groups for p in group if id(p) in matched.keys}


def entries_with_present(
    optimizer: torch.optim.Optimizer,
    held: OptimizerParameters,
    matched: Matched,
    entries: Mapping[object, object],
    keys: Sequence[object],
    problems: dict[str, str],
) -> dict[object, object]:
    """Return ``entries`` of a built state, with the optimizer's composite tensors filled in.

    See :func:`.composite.with_present`. ``keys`` lead to the optimizer.
    """
    parameters = _by_key(held, matched)
    state = cast(Mapping[object, object], optimizer.state)
    return {
        key: with_present(
            entry, state.get(parameters.get(key, key)), (*keys, "state", key), problems
        )
        for key, entry in entries.items()
    }


def group_allocator(optimizer: torch.optim.Optimizer) -> Allocate:
    """Return a function that allocates hyperparameters stored as tensors, such as learning rates.

    They are allocated on the device of the present ones.
    """

    def make(entry: Entry) -> torch.Tensor:
        device = torch.device("cpu")
        for group in optimizer.param_groups:
            present = value_at(group, entry.keys[1:])
            if isinstance(present, torch.Tensor) and not present.is_meta:
                device = present.device
                break
        return torch.empty(entry.shape, dtype=entry.dtype, device=device)

    return make


def load_optimizer(
    optimizer: torch.optim.Optimizer, given: StoredOptimizer | Mapping[str, object]
) -> None:
    """Restore the optimizer's stored state, bit for bit, without changing its groups'
    parameters."""
    inner = stepped(optimizer)
    _load_stepped(inner, given)
    if inner is not optimizer:  # the outer one passes its groups' hyperparameters down in each step
        for group, loaded in zip(optimizer.param_groups, inner.param_groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})


def _load_stepped(
    optimizer: torch.optim.Optimizer, given: StoredOptimizer | Mapping[str, object]
) -> None:
    if not isinstance(given, StoredOptimizer):
        with exact_values(optimizer):
            optimizer.load_state_dict(dict(given))
        return
    every = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
    number = {id(p): i for i, p in enumerate(every)}
    of_parameters = {key for group in given.stored for key in group.ranks}
    state = {key: entry for key, entry in given.entries.items() if key not in of_parameters}
    for p in every:
        parts = given.parameters.held_in(p)
        if all(isinstance(part, FlatPart) and part.is_absent for part in parts):
            continue
        keys = [given.matched.keys.get(id(part)) for part in parts]
        entries = [given.entries[key] for key in keys if key is not None and key in given.entries]
        if entries and id(p) in given.parameters.by_owner:
            unit = given.parameters.by_owner[id(p)][0].unit
            state[number[id(p)]] = joined(entries, unit, f"the state of {keys[0]!r} and others")
        elif entries:
            state[number[id(p)]] = entries[0]
    groups = [
        {**group, **(taken or {}), "params": [number[id(p)] for p in group["params"]]}
        for group, taken in zip(optimizer.param_groups, given.matched.hyperparameters, strict=True)
    ]
    plain = any(isinstance(p, torch.Tensor) and p.is_inference() for p in every)
    with exact_values(optimizer), torch.inference_mode(plain):
        optimizer.load_state_dict({**given.rest, "state": state, "param_groups": groups})


def optimizer_parameters(
    optimizer: torch.optim.Optimizer, modules: Iterable[Walked], stored: Iterable[StoredGroup]
) -> OptimizerParameters:
    """Return the parameters of ``optimizer``, with their possible keys in a stored state.

    These are fqns; or torch's numbers, unless ``param_names`` on both sides reveals a parameter's
    former number.
    """
    stored = list(stored)
    named = _named_by_module(optimizer, modules)
    are_numbered = all(type(key) is int for group in stored for key in group.ranks)
    if named is not None and not (named.orphans and are_numbered):
        return named
    number_of = {name: number for group in stored for number, name in group.names.items()}
    keys: dict[int, list[ParameterKey]] = {}
    for group in optimizer.param_groups:
        names = group.get("param_names") or [None] * len(group["params"])
        for p, name in zip(group["params"], names, strict=True):
            if name is None:
                keys.setdefault(id(p), [len(keys)])
            elif number_of:
                keys.setdefault(id(p), [number_of.get(name, name)])
            else:
                keys.setdefault(id(p), [name, len(keys)])
    return OptimizerParameters(
        [list(group["params"]) for group in optimizer.param_groups], {}, keys
    )


def _named_by_module(
    optimizer: torch.optim.Optimizer, modules: Iterable[Walked]
) -> OptimizerParameters | None:
    """Return the parameters of ``optimizer``, with their fqns in the module that has all of them.

    Parameters that are in no module are ignored. None if no single module has all others.
    """
    modules = list(modules)
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    known = [walked.by_owner.keys() | walked.keys.keys() for walked in modules]
    present = wanted.intersection(set[int]().union(*known))
    for walked, ids in zip(modules, known, strict=True):
        if present and present <= ids:
            return _grouped(optimizer, walked, present)
    return None


def _grouped(
    optimizer: torch.optim.Optimizer, walked: Walked, present: Set[int]
) -> OptimizerParameters:
    keys: dict[int, list[ParameterKey]] = {i: list(names) for i, names in walked.keys.items()}
    orphans = []
    count = itertools.count()
    for number, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            key = next(count)
            if id(p) not in present:
                keys[id(p)] = [key]
                shape = list(p.shape)
                orphans.append(f"parameter {position} of group {number} (shape {shape})")
    groups = [
        [held for p in group["params"] for held in walked.by_owner.get(id(p), [p])]
        for group in optimizer.param_groups
    ]
    return OptimizerParameters(groups, walked.by_owner, keys, orphans)
