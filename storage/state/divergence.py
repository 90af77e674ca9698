"""Warns of plain tensors that differ between ranks, and are not expected to.

Each rank's own is stored, under one name, and a job of another size gets some ranks' and not
others'. That is right for a random state, and for what is meant to belong to a rank. It is a
surprise for replicas that have diverged, and for local shards of a layout that only the trainer
knows: the same tensor may be equal at one save and differ at the next.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch

from ...core.forks.renewal import new_lock
from ..format.tree import Key
from .dtypes import dtype_name
from .flat_state import FlatState

__all__ = ["unexpected_rows", "warn_divergent"]

_log = logging.getLogger(__name__)

_OF_A_RANK = ("running_mean", "running_var", "num_batches_tracked")
"""What batch normalisation counts on each rank for itself, where a state dict does not show that
these are buffers."""
_SHOWN = 10
_WARNED_MAX = 1 << 20
_warned: set[str] = set()
_lock = new_lock()


def unexpected_rows(flat: FlatState, rows: Iterable[int]) -> list[int]:
    """Those of ``rows``, of plain tensors, that are not expected to differ between ranks:
    parameters, the state of optimizers, and tensors that stand in the state by themselves. Not
    buffers, nor the state of other objects."""
    own = _of_a_rank(flat)
    prefixes = flat.tree.prefixes()
    expected = {(s.parent, s.key) for s in flat.subtrees if _is_of_a_rank(s.owner)}
    parameters = _parameters(flat)
    found = []
    for row in sorted(rows):
        container = flat.containers[row]
        text = flat.names[row].removeprefix(prefixes[container])
        if (
            flat.layouts[row].holders is not None
            or own[container]
            or text.rpartition(".")[2] in _OF_A_RANK
        ):
            continue
        if (container, flat.tree.tensor_key(container, text)) in expected:
            continue  # a generator, whose state is a tensor
        if container in parameters and text not in parameters[container]:
            continue
        found.append(row)
    return found


def warn_divergent(flat: FlatState, ranks: Mapping[int, int], rank: int) -> None:
    """Log a warning that names the surprising ones among the rows in ``ranks``, which says how many
    ranks hold each. A process names each tensor once."""
    rows = unexpected_rows(flat, ranks)
    with _lock:
        new = [row for row in rows if flat.names[row] not in _warned]
        if len(_warned) > _WARNED_MAX:
            _warned.clear()
        _warned.update(flat.names[row] for row in new)
    if not new:
        return
    shown = [
        (
            f"{flat.path(row)} ({dtype_name(flat.dtypes[row])} {list(flat.shapes[row])} on rank "
            f"{rank}, held by {ranks[row]})"
        )
        for row in new[:_SHOWN]
    ]
    more = ""
    if len(new) > _SHOWN:
        more = f", and {len(new) - _SHOWN} more"
    _log.warning(
        "%d plain tensors differ between the ranks that hold them, in values, shape or dtype; "
        "each rank's own is stored, "
        "and only a job of as many ranks gets all of them back: %s%s. A shard of something larger "
        "should be a DTensor, what "
        "belongs to the rank a holdfast.PerRank; replicas have diverged, and want to be broadcast "
        "from one rank.",
        len(new),
        ", ".join(shown),
        more,
    )


def _is_of_a_rank(owner: object) -> bool:
    return not isinstance(owner, torch.nn.Module | torch.optim.Optimizer)


def _of_a_rank(flat: FlatState) -> list[bool]:
    """Per container, whether it belongs to an object whose state may differ between ranks: a data
    loader, for example."""
    opened: dict[tuple[int, Key], bool] = {
        (s.parent, s.key): _is_of_a_rank(s.owner) for s in flat.subtrees
    }
    found: list[bool] = []
    for number, container in enumerate(flat.tree.containers):
        inherited = number > 0 and found[container.parent]
        found.append(opened.get((container.parent, container.key), inherited))
    return found


def _parameters(flat: FlatState) -> dict[int, set[str]]:
    """Per container that is the state of a module, the names of its parameters. All else in it are
    buffers."""
    walked = {id(known.module): known for known in flat.modules}
    owners = {
        (s.parent, s.key): s.owner for s in flat.subtrees if isinstance(s.owner, torch.nn.Module)
    }
    found: dict[int, set[str]] = {}
    for number, container in enumerate(flat.tree.containers):
        known = walked.get(id(owners.get((container.parent, container.key))))
        if known is not None:
            found[number] = {known.names[name] for name, _ in known.parameters}
    return found
