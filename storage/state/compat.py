"""All that is used of torch beside its public interface, each with what it is for.

Every name here is exercised by the tests with 2.13.0. All but those of :class:`FlatUnit` were
looked up in the sources of torch 2.6.0, the oldest release that is promised. No other module uses a
private name of torch, so a new release is checked against this file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

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

__all__ = [
    "FLAT_PARAMETER_MARKS",
    "STATE_METHODS",
    "ActivationWrapper",
    "DcpPlace",
    "FlatPiece",
    "FlatUnit",
    "LocalShardsWrapper",
    "ShardedTensor",
    "WeakStorage",
    "buffers_of",
    "children_of",
    "flat_units",
    "fqn_of",
    "has_state_hooks",
    "is_initialized",
    "neg_view",
    "never_compiled",
    "non_persistent_of",
    "overlaps_itself",
    "parameters_of",
    "plain_state_dict",
    "stored_local",
]

Function = TypeVar("Function", bound=Callable[..., object])

FLAT_PARAMETER_MARKS = ("_fsdp_flattened", "_is_flat_param")
"""Attributes that FSDP1 leaves on its flat parameters. 2.6.0: see ``torch.distributed.fsdp``."""

STATE_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
"""Methods of a module, by one of which it may have a way of its own to make its state dict."""


DcpPlace = _StorageInfo
"""What DCP's metadata say of an item: the name of a file, and the item's offset and length there.
2.6.0: see ``torch.distributed.checkpoint.filesystem``."""


def parameters_of(module: torch.nn.Module) -> Mapping[str, torch.nn.Parameter | None]:
    """The parameters of the module itself. ``named_parameters(recurse=False)`` leaves out tied
    ones, and costs a generator for each module."""
    return module._parameters


def buffers_of(module: torch.nn.Module) -> Mapping[str, torch.Tensor | None]:
    """The buffers of the module itself, likewise."""
    return module._buffers


def children_of(module: torch.nn.Module) -> Mapping[str, torch.nn.Module | None]:
    """The modules right below; one that is there under two names comes under both, unlike in
    ``named_children``."""
    return module._modules


def non_persistent_of(module: torch.nn.Module) -> Set[str]:
    """Names of the module's buffers that are no part of its state dict."""
    return module._non_persistent_buffers_set


def has_state_hooks(module: torch.nn.Module) -> bool:
    """Whether something was registered that changes what ``state_dict()`` returns."""
    return bool(module._state_dict_hooks or module._state_dict_pre_hooks)


def fqn_of(module: torch.nn.Module, name: str) -> str:
    """What torch's distributed checkpoints call a parameter or a buffer: its name without those of
    wrappers."""
    return str(next(iter(_get_fqns(module, name))))


def plain_state_dict(owner: torch.nn.Module | torch.optim.Optimizer) -> dict[str, object]:
    """``owner.state_dict()``; of one that torch has patched for checkpoints, what it was before."""
    state: dict[str, object] = _state_dict_fn(owner, "state_dict")()
    return state


def is_initialized(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the constructor of ``torch.optim.Optimizer`` ran, so that hooks can be registered.
    Wrappers that inherit from it may skip that, and pass on the state of what they wrap."""
    return "_optimizer_load_state_dict_pre_hooks" in vars(optimizer)


def stored_local(tensor: DTensor) -> torch.Tensor:
    """The very local tensor of a DTensor, with all attributes. ``to_local()`` returns a view."""
    return tensor._local_tensor


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """A parameter that is in a flat parameter, and what this rank holds of it: ``numel`` elements
    from ``start`` on, at element ``at`` of the rank's part of the flat parameter.

    ``names``: its own and those of parameters that are the same, from the wrapped module on.
    ``original``: the parameter that users see, with ``use_orig_params``. ``is_regular``: it is
    flattened in row-major order, and by FSDP1 alone.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    start: int
    numel: int
    at: int
    original: torch.nn.Parameter | None
    is_regular: bool


class FlatUnit:
    """The flat parameter of a module that FSDP1 has wrapped. The attributes are described on
    ``FlatParameter`` in ``_flat_param.py`` of ``torch.distributed.fsdp``, here of 2.13.0."""

    framework = "FSDP1 (torch's FullyShardedDataParallel)"
    apart = "Wrap the module with use_orig_params=True."

    def __init__(self, handle: FlatParamHandle) -> None:
        self._handle = handle
        self.flat: torch.nn.Parameter = handle.flat_param

    @property
    def is_at_rest(self) -> bool:
        """Whether the flat parameter has this rank's part, and nothing is working with it."""
        handle = self._handle
        state = handle._training_state.name
        flat: Any = self.flat
        return state == "IDLE" and bool(flat.shape == flat._sharded_size)

    @property
    def shows_whole(self) -> bool:
        """Whether the original parameters are the gathered ones: between forward and backward."""
        return self._handle._unsharded_flat_param_for_skipped_views is not None

    def reshard(self) -> None:
        """Drop gathered parameters, which a forward without a backward leaves, and which the next
        forward would use as they are."""
        if not self._handle.uses_sharded_strategy or not hasattr(self.flat, "_local_shard"):
            return  # nothing is ever gathered, or no forward has been yet
        if not self._handle.needs_unshard():
            self._handle.reshard(free_unsharded_flat_param=True)

    def pieces(self) -> Iterator[FlatPiece]:
        """Its parameters, without padding."""
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
            yield FlatPiece(
                names=(flat._fqns[number], *others),
                shape=tuple(flat._shapes[number]),
                start=held.intra_param_start_idx or 0,
                numel=held.numel_in_shard or 0,
                at=held.offset_in_shard or 0,
                original=originals[number],
                is_regular=_is_row_major(flat._shapes[number], flat._strides[number])
                and flat._param_extensions[number] is None,
            )


def flat_units(module: torch.nn.Module) -> list[FlatUnit]:
    """The flat parameter that FSDP1 has made of parameters of ``module``, if it is a wrapper of
    FSDP1 that has one."""
    if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
        return [FlatUnit(module._handle)]
    return []


def _is_row_major(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    return torch.empty_strided(shape, stride, device="meta").is_contiguous()


def neg_view(tensor: torch.Tensor) -> torch.Tensor:
    """The negation of ``tensor`` as a view of its memory."""
    return torch._neg_view(tensor)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory, as in an expanded tensor."""
    return not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) != 0


def never_compiled(function: Function) -> Function:
    """Mark a hook that compiled code calls, and does not compile into itself. The public
    ``torch.compiler.disable`` imports the compiler."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


class _Ref(Protocol):
    """torch's ``StorageWeakRef``, which has no types."""

    cdata: int

    def expired(self) -> bool: ...


class WeakStorage:
    """A storage that this does not keep alive. ``UntypedStorage`` itself has no weak references
    that live as long as the memory does."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._ref: _Ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    @property
    def expired(self) -> bool:
        """Whether nothing has the memory any more."""
        return self._ref.expired()

    def get(self) -> torch.UntypedStorage | None:
        """The storage, or None."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(
            self._ref.cdata
        )
        return found
