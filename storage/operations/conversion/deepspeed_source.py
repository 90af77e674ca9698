"""Reads a DeepSpeed checkpoint of ZeRO stage 1, 2 or 3: fp32 weights and optimizer states.

The weights are those that ``zero_to_fp32`` would produce. A rank's optimizer file contains its
partition of the flat groups, in which parameters are concatenated; the model files give their order
and shapes. So a parameter is a set of element ranges, each a byte range of a file. The files are
pickles of many classes, whose names are not resolved: only tensors, shapes and numbers are used.

Scope: data parallelism only; no model or pipeline parallelism, no experts.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from ....core.aio import at_most
from ....drivers.contract import Driver
from ....errors import DamagedError, NotFoundError, UnsupportedFormatError
from ...format.torch_pickle import Record, StoredTensor, Value, leaves
from ...pipeline.file_chunks import Stretch
from .archive_reader import any_record, read_archive
from .model_source import Model, Path, SourceTensor, stamps_of

T = TypeVar("T")

LATEST_KEY = "latest"
_TAG = re.compile(r"(?!\.\.?$)[^/\\\0]+")
_OPTIM_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
_ANY_FILE = re.compile(r".*_(?:optim|model)_states\.pt")
_LATEST_NBYTES_MAX = 4096


async def deepspeed_folder(driver: Driver, keys: Sequence[str]) -> str | None:
    """Return the folder with the files of a DeepSpeed checkpoint, or None if there is none.

    Empty if the files are among ``keys``, otherwise named by ``latest``. Raises DamagedError.
    """
    if any(_ANY_FILE.fullmatch(key) for key in keys):
        return ""
    if LATEST_KEY not in keys or (await driver.stat(LATEST_KEY)).nbytes > _LATEST_NBYTES_MAX:
        return None
    tag = bytes(await driver.get(LATEST_KEY)).decode("utf-8", "replace").strip()
    if _TAG.fullmatch(tag) is None:
        raise DamagedError(
            f"it names {tag!r:.200}, which is not a folder next to it",
            uri=driver.uri,
            key=LATEST_KEY,
        )
    return tag


async def read_deepspeed_model(driver: Driver, folder: str) -> Model:
    """Read weights as ``model.NAME`` and optimizer states as ``optim.state.NAME.exp_avg`` and so
    on.

    Raises NotFoundError, DamagedError, UnsupportedFormatError and StorageError.
    """
    prefix = f"{folder}/" if folder else ""
    there = [info.key.removeprefix(prefix) async for info in driver.list(folder)]
    names = [name for name in there if "/" not in name]
    optim_keys = _of_ranks(names, _OPTIM_FILE)
    model_keys = _of_ranks(names, _MODEL_FILE)
    others = {name for name in names if _ANY_FILE.fullmatch(name)} - {*optim_keys, *model_keys}
    if others:
        raise _unsupported(driver, folder, f"{min(others)} is of a layout other than plain ZeRO")
    if not optim_keys or not model_keys:
        raise NotFoundError(
            "there is no ZeRO checkpoint: files of optimizer states or of model states are missing",
            uri=driver.uri,
            key=folder,
            advice="Without ZeRO, import the file mp_rank_00_model_states.pt itself.",
        )
    keys = [prefix + key for key in (*optim_keys, *model_keys)]
    stamps = await stamps_of(driver, keys)
    files = await at_most(driver.traits.concurrency, map(partial(_read_file, driver), keys))
    try:
        zero = _Zero(files[: len(optim_keys)], files[len(optim_keys) :])
        return zero.model(stamps)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        what = f"its files do not follow ZeRO's format: {error}"
        raise _unsupported(driver, folder, what) from error


def _unsupported(driver: Driver, folder: str, what: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"this DeepSpeed checkpoint cannot be imported: {what}",
        uri=driver.uri,
        key=folder,
        advice="Load it with DeepSpeed, and save the state with holdfast.save.",
    )


def _of_ranks(names: Sequence[str], pattern: re.Pattern[str]) -> list[str]:
    found = [(int(match[1] or 0), name) for name in names if (match := pattern.fullmatch(name))]
    return [name for _, name in sorted(found)]


@dataclass(frozen=True, slots=True)
class _File:
    """The contents of a file, and the locations of its tensors."""

    value: Mapping[Value, Value]
    places: Mapping[StoredTensor, Stretch]

    def whole(self, name: str, value: Value) -> SourceTensor:
        tensor = _as(StoredTensor, value)
        return SourceTensor(name, tensor.dtype, tensor.shape, self.places[tensor])


async def _read_file(driver: Driver, key: str) -> _File:
    archive, (value, tensors) = await read_archive(driver, key, _with_tensors, any_record)
    numbered = {str(number): tensor for number, tensor in enumerate(tensors)}
    places = await archive.places(numbered)
    return _File(_as(dict, value), {tensor: places[number] for number, tensor in numbered.items()})


def _with_tensors(value: Value) -> tuple[Value, set[StoredTensor]]:
    """Return the contents of a file, and the tensors in them that can be located."""
    stored = {leaf for _, leaf in leaves(value) if isinstance(leaf, StoredTensor)}
    return value, {tensor for tensor in stored if tensor.is_contiguous and not tensor.bits}


def _parts(
    name: str, shape: tuple[int, ...], first: int, numel: int, row: Sequence[SourceTensor], at: int
) -> Iterator[SourceTensor]:
    """Yield elements [first, first + numel) of a tensor from a row of flat tensors.

    ``at`` is the position of the first element in ``row``. Raises ValueError if the row is too
    short.
    """
    begin = 0
    done = 0
    for flat in row:
        low = max(at, begin)
        end = begin + math.prod(flat.shape)
        high = min(at + numel, end)
        if low < high:
            assert isinstance(flat.where, Stretch)
            start = flat.where.start + (low - begin) * flat.itemsize
            where = Stretch(flat.where.key, start, (high - low) * flat.itemsize)
            part = (first + low - at, first + high - at)
            yield SourceTensor(name, flat.dtype, shape, where, part)
            done += high - low
        begin = end
    if done < numel:
        raise ValueError(f"elements of {name!r} are missing")


class _Zero:
    """The files of all ranks, ordered by rank."""

    def __init__(self, optim: Sequence[_File], model: Sequence[_File]) -> None:
        self._files = optim
        self._states = [_as(dict, file.value["optimizer_state_dict"]) for file in optim]
        self._model = model
        self._info = model[0].value
        self._world = len(optim)
        self._stage = _number(self._states[0]["zero_stage"])
        count = self._states[0]["partition_count"]
        world = max(count) if isinstance(count, list) else count
        if world != self._world or self._stage not in (1, 2, 3):
            raise ValueError(f"{self._world} files of stage {self._stage} and {world} ranks")
        if self._stage == 3 and len(model) != self._world:
            raise ValueError(f"{len(model)} files of model states for {self._world} ranks")
        self._shapes = [_shapes(group) for group in _as(list, self._info["param_shapes"])]
        self._masters = self._partitions()

    def model(self, stamps: Mapping[str, tuple[int, float]]) -> Model:
        weights = self._untrained()
        weights += self._of_groups(self._masters, "model.{}")
        for name, other in _as(dict, self._info.get("shared_params", {})).items():
            weights += [
                SourceTensor(f"model.{name}", t.dtype, t.shape, t.where, t.part)
                for t in weights
                if t.name == f"model.{other}"
            ]
        tensors = tuple(weights + [t for key in self._moments() for t in self._moment(key)])
        names = dict.fromkeys(tensor.name for tensor in tensors)
        return Model(tensors, stamps, paths={name: self._path(name) for name in names})

    def _path(self, name: str) -> Path:
        """Return the path of a tensor; the parameter's name is a single key."""
        if name.startswith("model."):
            return "model", name.removeprefix("model.")
        parameter, _, key = name.removeprefix("optim.state.").rpartition(".")
        return "optim", "state", parameter, key

    def _untrained(self) -> list[SourceTensor]:
        """Return the buffers and the frozen parameters, which have no masters.

        Before stage 3 the frozen parameters are whole in the model files, and DeepSpeed may not
        list them.
        """
        module = _as(dict, self._info["module"])
        names = set(_as(list, self._info["buffer_names"]))
        if self._stage < 3:
            trained = itertools.chain(*self._shapes, _as(dict, self._info.get("shared_params", {})))
            names = module.keys() - set(trained)
        found = [
            self._model[0].whole(f"model.{name}", value)
            for name, value in module.items()
            if name in names and isinstance(value, StoredTensor)
        ]
        if self._stage == 3:
            for name, shape in _shapes(self._info.get("frozen_param_shapes") or {}).items():
                rows = [
                    [file.whole("", _as(dict, file.value["frozen_param_fragments"])[name])]
                    for file in self._model
                ]
                found += self._divided(f"model.{name}", shape, rows, 0)
        return found

    def _partitions(self) -> list[list[SourceTensor]]:
        key = "fp32_flat_groups" if self._stage == 3 else "single_partition_of_fp32_groups"
        return [
            [file.whole("", group) for group in _as(list, state[key])]
            for file, state in zip(self._files, self._states, strict=True)
        ]

    def _of_groups(
        self, rows: Sequence[Sequence[SourceTensor]], name: str
    ) -> Iterator[SourceTensor]:
        if self._stage == 3:
            at = 0
            for parameter, shape in itertools.chain(*(g.items() for g in self._shapes)):
                yield from self._divided(name.format(parameter), shape, rows, at)
                at += math.ceil(math.prod(shape) / self._world)
            return
        for number, group in enumerate(self._shapes):
            row = [of_rank[number] for of_rank in rows]
            gaps = self._gaps(number, len(group))
            at = 0
            for (parameter, shape), gap in zip(group.items(), gaps, strict=True):
                numel = math.prod(shape)
                yield from _parts(name.format(parameter), shape, 0, numel, row, at)
                at += numel + gap

    def _divided(
        self, name: str, shape: tuple[int, ...], rows: Sequence[Sequence[SourceTensor]], at: int
    ) -> Iterator[SourceTensor]:
        """Yield a parameter that is divided evenly among ranks, from position ``at`` of each
        row."""
        numel = math.prod(shape)
        share = math.ceil(numel / self._world)
        for rank, row in enumerate(rows):
            first = min(rank * share, numel)
            yield from _parts(name, shape, first, min(share, numel - first), row, at)

    def _gaps(self, group: int, parameters: int) -> Sequence[int]:
        """Return the number of padding elements after each parameter of a group."""
        paddings = self._states[0].get("param_alignment_paddings")
        if paddings is None:
            return [0] * parameters
        return [_number(padding) for padding in _as(list, _as(list, paddings)[group])]

    def _optimizer(self, rank: int) -> Mapping[Value, Value]:
        """Return a rank's base optimizer state by group; empty if absent."""
        key = "optimizer_state_dict" if self._stage == 3 else "base_optimizer_state"
        state = self._states[rank].get(key)
        if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
            return {}
        return _as(dict, state["state"])

    def _moments(self) -> list[str]:
        """Return the names of the optimizer's tensors per parameter.

        Empty if the optimizer state is not partitioned like the weights.
        """
        groups = self._optimizer(0)
        if list(groups) != list(range(len(self._masters[0]))):
            return []
        return [
            str(key)
            for key, value in _as(dict, groups[0]).items()
            if isinstance(value, StoredTensor)
        ]

    def _moment(self, key: str) -> Iterator[SourceTensor]:
        name = f"optim.state.{{}}.{key}"
        first = _as(StoredTensor, _as(dict, self._optimizer(0)[0])[key])
        if not first.shape:
            for group, shapes in enumerate(self._shapes):
                value = _as(dict, self._optimizer(0)[group if self._stage < 3 else 0])[key]
                yield from (self._files[0].whole(name.format(p), value) for p in shapes)
            return
        rows = []
        for rank, masters in enumerate(self._masters):
            optimizer = self._optimizer(rank)
            row = []
            for group, master in enumerate(masters):
                flat = self._files[rank].whole("", _as(dict, optimizer[group])[key])
                row.append(replace(flat, shape=min(flat.shape, master.shape)))
            rows.append(row)
        yield from self._of_groups(rows, name)


def _shapes(value: Value) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in _as(dict, value).items():
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"{name!r} has no shape")
        found[str(name)] = shape
    return found


def _number(value: Value) -> int:
    """Return an int, unwrapping an enum member."""
    if isinstance(value, Record) and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, int):
        raise ValueError(f"a number is a {type(value).__name__}")
    return value


def _as(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value
