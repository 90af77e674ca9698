"""A state described by safetensors files: a Hugging Face folder, its index, or one file.

Names, shapes and dtypes come from the headers; no element is read. The files may come from
anywhere, so they are read as in an import: with size limits, and never outside the folder
(:mod:`...storage.operations.conversion.model_source`).
"""

from __future__ import annotations

import asyncio

from ...drivers.contract import Driver
from ...drivers.registry import opened_driver
from ...drivers.uri import Uri, divided, parse
from ...errors import UsageError
from ...storage.operations.conversion.model_source import (
    Files,
    Model,
    SourceTensor,
    find_files,
    read_model,
)
from .spec import Listed, Spec

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
TENSORS_MAX = 1_000_000


def indexed(path: str) -> Listed:
    """Return the workload of the model at ``path``, which may be a URI: a folder, or a file that
    ends in ``.safetensors.index.json`` or ``.safetensors``. Tensors without elements are omitted.

    Raises NotFoundError, DamagedError for an invalid index or header, UnsupportedFormatError, and
    UsageError if there is no tensor with elements.
    """
    place = parse(path)
    model = asyncio.run(_read(place))
    listed = tuple(spec for spec in map(_spec, model.tensors) if spec.nbytes)
    if not listed:
        raise UsageError(f"--index {path}: no tensor there has an element")
    return Listed(f"index {place.redacted}", lambda: listed)


async def _read(place: Uri) -> Model:
    folder, name = place, ""
    if place.location.endswith((_SUFFIX, _INDEX_SUFFIX)):
        folder, name = divided(place)
    async with opened_driver(folder) as driver:
        model = await read_model(driver, await _files(driver, name))
    if len(model.tensors) > TENSORS_MAX:
        raise UsageError(f"{place.redacted} has {len(model.tensors):,} tensors, too many to save")
    return model


async def _files(driver: Driver, name: str) -> Files:
    if name.endswith(_SUFFIX):
        return Files([name])
    if name:
        return await find_files(driver, [name])
    keys = sorted([info.key async for info in driver.list() if "/" not in info.key])
    return await find_files(driver, keys)


def _spec(tensor: SourceTensor) -> Spec:
    return Spec(tensor.name, tensor.shape, tensor.dtype, sharded=bool(tensor.shape))
