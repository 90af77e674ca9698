"""Writes the tensors of a checkpoint as a model of Hugging Face's (whole tensors in safetensors files),
or as a file of ``torch.save``, in any storage.

Files are written in windows, each of which is read and verified, converted if that is asked for, and
written, while others are under way; so a tensor need not fit in memory. A file is visible when it is
whole, and the index of several files is written last.

Scope: tensors. Configurations, tokenizers and small values are not written.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ...core import safetensors
from ...core.aio import at_most
from ...drivers.contract import Driver
from ...errors import ExistsError, NotFoundError, StorageError, UsageError
from ...planner.table import TensorTable
from ..format.manifest import MANIFEST_KEY
from ..format.model_folder import (
    INDEX_KEY,
    ModelFile,
    ModelTensor,
    index_text,
    is_model_file,
    model_files,
)
from ..format.torch_archive import TORCH_DTYPES, torch_file
from ..format.torch_pickle import NEW_DTYPES
from ..format.tree import Tree, dotted
from ..runtime.engine import run
from ..runtime.progress import ProgressCallback, ProgressReporter
from .file_export import FileExport, Source
from .location import Place
from .reader import Checkpoint, manifest_of
from .reader import open as open_checkpoint
from .selection import chosen, refuse_values, renamed

__all__ = ["ExportReport", "export"]

BUDGET_NBYTES = 512 << 20
FILE_NBYTES = 5_000_000_000
_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
    "fp64": "float64", "double": "float64",
}  # fmt: skip
_FLOATS = ("bfloat16", "float16", "float32", "float64")

UriLike = str | os.PathLike[str]
Format = Literal["hf", "torch"]
"""What is written: a folder of safetensors files, or one file of ``torch.save``."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written from ``source`` to ``uri``, both redacted. ``tied`` are tensors that are
    tied to others, whose bytes were written once: by new name, the new name of the other."""

    source: str
    uri: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    tied: Mapping[str, str]
    seconds: float


def export(
    uri: UriLike,
    dest: UriLike,
    *,
    format: Format = "hf",
    only: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    dtype: str | None = None,
    file_nbytes: int = FILE_NBYTES,
    overwrite: bool = False,
    budget_nbytes: int = BUDGET_NBYTES,
    uri_options: Mapping[str, object] | None = None,
    dest_options: Mapping[str, object] | None = None,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write the tensors of the checkpoint ``uri`` to the folder ``dest``, as a model of Hugging
    Face's: ``model.safetensors``, or several files of at most ``file_nbytes`` with an index; or, with
    ``format="torch"``, to the file ``dest``, as a dict that ``torch.load(weights_only=True)`` reads.

    ``only``: patterns of names, such as ``model.*``; none: all tensors. ``rename``: patterns and
    what replaces them, such as ``{"model.*": "*"}``; the first that matches a whole name applies.
    ``dtype``: what floating-point tensors are converted to, such as ``bf16``; other tensors stay as
    they are. Tied tensors are written once, under the name of the first that is chosen; the metadata
    of the files name the others, as safetensors' ``save_model`` does. In a file of torch, all names
    are there, and share their memory.

    Every byte is verified when it is read. The index, or the only file, appears last and at once, so
    what an interrupted call leaves is no model; an error removes it. Extra host memory stays within
    ``budget_nbytes``.
    ``progress(done_nbytes, total_nbytes)`` is called now and then on a thread of its own.

    Raises UsageError for patterns that match nothing, names that would be equal, small values among
    what is chosen, tensors that ranks have for themselves, dtypes that such files do not have, and
    numbers too large for ``dtype``; ExistsError where a model is at ``dest`` already,
    unless ``overwrite``; NotACheckpointError, DamagedError, ReplacedError, StorageError.
    """
    began_s = time.perf_counter()
    if format not in get_args(Format):
        raise UsageError(f"{format!r} is no format", advice="Known are hf and torch.")
    if file_nbytes < 1:
        raise UsageError(f"files of {file_nbytes} bytes hold nothing")
    place = Place.of(dest, dest_options)
    with (
        open_checkpoint(uri, storage_options=uri_options) as checkpoint,
        ProgressReporter(progress) as reporter,
    ):
        known = TORCH_DTYPES if format == "torch" else safetensors.DTYPES
        selection = _Selection(checkpoint, only, rename or {}, _dtype_of(dtype), known)
        folder = place
        if format == "torch":
            folder, key = place.divided()
            files = [torch_file(key, [t for t, _ in selection.tensors], selection.tied)]
        else:
            files = _files_of(selection, file_nbytes)
        sources = {tensor.name: source for tensor, source in selection.tensors}
        run(_export(checkpoint, folder, files, sources, overwrite, budget_nbytes, reporter))
        return ExportReport(
            checkpoint.uri,
            place.uri.redacted,
            tuple(file.key for file in files),
            len(sources),
            sum(file.nbytes for file in files),
            selection.tied,
            time.perf_counter() - began_s,
        )


def _dtype_of(name: str | None) -> str | None:
    """Torch's name of a dtype. Raises UsageError for what tensors are not converted to."""
    if name is None:
        return None
    dtype = _DTYPES.get(name, name)
    if dtype not in _FLOATS:
        raise UsageError(
            f"tensors are not converted to {name!r}", advice=f"Known are {', '.join(_FLOATS)}."
        )
    return dtype


class _Selection:
    """The tensors that are written, under their new names, and where they come from."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        only: Sequence[str],
        rules: Mapping[str, str],
        dtype: str | None,
        known: Collection[str],
    ) -> None:
        m = manifest_of(checkpoint)
        self._table = m.tensors
        self._dtype = dtype
        self._known = known
        names = chosen(m.tensors.rows, only)
        refuse_values(_names_of_values(m.tree), only)
        _refuse_own(m.tensors, names)
        new_names = renamed(names, rules)
        self.tied: dict[str, str] = {}
        self.tensors: list[tuple[ModelTensor, Source]] = []
        by_stored_row: dict[int, str] = {}
        for name in names:
            (row,) = m.tensors.rows[name]
            stored = m.tensors.stored_row(row)
            first = by_stored_row.setdefault(stored, new_names[name])
            if first == new_names[name]:
                self.tensors.append(self._of(stored, new_names[name]))
            else:
                self.tied[new_names[name]] = first

    def _of(self, row: int, name: str) -> tuple[ModelTensor, Source]:
        t = self._table
        stored_dtype, itemsize = t.dtypes[t.dtype[row]]
        dtype = stored_dtype
        if self._dtype is not None and "float" in stored_dtype:
            dtype = self._dtype
        if dtype not in self._known:
            raise UsageError(
                f"tensor {t.names[row]!r} is of dtype {dtype}, which such files do not have",
                advice="Leave it out (only).",
            )
        convert_to = None
        if dtype != stored_dtype:
            convert_to = dtype
            itemsize = NEW_DTYPES[dtype]
        tensor = ModelTensor(name, dtype, itemsize, t.shape_of(row))
        return tensor, Source(row, t.dtypes[t.dtype[row]], convert_to)


def _names_of_values(tree: Tree) -> list[str]:
    paths = tree.paths()
    return [dotted((*paths[v.container], v.key)) for v in tree.values]


def _refuse_own(tensors: TensorTable, names: Sequence[str]) -> None:
    """Raise UsageError where ranks have tensors of their own under one name."""
    for name in names:
        if tensors.owner[tensors.rows[name][0]] >= 0:
            raise UsageError(
                f"tensor {name!r} is another one on each rank",
                advice="Leave it out (only), or read it with Checkpoint.read.",
            )


def _files_of(selection: _Selection, file_nbytes: int) -> list[ModelFile]:
    metadata = {**selection.tied, "format": "pt"}
    try:
        return model_files([tensor for tensor, _ in selection.tensors], file_nbytes, metadata)
    except ValueError as error:
        raise UsageError(str(error), advice="Write more files (file_nbytes).") from error


async def _export(
    checkpoint: Checkpoint,
    place: Place,
    files: Sequence[ModelFile],
    sources: Mapping[str, Source],
    overwrite: bool,
    budget_nbytes: int,
    reporter: ProgressReporter,
) -> None:
    total_nbytes = sum(file.nbytes for file in files)
    done_nbytes = 0

    def wrote(nbytes: int) -> None:
        nonlocal done_nbytes
        done_nbytes += nbytes
        reporter.report(done_nbytes, total_nbytes)

    async with place.opened() as driver:
        await _make_room(driver, files, overwrite)
        visible: list[str] = []
        try:
            for file in files:
                await FileExport(checkpoint, driver, file, sources, budget_nbytes, wrote).run()
                visible.append(file.key)
            if len(files) > 1:
                await driver.put(INDEX_KEY, index_text(files))
        except BaseException:
            await _remove(driver, visible)
            raise


async def _make_room(driver: Driver, files: Sequence[ModelFile], overwrite: bool) -> None:
    if is_model_file(files[0].key):
        await _empty_folder(driver, overwrite)
    elif not overwrite:
        with contextlib.suppress(NotFoundError):
            await driver.stat(files[0].key)
            raise ExistsError(
                "a file is there",
                uri=driver.uri,
                key=files[0].key,
                advice="Export to another one, or replace it (overwrite).",
            )


async def _empty_folder(driver: Driver, overwrite: bool) -> None:
    """Raise ExistsError where there are files that readers would take for parts of this model. With
    ``overwrite`` delete those of an earlier export: first of all the index, without which the others
    are no model."""
    there = [
        info.key async for info in driver.list() if "/" not in info.key and _is_in_the_way(info.key)
    ]
    foreign = [key for key in there if key != INDEX_KEY and not is_model_file(key)]
    if there and (foreign or not overwrite):
        raise ExistsError(
            "a model or a checkpoint is there",
            uri=driver.uri,
            key=(foreign or there)[0],
            advice="Export to an empty folder, or replace an earlier export (overwrite).",
        )
    if INDEX_KEY in there:
        await driver.delete(INDEX_KEY)
    await at_most(driver.traits.concurrency, map(driver.delete, there))


def _is_in_the_way(key: str) -> bool:
    return key == MANIFEST_KEY or key.endswith((".safetensors", ".safetensors.index.json"))


async def _remove(driver: Driver, keys: Sequence[str]) -> None:
    """Delete files, as far as the storage answers."""

    async def remove(key: str) -> None:
        with contextlib.suppress(StorageError):
            await driver.delete(key)

    await at_most(driver.traits.concurrency, map(remove, keys))
