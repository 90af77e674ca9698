"""The contestants: this library and those it is compared with, each as its documentation says it is
used.

All are called through their public names, and all write to a path of their own.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import holdfast

from .states import State, flat_tensors

__all__ = ["Peer", "peers", "through_dcp"]


@dataclass(frozen=True)
class Peer:
    """``save(path, state)`` writes a new checkpoint; ``load(path, state)`` fills the tensors of
    ``state`` in place."""

    name: str
    save: Callable[[Path, State], None]
    load: Callable[[Path, State], None]
    durable: bool = False
    """Whether what ``save`` wrote is durable when it returns. If not, the benchmark adds the
    fsyncs."""


def peers(*, alone: bool = False) -> list[Peer]:
    """This library, then, unless it is to be ``alone``, those that are installed."""
    ours = Peer("holdfast", _save_holdfast, _load_holdfast, durable=True)
    if alone:
        return [ours]
    out = [ours, Peer("torch.save", _save_torch, _load_torch)]
    if importlib.util.find_spec("safetensors"):
        out.append(Peer("safetensors", _save_safetensors, _load_safetensors))
    out += [Peer("DCP", _save_dcp(1), _load_dcp), Peer("DCP, 4 threads", _save_dcp(4), _load_dcp)]
    if importlib.util.find_spec("torchsnapshot"):
        out.append(Peer("torchsnapshot", _save_torchsnapshot, _load_torchsnapshot))
    return out


def through_dcp() -> list[Peer]:
    """This library, the same as the storage of DCP, and DCP with storage of its own."""
    return [
        Peer("holdfast", _save_holdfast, _load_holdfast, durable=True),
        Peer("holdfast through DCP", _save_through_dcp, _load_through_dcp, durable=True),
        Peer("DCP", _save_dcp(1), _load_dcp),
    ]


def _save_through_dcp(path: Path, state: State) -> None:
    from torch.distributed.checkpoint import state_dict_saver

    from holdfast.storage.integrations.dcp import HoldfastWriter

    with warnings.catch_warnings(action="ignore"):
        state_dict_saver.save(state, storage_writer=HoldfastWriter(path), no_dist=True)


def _load_through_dcp(path: Path, state: State) -> None:
    from torch.distributed.checkpoint import state_dict_loader

    from holdfast.storage.integrations.dcp import HoldfastReader

    with warnings.catch_warnings(action="ignore"):
        state_dict_loader.load(state, storage_reader=HoldfastReader(path), no_dist=True)


def _save_holdfast(path: Path, state: State) -> None:
    holdfast.save(path, state)


def _load_holdfast(path: Path, state: State) -> None:
    holdfast.load(path, into=state)


def _save_torch(path: Path, state: State) -> None:
    torch.save(state, path)


def _load_torch(path: Path, state: State) -> None:
    _copy(flat_tensors(torch.load(path, mmap=False, weights_only=True)), state)


def _save_safetensors(path: Path, state: State) -> None:
    from safetensors.torch import save_file

    save_file(flat_tensors(state), path)


def _load_safetensors(path: Path, state: State) -> None:
    from safetensors.torch import load_file

    _copy(load_file(path), state)


def _copy(loaded: dict[str, torch.Tensor], state: State) -> None:
    for name, tensor in flat_tensors(state).items():
        tensor.copy_(loaded[name])


def _save_dcp(threads: int) -> Callable[[Path, State], None]:
    def save(path: Path, state: State) -> None:
        from torch.distributed.checkpoint import filesystem, state_dict_saver

        with warnings.catch_warnings(action="ignore"):
            state_dict_saver.save(
                state,
                storage_writer=filesystem.FileSystemWriter(path, thread_count=threads),
                no_dist=True,
            )

    return save


def _load_dcp(path: Path, state: State) -> None:
    from torch.distributed.checkpoint import state_dict_loader

    with warnings.catch_warnings(action="ignore"):
        state_dict_loader.load(state, checkpoint_id=path, no_dist=True)


def _save_torchsnapshot(path: Path, state: State) -> None:
    torchsnapshot: Any = importlib.import_module("torchsnapshot")
    with warnings.catch_warnings(action="ignore"):
        torchsnapshot.Snapshot.take(str(path), {"state": torchsnapshot.StateDict(**state)})


def _load_torchsnapshot(path: Path, state: State) -> None:
    torchsnapshot: Any = importlib.import_module("torchsnapshot")
    with warnings.catch_warnings(action="ignore"):
        torchsnapshot.Snapshot(str(path)).restore({"state": torchsnapshot.StateDict(**state)})
