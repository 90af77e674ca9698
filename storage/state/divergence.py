"""Warns of plain tensors that unexpectedly differ between ranks.

Such tensors are stored per rank under one name, and a job of another size gets those of some ranks
only. That is right for a random state, and for anything meant to belong to a rank. It comes as a
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

_log = logging.getLogger(__name__)

_OF_A_RANK = ("running_mean", "running_var", "num_batches_tracked")
"""Statistics that batch normalization keeps per rank, for state dicts that do not mark buffers."""
_SHOWN = 10
_WARNED_MAX = 1 << 20
_warned: set[str] = set()
_lock = new_lock()


def unexpected_rows(flat: FlatState, rows: Iterable[int]) -> list[int]:
    """Return the members of ``rows``, all plain tensors, that should not differ between ranks.

    These are parameters, optimizer state, and tensors placed directly in the state, but not buffers
    or the state of other objects.
    """
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
    """Warn of unexpected tensors among the rows in ``ranks``, which holds the number of holders.

    A process names each tensor once.
    """
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
        "%d plain tensors differ in values, shape or dtype between the ranks that hold them. Each "
        "rank's own is stored, and only a job of as many ranks gets all of them back: %s%s. Pass "
        "shards of a larger tensor as DTensors, and values that belong to a rank as "
        "holdfast.PerRank. Replicas that have diverged should be broadcast from one rank.",
        len(new),
        ", ".join(shown),
        more,
    )


def _is_of_a_rank(owner: object) -> bool:
    return not isinstance(owner, torch.nn.Module | torch.optim.Optimizer)


def _of_a_rank(flat: FlatState) -> list[bool]:
    """Return per container whether it belongs to an object with per-rank state, like a data
    loader."""
    opened: dict[tuple[int, Key], bool] = {
        (s.parent, s.key): _is_of_a_rank(s.owner) for s in flat.subtrees
    }
    found: list[bool] = []
    for number, container in enumerate(flat.tree.containers):
        inherited = number > 0 and found[container.parent]
        found.append(opened.get((container.parent, container.key), inherited))
    return found


def _parameters(flat: FlatState) -> dict[int, set[str]]:
    """Return the parameter names of each container that is a module's state. The rest are
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
