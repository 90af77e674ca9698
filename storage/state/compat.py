"""Everything used of torch outside its public interface, and why.

The tests exercise every name here with torch 2.13.0. All except those of :class:`FlatUnit` were
looked up in the sources of torch 2.6.0, the oldest supported release. No other module uses a
private name of torch, so only this file has to be checked against a new release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict import _get_fqns, _state_dict_fn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["ActivationWrapper", "LocalShardsWrapper", "ShardedTensor"]
"""Classes of torch that other modules take from here."""

Function = TypeVar("Function", bound=Callable[..., object])

FLAT_PARAMETER_MARKS = ("_fsdp_flattened", "_is_flat_param")
"""Attributes that FSDP1 leaves on its flat parameters. 2.6.0: see ``torch.distributed.fsdp``."""

STATE_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
"""Methods that a module may override to customize its state dict."""


DcpPlace = _StorageInfo
"""The location of an item in DCP's metadata: a file's name, and the item's offset and length there.
2.6.0: see ``torch.distributed.checkpoint.filesystem``."""


def parameters_of(module: torch.nn.Module) -> Mapping[str, torch.nn.Parameter | None]:
    """Return the module's own parameters.

    ``named_parameters(recurse=False)`` omits tied ones, and costs a generator per module.
    """
    return module._parameters


def buffers_of(module: torch.nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Return the module's own buffers, including tied ones."""
    return module._buffers


def non_persistent_of(module: torch.nn.Module) -> Set[str]:
    """Return the names of the module's buffers that are not in its state dict."""
    return module._non_persistent_buffers_set


def has_state_hooks(module: torch.nn.Module) -> bool:
    """Return whether hooks are registered that change the result of ``state_dict()``."""
    return bool(module._state_dict_hooks or module._state_dict_pre_hooks)


def fqn_of(module: torch.nn.Module, name: str) -> str:
    """Return the name of a parameter or buffer in torch's distributed checkpoints.

    It lacks the names of wrapper modules.
    """
    return str(next(iter(_get_fqns(module, name))))


def plain_state_dict(owner: torch.nn.Module | torch.optim.Optimizer) -> dict[str, object]:
    """Return ``owner.state_dict()``, bypassing a patch that torch applies for checkpoints."""
    state: dict[str, object] = _state_dict_fn(owner, "state_dict")()
    return state


def is_initialized(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the constructor of ``torch.optim.Optimizer`` ran, so that hooks can be added.

    Subclasses that wrap another optimizer may skip it, and forward the state of the wrapped one.
    """
    return "_optimizer_load_state_dict_pre_hooks" in vars(optimizer)


def stored_local(tensor: DTensor) -> torch.Tensor:
    """Return the DTensor's own local tensor, with all attributes. ``to_local()`` returns a view."""
    return tensor._local_tensor


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """This rank's part of one parameter in a flat parameter.

    The rank holds ``numel`` elements of the parameter from ``start`` on, at element ``at`` of its
    part of the flat parameter. ``names``: the parameter's name and those of tied parameters,
    relative to the wrapped module. ``original``: the parameter that users see, with
    ``use_orig_params``. ``is_regular``: it is flattened in row-major order, and by FSDP1 alone.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    start: int
    numel: int
    at: int
    original: torch.nn.Parameter | None
    is_regular: bool


class Unit:
    """A flat parameter of a framework.

    ``flat``: this rank's part of it, as the optimizer holds it. ``framework``: the name of the
    framework, and ``apart``: advice on how to keep parameters separate; both for errors.
    """

    flat: torch.Tensor
    framework: str
    apart: str

    @property
    def shows_whole(self) -> bool:
        """True while the original parameters are gathered, as between forward and backward."""
        return False


class FlatUnit(Unit):
    """The flat parameter of a module wrapped by FSDP1.

    The attributes are described on ``FlatParameter`` in ``_flat_param.py`` of
    ``torch.distributed.fsdp``, here of 2.13.0.
    """

    framework = "FSDP1 (torch's FullyShardedDataParallel)"
    apart = "Wrap the module with use_orig_params=True."

    def __init__(self, handle: FlatParamHandle) -> None:
        self._handle = handle
        self.flat = handle.flat_param

    @property
    def is_at_rest(self) -> bool:
        """True if the flat parameter holds this rank's part, and no operation is using it."""
        handle = self._handle
        state = handle._training_state.name
        flat: Any = self.flat
        return state == "IDLE" and bool(flat.shape == flat._sharded_size)

    @property
    def shows_whole(self) -> bool:
        return self._handle._unsharded_flat_param_for_skipped_views is not None

    def reshard(self) -> None:
        """Drop gathered parameters.

        A forward pass without a backward pass leaves them behind, and the next one would reuse them
        as they are.
        """
        if not self._handle.uses_sharded_strategy or not hasattr(self.flat, "_local_shard"):
            return  # nothing is ever gathered, or no forward pass has run yet
        if not self._handle.needs_unshard():
            self._handle.reshard(free_unsharded_flat_param=True)

    def pieces(self) -> Iterator[FlatPiece]:
        """Yield this rank's part of each parameter, without padding, in order.

        Includes the parameters without an element on this rank: their ``numel`` is 0.
        """
        flat: Any = self.flat
        tied: dict[tuple[int, str], list[str]] = {}
        for shared in flat._shared_param_infos:
            name = f"{shared.module_name}.{shared.param_name}".lstrip(".")
            primary = (id(shared.prim_module), shared.prim_param_name)
            tied.setdefault(primary, []).append(name)
        originals = flat._params or [None] * flat._num_params
        for number, (info, held) in enumerate(
            zip(flat._param_infos, flat._shard_param_infos, strict=True)
        ):
            others = tied.get((id(info.module), info.param_name), [])
            whole = torch.empty_strided(flat._shapes[number], flat._strides[number], device="meta")
            yield FlatPiece(
                names=(flat._fqns[number], *others),
                shape=tuple(flat._shapes[number]),
                start=held.intra_param_start_idx or 0,
                numel=held.numel_in_shard or 0,
                at=held.offset_in_shard or 0,
                original=originals[number],
                is_regular=whole.is_contiguous() and flat._param_extensions[number] is None,
            )


def flat_units(module: torch.nn.Module) -> list[FlatUnit]:
    """Return the flat parameter of ``module``, if it is an FSDP1 wrapper that has one."""
    if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
        return [FlatUnit(module._handle)]
    return []


def neg_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the negation of ``tensor`` as a view of its memory."""
    return torch._neg_view(tensor)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether two elements may share memory, as in an expanded tensor."""
    return not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) != 0


def never_compiled(function: Function) -> Function:
    """Mark a hook that compiled code calls instead of inlining.

    The public ``torch.compiler.disable`` imports the compiler.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


class WeakStorage:
    """A weak reference to a storage's memory.

    A weak reference to ``UntypedStorage`` itself dies with the Python object, before the memory
    does.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._ref: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    @property
    def expired(self) -> bool:
        """True once the memory was freed."""
        return bool(self._ref.expired())

    def get(self) -> torch.UntypedStorage | None:
        """Return the storage, or None if it was freed."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(
            self._ref.cdata
        )
        return found
