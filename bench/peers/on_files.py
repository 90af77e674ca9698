"""Peers that save to a path: torch.save, safetensors and torchsnapshot.

All are called through their public names and write to their own path. Peers that build new tensors
are followed by a copy into the state's tensors, as their users would do.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...drivers.uri import Uri
from .peer import Peer, State

if TYPE_CHECKING:
    import torch


def _flat(state: State) -> dict[str, torch.Tensor]:
    from ..states import flat_tensors  # imports torch, which the list of peers does not need

    return flat_tensors(state)


def _fill(state: State, loaded: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy loaded tensors into the state. Raises KeyError for a tensor that the state lacks, and
    AssertionError if one is missing."""
    missing = _flat(state)
    for name, tensor in loaded:
        missing.pop(name).copy_(tensor)
    if missing:
        raise AssertionError(f"{len(missing)} tensors did not come back, {next(iter(missing))}, …")


def _save_torch(uri: Uri, state: State) -> None:
    import torch

    torch.save(state, uri.location)


def _load_torch(uri: Uri, state: State) -> None:
    import torch

    loaded = torch.load(uri.location, mmap=False, weights_only=True)  # noqa: TID251 - a peer
    _fill(state, _flat(loaded).items())


def _save_safetensors(uri: Uri, state: State) -> None:
    from safetensors.torch import save_file

    save_file(_flat(state), uri.location)


def _load_safetensors(uri: Uri, state: State) -> None:
    from safetensors.torch import load_file

    _fill(state, load_file(uri.location).items())


def _save_torchsnapshot(uri: Uri, state: State) -> None:
    with _torchsnapshot(state) as (torchsnapshot, app_state):
        torchsnapshot.Snapshot.take(uri.location, app_state)


def _load_torchsnapshot(uri: Uri, state: State) -> None:
    with _torchsnapshot(state) as (torchsnapshot, app_state):
        torchsnapshot.Snapshot(uri.location).restore(app_state)


@contextmanager
def _torchsnapshot(state: State) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the module, and the state in its form. Suppress its warnings about newer versions of
    torch."""
    module: Any = importlib.import_module("torchsnapshot")
    with warnings.catch_warnings(action="ignore"):
        yield module, {"state": module.StateDict(**state)}


ON_FILES = (
    Peer("torchsave", "torch.save", _save_torch, _load_torch),
    Peer(
        "safetensors",
        "safetensors",
        _save_safetensors,
        _load_safetensors,
        modules=("safetensors",),
    ),
    Peer(
        "torchsnapshot",
        "torchsnapshot",
        _save_torchsnapshot,
        _load_torchsnapshot,
        modules=("torchsnapshot",),
    ),
)
