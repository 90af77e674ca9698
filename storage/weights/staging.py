"""The second copy of an engine's weights. An update is prepared there, then swapped with the
first."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

import torch

from ...errors import StateError
from ..runtime.buffers import memory_for
from ..state.bits import writable
from ..state.flat_state import FlatState
from ..state.flattening.flatten import modules_in

_Key = tuple[int, torch.Size, tuple[int, ...], torch.dtype, torch.device]


@dataclass(eq=False)
class _Pair:
    """A tensor of the engine, its counterpart, and the parameters to swap."""

    live: torch.Tensor
    staged: torch.Tensor
    owners: list[torch.Tensor]


@dataclass(eq=False)
class Staging:
    """Memory for one more set of an engine's weights.

    The parameters of modules in host memory exchange their memory with it, which takes a
    microsecond for each. All other tensors are copied: on accelerators, because captured
    graphs contain their addresses; tensors that share memory; and all of them with ``in_place``.
    """

    in_place: bool = False
    filled: Collection[str] = ()
    """Names of the tensors that an update has filled."""
    _names: list[str] = field(default_factory=list)
    _pairs: list[_Pair] = field(default_factory=list)
    _spare: dict[str, torch.Tensor] = field(default_factory=dict)

    def stage(self, flat: FlatState, into: object) -> FlatState:
        """Return ``flat`` with the second copies in place of the engine's tensors. Raises
        StateError if ``into`` has something else to fill, or modules without memory."""
        for subtree in flat.subtrees:
            if subtree.state is None:
                raise StateError(
                    f"a {type(subtree.owner).__name__} is no set of weights",
                    advice="Subscribe with modules and tensors only.",
                )
        if flat.without_memory:
            name = next(iter(flat.without_memory))
            raise StateError(
                f"{name} has no memory yet", advice="Give the module memory first: to_empty()."
            )
        self.drop()
        owners = {} if self.in_place else _owners(into)
        pairs: dict[_Key, _Pair] = {}
        self._names = list(flat.names)
        self._pairs = []
        for name, live in zip(flat.names, flat.locals, strict=True):
            key = _key(live)
            if key not in pairs:
                pairs[key] = _Pair(live, self._second(name, live), owners.get(key, []))
            self._pairs.append(pairs[key])
        _part_shared(pairs.values())
        self._spare.clear()
        return replace(flat, locals=[pair.staged for pair in self._pairs])

    def _second(self, name: str, live: torch.Tensor) -> torch.Tensor:
        spare = self._spare.get(name)
        if (
            spare is not None
            and (spare.shape, spare.dtype, spare.device) == (live.shape, live.dtype, live.device)
            and spare.data_ptr() != live.data_ptr()
        ):
            return spare
        with memory_for(f"{live.nbytes:,} bytes for the next weights"):
            return torch.empty(live.shape, dtype=live.dtype, device=live.device)

    def swap(self) -> None:
        """Exchange the engine's tensors with their filled counterparts."""
        done: set[int] = set()
        for name, pair in zip(self._names, self._pairs, strict=True):
            if name not in self.filled or id(pair) in done:
                continue
            done.add(id(pair))
            if pair.owners:
                for owner in pair.owners:
                    owner.data = pair.staged
                self._spare[name] = pair.live
            else:
                with writable(pair.live):
                    pair.live.copy_(pair.staged)
                self._spare[name] = pair.staged
        _finish_copies(pair.live for pair in self._pairs)
        self._names = []
        self._pairs = []

    def drop(self) -> None:
        """Forget an update that is not used. Its memory serves the next one."""
        for name, pair in zip(self._names, self._pairs, strict=True):
            self._spare.setdefault(name, pair.staged)
        self._names = []
        self._pairs = []

    def clear(self) -> None:
        """Free all memory."""
        self.drop()
        self._spare.clear()


def _owners(into: object) -> dict[_Key, list[torch.Tensor]]:
    """Return the parameters and buffers of modules in host memory, by where their elements lie."""
    found: dict[_Key, list[torch.Tensor]] = {}
    for module in modules_in(into):
        each = itertools.chain(module.parameters(), module.buffers())
        for tensor in each:
            plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
            if plain and tensor.device.type == "cpu" and tensor.is_contiguous():
                found.setdefault(_key(tensor), []).append(tensor)
    return found


def _key(tensor: torch.Tensor) -> _Key:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _part_shared(pairs: Collection[_Pair]) -> None:
    """Let tensors that share memory with others be copied, not swapped."""
    count: dict[int, int] = {}
    for pair in pairs:
        address = pair.live.untyped_storage().data_ptr()
        count[address] = count.get(address, 0) + 1
    for pair in pairs:
        storage = pair.live.untyped_storage()
        if count[storage.data_ptr()] > 1 or storage.nbytes() != pair.live.nbytes:
            pair.owners = []


def _finish_copies(tensors: Iterator[torch.Tensor]) -> None:
    """Wait for copies on accelerators."""
    for device in {tensor.device for tensor in tensors} - {torch.device("cpu")}:
        torch.get_device_module(device).synchronize(device)
