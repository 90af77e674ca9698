"""Allocates memory for modules on the meta device: a load fills tensors that have none yet.

The parameters stay the same objects, so an existing optimizer still refers to them. They get their
memory only after all of it is filled: a failed load leaves them on the meta device. Tensors that
the load does not fill stay there, such as buffers that are in no state dict.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ....errors import StateError
from ..adapters.allocation import device_for
from ..adapters.module_names import Walked
from ..adapters.tensors import local_of
from ..compat import buffers_of, non_persistent_of, parameters_of
from ..flat_state import FlatState
from .targets import Wanted

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class Given:
    """Memory for one tensor of a module.

    ``whole`` is the memory, ``place`` the parameter or buffer, and ``copy`` the tensor that
    represents it in the module's state dict.
    """

    place: torch.Tensor
    copy: torch.Tensor
    whole: torch.Tensor


def find_without_memory(
    flat: FlatState, rows: Sequence[tuple[int, str]]
) -> dict[str, torch.Tensor]:
    """Return the meta-device parameters and buffers of the modules in ``flat``, by their names
    there.

    ``rows`` lists the state's tensors on the meta device, with their paths. Raises StateError for
    one that is not a parameter or buffer under its own name.
    """
    if not rows:
        return {}
    found = _of_modules(flat)
    for row, path in rows:
        if flat.names[row] not in found:
            raise cannot_be_filled(path)
    return found


def cannot_be_filled(path: str) -> StateError:
    """Return the error for a meta tensor that belongs to no module."""
    return StateError(
        f"{path} is a meta tensor without data, which cannot be filled",
        advice=(
            "Pass its module, whose parameters and buffers then get memory; or call "
            "to_empty(device=...) on the module first."
        ),
    )


def _of_modules(flat: FlatState) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for subtree in flat.subtrees:
        walked = next((each for each in flat.modules if each.module is subtree.owner), None)
        if walked is None or walked.flat:
            continue
        prefix = "".join(f"{key}." for key in flat.keys_to(subtree))
        for name, tensor in _of_module(walked):
            found[prefix + walked.names[name]] = tensor
    return found


def _of_module(walked: Walked) -> Iterator[tuple[str, torch.Tensor]]:
    left = []
    for prefix, part in walked.parts:
        for name, parameter in parameters_of(part).items():
            if parameter is not None and parameter.is_meta:
                yield prefix + name, parameter
        for name, buffer in buffers_of(part).items():
            if buffer is None or not buffer.is_meta:
                continue
            if name in non_persistent_of(part):
                left.append(prefix + name)
            else:
                yield prefix + name, buffer
    if left:
        _log.warning(
            "buffers that are in no checkpoint stay on the meta device: %s", ", ".join(left[:5])
        )


def allocate(flat: FlatState, wanted: Wanted) -> list[Given]:
    """Allocate memory for the wanted tensors of ``flat.without_memory``, and put it into
    ``wanted``.

    Tied tensors share their memory, under all of their names.
    """
    if not flat.without_memory:
        return []
    made: dict[int, torch.Tensor] = {}
    for number, name in wanted.names.items():
        place = flat.without_memory.get(name)
        if place is None or not wanted.buffers[number].is_meta:
            continue
        if id(place) not in made:
            made[id(place)] = torch.empty_like(place, requires_grad=False, device=device_for(place))
        wanted.buffers[number] = local_of(made[id(place)])
    given = []
    for name, copy in zip(flat.names, flat.origins, strict=True):
        place = flat.without_memory.get(name)
        if place is not None and id(place) in made:
            assert isinstance(copy, torch.Tensor)
            given.append(Given(place, copy, made[id(place)]))
    return given


def give(given: list[Given]) -> None:
    """Move the filled memory into its tensors."""
    for each in given:
        if each.place.is_meta:  # else it is tied to an earlier one
            _become(each.place, each.whole)
        _become(each.copy, each.whole)


def _become(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Make ``tensor`` use the memory of ``whole``, keeping its identity and attributes."""
    attributes = dict(tensor.__dict__)
    other: torch.Tensor = whole.detach()
    if isinstance(tensor, torch.nn.Parameter):
        other = torch.nn.Parameter(other, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    tensor.__dict__.update(attributes)
