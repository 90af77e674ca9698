"""FSDP1 (torch's FullyShardedDataParallel): parameters and optimizer states as flat ranges.

FSDP1 flattens the parameters of a wrapped module, joins them with padding in between, and gives
every rank an even part of that *flat parameter*. So a rank holds, of each parameter, a range of its
row-major order, possibly empty. With ``use_orig_params``, an optimizer has the original parameters,
whose data are these ranges. Without it, it has the flat parameter, and one state for all parameters
in it.

Scope: which ranges these are, and whether FSDP1 is using them. :mod:`..compat` knows FSDP1's
bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....errors import StateError
from ..compat import FlatPiece, FlatUnit, flat_units
from .flat_parts import FlatPart, Parts


def fsdp1_parts(parts: Parts, named: Callable[[str], str]) -> list[FlatPart]:
    """Return this rank's part of every flattened parameter in ``parts``, the modules of one tree.

    ``named`` translates a name in the tree to the name in a checkpoint.
    """
    return [
        FlatPart(
            tuple(dict.fromkeys(named(f"{prefix}{name}") for name in piece.names)), unit, piece
        )
        for prefix, module in parts
        for unit in flat_units(module)
        for piece in unit.pieces()
    ]


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
