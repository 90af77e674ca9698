"""A state as safetensors files describe it: a folder of Hugging Face, its index, or one file. Of
the tensors, headers tell the names, shapes and dtypes; no element is read.

Files come from anywhere, and are read as those that are imported: limited in size, and never
outside of the folder (:mod:`...storage.operations.model_source`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ...drivers.contract import Driver
from ...drivers.registry import open_driver
from ...drivers.uri import Uri, divided, parse
from ...errors import UsageError
from ...storage.operations.model_source import Files, Model, SourceTensor, find_files, read_model
from .spec import Spec, check_rank, nbytes_of_specs

__all__ = ["Indexed", "indexed"]

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
TENSORS_MAX = 1_000_000


@dataclass(frozen=True)
class Indexed:
    """The tensors of a model, sharded along dimension 0 over the ranks of the job; those without
    dimensions are the first rank's. Tensors without elements are left out."""

    name: str
    listed: tuple[Spec, ...]

    @property
    def world(self) -> None:
        """Any number of ranks."""
        return

    def specs(self, rank: int, world: int) -> list[Spec]:
        """See :class:`.spec.Workload`."""
        check_rank(rank, world)
        return [spec for spec in self.listed if spec.sharded or rank == 0]

    def nbytes(self, rank: int, world: int) -> int:
        """See :class:`.spec.Workload`."""
        return nbytes_of_specs(self.specs(rank, world), rank, world)


def indexed(path: str) -> Indexed:
    """The workload of the model at ``path``, which may be a URI: a folder, a file that ends in
    ``.safetensors.index.json``, or one that ends in ``.safetensors``.

    Raises what reading it raises: NotFoundError, DamagedError where an index or a header is not
    what it should be, UnsupportedFormatError; and UsageError where there is no tensor.
    """
    place = parse(path)
    model = asyncio.run(_read(place))
    listed = tuple(spec for spec in map(_spec, model.tensors) if spec.nbytes)
    if not listed:
        raise UsageError(f"--index {path}: no tensor there has an element")
    return Indexed(f"index {place.redacted}", listed)


async def _read(place: Uri) -> Model:
    folder, name = place, ""
    if place.location.endswith((_SUFFIX, _INDEX_SUFFIX)):
        folder, name = divided(place)
    driver = open_driver(folder)
    try:
        model = await read_model(driver, await _files(driver, name))
    finally:
        await driver.close()
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
