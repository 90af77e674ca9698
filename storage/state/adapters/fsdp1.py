"""FSDP1 (torch's FullyShardedDataParallel): parameters, and their state in an optimizer, as flat
ranges of what they are to users.

FSDP1 flattens the parameters of a wrapped module, joins them with padding between, and gives every
rank an even part of that *flat parameter*. So a rank holds of each parameter a range of its
row-major order, which may be empty. With ``use_orig_params`` an optimizer has the original
parameters, whose data are these ranges; without it, it has the flat parameter, and one state for
all parameters that are in it.

Scope: which ranges these are, and whether FSDP1 is at work on them. How FSDP1 keeps its books is in
:mod:`..compat`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....errors import StateError
from ..compat import FlatPiece, FlatUnit, flat_units
from .flat_parts import FlatPart, Parts

__all__ = ["check_at_rest", "fsdp1_parts"]


def fsdp1_parts(parts: Parts, named: Callable[[str], str]) -> list[FlatPart]:
    """What this rank holds of all parameters in ``parts``, the modules of one tree, that are in
    flat parameters. ``named`` makes the name in a checkpoint of one in the tree."""
    return [
        FlatPart(
            tuple(dict.fromkeys(named(f"{prefix}{name}") for name in piece.names)), unit, piece
        )
        for prefix, module in parts
        for unit in flat_units(module)
        for piece in unit.pieces()
    ]


def check_at_rest(flat: Sequence[FlatPart], path: str, *, loading: bool) -> None:
    """Raises StateError where FSDP1 is at work on a parameter in ``flat``, or has a layout that is
    not known. With ``loading``, gathered parameters are dropped: a forward would use them."""
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
            f"{where} is a parameter of FSDP1 (torch's FullyShardedDataParallel) that is gathered "
            f"at the moment",
            advice="Save and load outside of summon_full_params, forward and backward.",
        )
    if not piece.is_regular:
        raise StateError(
            f"{where} is a parameter of FSDP1 (torch's FullyShardedDataParallel) that is not "
            f"contiguous, or a DTensor, and is flattened in an order that this release does not "
            f"know",
            advice="Shard with fully_shard (FSDP2), or make it contiguous before it is wrapped.",
        )
