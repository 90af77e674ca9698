"""Flat parameters: represents their contents as flat ranges of the user's parameters.

FSDP1 and ZeRO flatten parameters, join them with padding in between, and give every rank an even
part. So a rank holds, of each parameter, a range of its row-major order, possibly empty; and an
optimizer has one state for all parameters in a flat one.

With ``use_orig_params``, FSDP1's optimizer has the original parameters, whose data are these
ranges. Without it, it has the flat parameter.

Scope: converts flat parameters to Shards under the parameters' names, and back. Calls no collective
and gathers nothing. :mod:`..compat` knows FSDP1's bookkeeping, and :mod:`.deepspeed` that of ZeRO.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from ....errors import MismatchError, StateError
from ..compat import (
    STATE_METHODS,
    ActivationWrapper,
    FlatPiece,
    FlatUnit,
    Unit,
    buffers_of,
    has_state_hooks,
    non_persistent_of,
    parameters_of,
)
from .allocation import Entry, value_at
from .shards import Shard, mark_of

Parts = Sequence[tuple[str, torch.nn.Module]]
"""Modules with the prefixes of their names."""


@dataclass(frozen=True, eq=False)
class FlatPart:
    """This rank's part of one parameter.

    ``names``: its names in a checkpoint, and the names of parameters tied to it. ``registered``:
    the parameter registered in its module, if that is neither the optimizer's nor the one to be
    saved.
    """

    names: tuple[str, ...]
    unit: Unit
    piece: FlatPiece
    registered: torch.nn.Parameter | None = None
    advice: ClassVar[str] = "Shard with fully_shard (FSDP2)."

    @property
    def owner(self) -> torch.Tensor:
        """The parameter that the optimizer updates: the original one if there is one, else the flat
        one, which other parameters share."""
        original = self.piece.original
        return self.unit.flat if original is None else original

    @property
    def in_module(self) -> torch.Tensor:
        """The parameter registered in its module."""
        return self.owner if self.registered is None else self.registered

    @property
    def is_absent(self) -> bool:
        """True if this rank has no element of an original parameter.

        FSDP1 then gives it no gradient here, so this rank's optimizer has no state for it.
        """
        return self.piece.original is not None and not self.piece.numel

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.piece.shape

    def shard(self) -> Shard:
        """Return this rank's part of the parameter, as a view of its memory.

        Views the original parameter if there is one, because users and optimizers may have
        assigned it new data, which FSDP1 copies to the flat parameter only in the next forward
        pass. Views the flat parameter otherwise, and while original parameters are gathered.
        """
        original = self.piece.original
        if original is None or self.unit.shows_whole:
            return self.of(self.unit.flat.detach())
        return self.of_original(original.detach())

    def of(self, held: torch.Tensor) -> Shard:
        """Return this parameter's part of ``held``, a tensor laid out like this rank's flat
        parameter, as a view."""
        at = self.piece.at
        return self._range(held[at : at + self.piece.numel])

    def of_original(self, held: torch.Tensor) -> Shard:
        """Return the part in ``held``, a tensor with the shape of the original parameter here."""
        return self._range(held.reshape(-1))

    def _range(self, held: torch.Tensor) -> Shard:
        start = self.piece.start
        return Shard(held, shape=self.shape, flat=(start, start + self.piece.numel))

    def state(self, value: object, path: str) -> object:
        """Return this parameter's part of ``value``, which the optimizer keeps for the owner.

        Numbers belong to each parameter. If a number is one tensor for all, each parameter gets a
        copy, as it would have on its own. Raises StateError for a tensor of another shape.
        """
        if isinstance(value, Mapping):
            return {key: self.state(item, f'{path}["{key}"]') for key, item in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        if not value.ndim:
            return value if self.piece.original is not None else value.clone()
        if self.piece.original is None:
            if value.shape == self.unit.flat.shape:
                return self.of(value.detach())
        elif self._resembles_original(value):
            return self.of_original(value.detach())
        raise StateError(
            f"{path} is a tensor of shape {list(value.shape)}, which is not the shape of this "
            f"rank's part of the parameter in {self.unit.framework}",
            advice=self.advice,
        )

    def _resembles_original(self, value: torch.Tensor) -> bool:
        return value.numel() == self.piece.numel and value.is_contiguous()


@dataclass(frozen=True, eq=False)
class MarkedPart(FlatPart):
    """A parameter that is a box of a larger one, according to its mark.

    ``offset``: the beginning of the box.
    """

    offset: tuple[int, ...] = ()
    advice: ClassVar[str] = "Pass a dict of these tensors, with a holdfast.Shard for each part."

    def _resembles_original(self, value: torch.Tensor) -> bool:
        return value.shape == self.owner.shape

    def of_original(self, held: torch.Tensor) -> Shard:
        """See :meth:`FlatPart.of_original`."""
        return Shard(held, shape=self.shape, offset=self.offset)


def marked_parts(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], named: Mapping[str, str]
) -> list[FlatPart]:
    """Return the parts for the marked ones of these parameters. ``named``: their saved names."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in parameters:
        if mark_of(parameter) is not None:
            names.setdefault(parameter, []).append(named[name])
    return [_marked_part(parameter, tuple(known)) for parameter, known in names.items()]


def _marked_part(parameter: torch.nn.Parameter, names: tuple[str, ...]) -> MarkedPart:
    mark = mark_of(parameter)
    assert mark is not None
    shape, offset = mark
    unit = Unit()
    unit.flat, unit.framework = parameter, "holdfast.mark_part"
    piece = FlatPiece(names, shape, 0, parameter.numel(), 0, parameter, True)
    return MarkedPart(names, unit, piece, offset=offset)


def sharded_state(
    parts: Parts, flat: Sequence[FlatPart], named: Mapping[str, str], path: str
) -> dict[str, object]:
    """Return a module's state dict with Shards for the parameters in ``flat``.

    Everything else is as registered. Raises StateError for modules that customize their state dict:
    their code would see the framework's replacements of parameters, or make it gather them all.
    """
    for prefix, module in parts:
        _refuse_own_making(module, flat[0].unit.framework, f'{path}["{prefix[:-1]}"]')
    state: dict[str, object] = {}
    for part in flat:
        state |= dict.fromkeys(part.names, part.shard())
    known = {id(part.in_module) for part in flat}
    for prefix, module in parts:
        for tensors in (parameters_of(module), buffers_of(module)):
            for name, tensor in tensors.items():
                if tensor is None or id(tensor) in known or name in non_persistent_of(module):
                    continue
                state[named[f"{prefix}{name}"]] = tensor.detach()
    return state


def _refuse_own_making(module: torch.nn.Module, framework: str, path: str) -> None:
    if isinstance(module, FullyShardedDataParallel | ActivationWrapper):
        return  # their hooks gather parameters, and strip their own names from tensors
    own = any(getattr(type(module), m) is not getattr(torch.nn.Module, m) for m in STATE_METHODS)
    if own or has_state_hooks(module):
        raise StateError(
            f"{path} is a {type(module).__name__} that customizes its state dict, within "
            f"{framework}",
            advice="Shard with fully_shard (FSDP2).",
        )


def check_at_rest(flat: Sequence[FlatPart], path: str, *, loading: bool) -> None:
    """Raise StateError if FSDP1 is using a parameter in ``flat``, or its layout is unknown.

    With ``loading``, gathered parameters are dropped: a forward pass would use them.
    """
    units: dict[int, FlatUnit] = {}
    for part in flat:
        if isinstance(part.unit, FlatUnit):
            _check(part.unit, part.piece, f'{path}["{part.names[0]}"]')
            units[id(part.unit)] = part.unit
    if loading:
        for unit in units.values():
            unit.reshard()


def _check(unit: FlatUnit, piece: FlatPiece, where: str) -> None:
    if not unit.is_at_rest:
        raise StateError(
            f"{where} is a parameter of FSDP1 (torch's FullyShardedDataParallel) that is "
            f"currently gathered",
            advice="Save and load outside of summon_full_params, forward and backward.",
        )
    if not piece.is_regular:
        raise StateError(
            f"{where} is a parameter of FSDP1 (torch's FullyShardedDataParallel) that is not "
            f"contiguous, or a DTensor, and is flattened in an order that this release does not "
            f"support",
            advice="Shard with fully_shard (FSDP2), or make it contiguous before it is wrapped.",
        )


class _StatePart(Shard):
    """A part of ``whole``, which the optimizer keeps."""

    def __init__(self, part: Shard, whole: torch.Tensor) -> None:
        self.tensor, self.layout, self.whole = part.tensor, part.layout, whole


class FlatStates:
    """Creates the tensors that an optimizer keeps for flat parameters.

    Existing tensors are reused if they fit. All parameters in a flat one share one tensor.
    """

    def __init__(self, state: Mapping[object, object]) -> None:
        """Prepare allocation. ``state``: the optimizer's, by its own parameters."""
        self._state = state
        self._whole: dict[tuple[object, ...], torch.Tensor] = {}

    def tensor(self, part: FlatPart, entry: Entry) -> torch.Tensor | Shard:
        """Return the tensor to fill with ``entry``.

        Raises MismatchError if its shape differs from the parameter's.
        """
        if not entry.shape:
            present = value_at(self._state.get(part.owner), entry.keys[2:])
            device = present.device if isinstance(present, torch.Tensor) else torch.device("cpu")
            return torch.empty((), dtype=entry.dtype, device=device)
        if entry.shape != part.shape:
            raise MismatchError(
                f"{'.'.join(map(str, entry.keys))}: shape {list(entry.shape)} in the checkpoint; "
                f"{part.unit.framework} requires the shape of the parameter, {list(part.shape)}"
            )
        whole = self._of(part.owner, entry)
        is_flat = part.piece.original is None
        return _StatePart(part.of(whole) if is_flat else part.of_original(whole), whole)

    def _of(self, owner: torch.Tensor, entry: Entry) -> torch.Tensor:
        place = (id(owner), entry.dtype, *entry.keys[2:])
        whole = self._whole.get(place)
        if whole is None:
            present = value_at(self._state.get(owner), entry.keys[2:])
            whole = torch.zeros_like(owner, dtype=entry.dtype, requires_grad=False)
            if (
                isinstance(present, torch.Tensor)
                and present.shape == owner.shape
                and present.dtype == entry.dtype
                and present.is_contiguous()
            ):
                whole = present.detach()
            self._whole[place] = whole
        return whole


def joined(states: Sequence[object], unit: Unit, path: str) -> object:
    """Join the states of parameters into the state of their flat parameter.

    Raises StateError if parameters differ in a number that a flat parameter has only once.
    """
    first = states[0]
    if isinstance(first, Mapping):
        mappings = [state for state in states if isinstance(state, Mapping)]
        return {
            key: joined([s[key] for s in mappings if key in s], unit, f'{path}["{key}"]')
            for key in dict.fromkeys(itertools.chain.from_iterable(mappings))
        }
    if isinstance(first, _StatePart):
        return first.whole
    if any(not _same(first, other) for other in states[1:]):
        raise StateError(
            f"{path} differs between parameters that {unit.framework} joins, and can have only "
            f"one value",
            advice=unit.apart,
        )
    return first


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and a == b
