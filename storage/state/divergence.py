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
    owners = _owners(flat)
    prefixes = flat.tree.prefixes()
    generators = {(s.parent, s.key) for s in flat.subtrees if _is_of_a_rank(s.owner)}
    parameters = {
        id(walked.module): {walked.names[name] for name, _ in walked.parameters}
        for walked in flat.modules
    }
    found = []
    for row in sorted(rows):
        container = flat.containers[row]
        text = flat.names[row].removeprefix(prefixes[container])
        owner = owners[container]
        of_a_rank = owner is not None and _is_of_a_rank(owner)
        if flat.layouts[row].holders is not None or of_a_rank:
            continue
        if text.rpartition(".")[2] in _OF_A_RANK or text not in parameters.get(id(owner), {text}):
            continue
        if (container, flat.tree.tensor_key(container, text)) not in generators:
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


def _owners(flat: FlatState) -> list[object]:
    """Return the innermost object whose state holds each container; None for the user's own."""
    opened = {(s.parent, s.key): s.owner for s in flat.subtrees}
    found: list[object] = []
    for number, container in enumerate(flat.tree.containers):
        inherited = found[container.parent] if number else None
        found.append(opened.get((container.parent, container.key), inherited))
    return found
