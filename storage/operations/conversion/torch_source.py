"""Reads the tensors of a ``torch.save`` file, named by their paths."""

from __future__ import annotations

from ....drivers.contract import Driver
from ...format.torch_pickle import StoredTensor, Value, leaves
from ...pipeline.file_chunks import Stretch
from ...runtime.engine import offload
from .archive_reader import ArchiveReader
from .model_source import Model, SourceTensor

__all__ = ["TAIL_NBYTES", "TORCH_SUFFIXES", "read_torch_model"]

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
TAIL_NBYTES = 1 << 20
"""Enough for the directory of a file with thousands of tensors."""


async def read_torch_model(driver: Driver, key: str) -> Model:
    """Read the tensors in a file, named by their paths.

    Raises DamagedError if it is not such a file; UnsupportedFormatError naming unsupported content;
    NotFoundError and StorageError.
    """
    info = await driver.stat(key)
    archive = ArchiveReader(driver, Stretch(key, 0, info.nbytes), TAIL_NBYTES)
    value = await archive.value()
    try:
        found = await offload(_by_path, value)
    except ValueError as error:
        raise archive.refused(str(error)) from error
    tensors = {name: value for name, value in found.items() if isinstance(value, StoredTensor)}
    places = await archive.places_or_records(tensors)
    return Model(
        tuple(SourceTensor(name, t.dtype, t.shape, places[name]) for name, t in tensors.items()),
        {key: (info.nbytes, info.modified_s)},
        tuple(name for name in found if name not in tensors),
    )


def _by_path(value: Value) -> dict[str, Value]:
    found = list(leaves(value))
    by_path = dict(found)
    if len(by_path) < len(found):
        raise ValueError("two of its values have the same dotted path")
    return by_path
