"""Reads a folder of Megatron-core's ``dist_checkpointing`` (format ``torch_dist``).

It is a folder of torch's distributed checkpoint, plus the data that all ranks share: the file
``common.pt``, or, of Megatron 0.19 and later, an item. Tensors keep Megatron's keys, under which
:mod:`...integrations.megatron` loads them. The common data about a distributed optimizer are moved
to where that module expects them; the rest keeps its path. Classes in its pickle are not resolved:
a value that contains an object is refused.

Scope: optimizers in the format ``fully_reshardable``, whose tensors have the shapes of parameters.
Other formats store buckets with objects, which are refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from ....drivers.contract import Driver
from ...format.dcp_metadata import FilePart, FolderContents
from ...format.torch_pickle import StoredTensor, Value, leaves
from .archive_reader import ArchiveReader, any_record, read_archive
from .dcp_source import check_plain, no_plain_value, read_items
from .model_source import Model, Path, SourceTensor, stamps_of

_COMMON_KEY = "common.pt"
_COMMON_ITEM = "common_state/shard_0_1"
_SHARDED_OBJECT = re.compile(r".+/shard_[0-9.]+_[0-9.]+", re.DOTALL)
"""Item names that Megatron derives from a ``ShardedObject``."""
_RESHARDABLE = "fully_reshardable"


def is_megatrons(keys: Iterable[str], contents: FolderContents) -> bool:
    """Return whether Megatron wrote a folder of torch's distributed checkpoint with these files."""
    return _COMMON_KEY in keys or _COMMON_ITEM in contents.values


async def read_megatron_model(
    driver: Driver, contents: FolderContents, choose: Callable[[Iterable[str]], Sequence[str]]
) -> Model:
    """Read the items of a folder that ``choose`` selects by name; ignore the others.

    Raises UnsupportedFormatError naming a value that contains an object; otherwise raises like
    :func:`.dcp_source.read_items`.
    """
    common = await _Common.read(driver, contents.values.get(_COMMON_ITEM))
    stamps = await stamps_of(driver, [common.key])
    names = [*contents.tensors, *contents.values, *common.items]
    names = [name for name in names if name != _COMMON_ITEM]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise common.archive.refused(
            f"{twice[0]!r} is in the common state and elsewhere in the folder"
        )
    picked = choose(names)
    model = await read_items(driver, contents, picked)
    tensors, values = await common.picked(driver, picked)
    return Model(
        (*model.tensors, *tensors),
        {**model.stamps, **stamps},
        values={**{n: _unpacked(n, value) for n, value in model.values.items()}, **values},
        paths={**model.paths, **{name: common.items[name][0] for name in common.items}},
    )


def _unpacked(name: str, value: object) -> object:
    """Convert a ``ShardedObject``'s value, which Megatron wraps in a list, to the form Holdfast
    saves."""
    if _SHARDED_OBJECT.fullmatch(name) and isinstance(value, list) and len(value) == 1:
        return {"data": value[0]}
    return value


@dataclass(frozen=True, slots=True)
class _Common:
    """The data that all ranks share, in file ``key``: the path and content of each item, by
    name."""

    key: str
    archive: ArchiveReader
    items: Mapping[str, tuple[Path, Value]]

    @classmethod
    async def read(cls, driver: Driver, place: FilePart | None) -> _Common:
        """Read the item at ``place``, or ``common.pt``. Raises DamagedError; UnsupportedFormatError
        unless it is an acyclic dict."""
        if place is None:
            return cls(_COMMON_KEY, *await read_archive(driver, _COMMON_KEY, _by_name, any_record))
        part = (place.start, place.nbytes)
        found = await read_archive(driver, place.key, _by_name_in_list, any_record, part)
        return cls(place.key, *found)

    async def picked(
        self, driver: Driver, names: Iterable[str]
    ) -> tuple[list[SourceTensor], dict[str, object]]:
        """Return the tensors and values of these names. Raises UnsupportedFormatError for other
        items."""
        found = {name: self.items[name][1] for name in names if name in self.items}
        tensors = {name: item for name, item in found.items() if isinstance(item, StoredTensor)}
        values = {name: item for name, item in found.items() if name not in tensors}
        for name, value in values.items():
            try:
                check_plain(value)
            except ValueError as error:
                raise no_plain_value(driver, self.key, name, error) from error
        places = await self.archive.places(tensors)
        return [SourceTensor(n, t.dtype, t.shape, places[n]) for n, t in tensors.items()], values


def _by_name_in_list(value: Value) -> Mapping[str, tuple[Path, Value]]:
    if not (isinstance(value, list) and len(value) == 1):
        raise ValueError("it is not a list of one item")
    return _by_name(value[0])


def _by_name(value: Value) -> Mapping[str, tuple[Path, Value]]:
    """Return the items of nested dicts by dotted name. Raises ValueError."""
    for _ in leaves(value):  # raises ValueError for a cycle
        pass
    if not _is_named(value):
        raise ValueError("it is not a dict of names")
    found = list(_items_in((), _with_optimizer(value)))
    by_name = {".".join(path): (path, item) for path, item in found}
    if len(by_name) < len(found):
        raise ValueError("two of its values have the same dotted path")
    return by_name


def _is_named(value: Value) -> TypeGuard[Mapping[str, Value]]:
    return isinstance(value, dict) and all(type(key) is str for key in value)


def _items_in(
    path: tuple[str, ...], named: Mapping[str, Value]
) -> Iterator[tuple[tuple[str, ...], Value]]:
    for key, item in named.items():
        if item and _is_named(item):
            yield from _items_in((*path, key), item)
        else:
            yield (*path, key), item


def _with_optimizer(common: Mapping[str, Value]) -> Mapping[str, Value]:
    """Return ``common`` with the optimizer in the form that :mod:`...integrations.megatron`
    saves."""
    states = common.get("optimizer")
    if _is_named(states):
        states = {0: states}  # a single optimizer, not a numbered chain of several
    if not isinstance(states, dict) or "optim" in common:
        return common
    taken = [_of_optimizer(state) for state in states.values()]
    found = [each for each in taken if each is not None]
    if len(found) < len(taken):
        return common
    rest = {key: item for key, item in common.items() if key != "optimizer"}
    groups = [group for each in found for group in each["groups"]]
    merged = {key: item for each in found for key, item in each.items()}
    return {**rest, "optim": {"common": merged | {"groups": groups}}}


def _of_optimizer(state: Value) -> dict[str, Any] | None:
    """Return groups, step and loss scale of a distributed optimizer; None for anything else."""
    if not isinstance(state, dict) or state.get("param_state_sharding_type") != _RESHARDABLE:
        return None
    inner = state.get("optimizer")
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return None
    taken: dict[str, Any] = {"groups": groups}
    steps = {step for group in groups if _is_count(step := group.get("step"))}
    if len(steps) == 1:
        taken["step"] = int(steps.pop())
    if "grad_scaler" in state:
        taken["scaler"] = state["grad_scaler"]
    return taken


def _is_count(value: Value) -> TypeGuard[int | float]:
    """Return whether ``value`` is a whole number. Torch's optimizers count steps in floats."""
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
