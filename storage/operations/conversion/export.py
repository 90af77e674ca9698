"""Exports tensors of a checkpoint for other programs, to any storage.

Formats: a Hugging Face model (whole tensors in safetensors files), one safetensors file, one
``torch.save`` file, or a folder of torch's distributed checkpoint (DCP). Files are processed in
windows: several are read and verified, converted and written at the same time, so a tensor need not
fit in memory. A file becomes visible only when complete; the file that the others depend on is
written last.

Scope: tensors, and the values that DCP stores. Configurations and tokenizers are not written.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from ....core import safetensors
from ....core.aio import at_most, side_by_side
from ....core.garbage import collector_paused
from ....drivers.contract import Driver
from ....errors import ExistsError, NotFoundError, StorageError, UsageError
from ...format.dcp_metadata import DCP_FILE, DCP_METADATA_KEY
from ...format.manifest import MANIFEST_KEY, Manifest
from ...format.model_folder import (
    INDEX_KEY,
    MODEL_FILE,
    ModelTensor,
    index_text,
    model_files,
)
from ...format.part import Selection
from ...format.torch_archive import TORCH_DTYPES, torch_file
from ...format.tree import dotted
from ...runtime.engine import offload, run
from ...runtime.progress import ProgressCallback, ProgressReporter
from ..location import Place, UriLike
from ..reading.reader import Checkpoint, manifest_of
from ..reading.reader import open as open_checkpoint
from ..reading.selection import chosen, refuse_values, renamed
from .file_export import ExportedTensors, ExportPlan, FileExport, LastFile

BUDGET_NBYTES = 512 << 20
FILE_NBYTES = 5_000_000_000
_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
    "fp64": "float64", "double": "float64",
}  # fmt: skip
_FLOATS = ("bfloat16", "float16", "float32", "float64")

Format = Literal["hf", "safetensors", "torch", "dcp"]
"""Output format: a folder of safetensors files, one such file, one ``torch.save`` file, or a folder
of torch's distributed checkpoint."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Result of an export from ``source`` to ``uri``, both redacted.

    ``tied`` maps the new name of a tied tensor to the new name under which its bytes were written.
    """

    source: str
    uri: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    tied: Mapping[str, str]
    seconds: float


def export(
    uri: UriLike | Checkpoint,
    dest: UriLike,
    *,
    format: Format = "hf",
    only: Selection = (),
    rename: Mapping[str, str] | None = None,
    dtype: str | None = None,
    file_nbytes: int = FILE_NBYTES,
    overwrite: bool = False,
    budget_nbytes: int = BUDGET_NBYTES,
    uri_options: Mapping[str, object] | None = None,
    dest_options: Mapping[str, object] | None = None,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write the tensors of the checkpoint ``uri`` to ``dest`` in another program's format. ``uri``
    may be an opened checkpoint, which stays open.

    ``format="hf"``: the folder ``dest`` becomes a Hugging Face model, with ``model.safetensors``,
    or several files of at most ``file_nbytes`` and an index. ``format="safetensors"``: the file
    ``dest`` holds all tensors, as PEFT expects of adapters. ``format="torch"``: the file ``dest``
    holds a dict for ``torch.load(weights_only=True)``. ``format="dcp"``: the folder ``dest`` can be
    read with ``torch.distributed.checkpoint.load``; it includes values, as saved by rank 0.

    ``only``: the name of a part, such as ``"model"``, or its keys, such as ``("optim", 0)``, as in
    :func:`~holdfast.load`, or a list of these; it selects that item and everything below. A ``*``
    in a name stands for any text: ``"model.*.weight"``. Empty selects all tensors. ``rename``:
    patterns and replacements such as ``{"model.*": "*"}``; the first that matches a whole name
    applies.
    ``dtype``: convert floating-point tensors, to ``bf16`` for example; other tensors are unchanged.
    Tied tensors are written once, under the first selected name; the metadata of safetensors files
    lists the other names, as safetensors' ``save_model`` does. A torch file contains all names,
    sharing memory; a DCP folder contains all names, sharing stored data.

    Every byte is verified when read. The index, ``.metadata`` or the only file appears last and
    atomically, so an interrupted call leaves no readable model; after an error, written files are
    removed. Extra host memory stays within ``budget_nbytes``. ``progress(done_nbytes,
    total_nbytes)`` is called periodically on a separate thread.

    Raises UsageError for names that match nothing, colliding names, selected small values,
    tensors that differ per rank, dtypes that the format lacks, and numbers out of range for
    ``dtype``; ExistsError if ``dest`` already contains a model, unless ``overwrite``;
    NotACheckpointError, DamagedError, ReplacedError and StorageError.
    """
    began_s = time.perf_counter()
    if format not in get_args(Format):
        raise UsageError(
            f"{format!r} is not a format", advice=f"Use one of {', '.join(get_args(Format))}."
        )
    if file_nbytes < 1:
        raise UsageError(f"files of {file_nbytes} bytes hold nothing")
    request = _Request(format, only, rename or {}, _dtype_of(dtype), file_nbytes, overwrite)
    place = Place.of(dest, dest_options)
    opened: contextlib.AbstractContextManager[Checkpoint]
    if isinstance(uri, Checkpoint):
        opened = contextlib.nullcontext(uri)
    else:
        opened = open_checkpoint(uri, storage_options=uri_options)
    with (
        opened as checkpoint,
        ProgressReporter(progress) as reporter,
    ):
        folder = place
        key = ""
        if format not in _FOLDERS:
            folder, key = place.divided()
        plan = request.plan(checkpoint, key)
        run(_export(checkpoint, folder, plan, request, budget_nbytes, reporter))
        return ExportReport(
            checkpoint.uri,
            place.uri.redacted,
            tuple(file.key for file in plan.files),
            plan.tensors,
            plan.nbytes,
            plan.tied,
            time.perf_counter() - began_s,
        )


@dataclass(frozen=True, slots=True)
class _Request:
    """Arguments of an export; see :func:`export`."""

    format: Format
    only: Selection
    rules: Mapping[str, str]
    dtype: str | None
    file_nbytes: int
    overwrite: bool

    def plan(self, checkpoint: Checkpoint, key: str) -> ExportPlan:
        """Plan the files to write; ``key`` names the file of a format with one. Raises
        UsageError."""
        if self.format == "dcp":
            from .dcp_export import plan_dcp_folder

            return plan_dcp_folder(checkpoint, self.only, self.rules, self.dtype, self.file_nbytes)
        with collector_paused():
            return self._plan_of_tensors(manifest_of(checkpoint), key)

    def _plan_of_tensors(self, m: Manifest, key: str) -> ExportPlan:
        names = chosen(m.tensors.rows, self.only)
        paths = m.tree.paths()
        refuse_values([dotted((*paths[v.container], v.key)) for v in m.tree.values], self.only)
        known = TORCH_DTYPES if self.format == "torch" else safetensors.EXPORTED_DTYPES
        exported = ExportedTensors(m.tensors, renamed(names, self.rules), self.dtype, known)
        tensors = [tensor for tensor, _ in exported.tensors]
        last = None
        if self.format == "torch":
            files = [torch_file(key, tensors, exported.tied)]
        else:
            _check_form(tensors)
            form = m.metadata.get("format", "pt")
            metadata = {**m.metadata, **exported.tied, "format": form}
            file_nbytes = self.file_nbytes if self.format == "hf" else sys.maxsize
            try:
                files = model_files(tensors, file_nbytes, metadata)
            except ValueError as error:
                advice = 'Write more files (format="hf", file_nbytes).'
                raise UsageError(str(error), advice=advice) from error
            if self.format == "safetensors":
                files = [replace(files[0], key=key)]
            elif len(files) > 1:
                last = LastFile(INDEX_KEY, partial(index_text, files))
        return ExportPlan(files, exported.sources, len(tensors), exported.tied, last)


def _dtype_of(name: str | None) -> str | None:
    """Return torch's name of a dtype. Raises UsageError unless tensors can be converted to it."""
    if name is None:
        return None
    dtype = _DTYPES.get(name, name)
    if dtype not in _FLOATS:
        raise UsageError(
            f"tensors cannot be converted to {name!r}", advice=f"Use one of {', '.join(_FLOATS)}."
        )
    return dtype


def _check_form(tensors: Sequence[ModelTensor]) -> None:
    """Raise UsageError for a tensor whose name or shape safetensors cannot represent."""
    for tensor in tensors:
        if tensor.name == safetensors.METADATA:
            raise UsageError(
                f"a tensor is named {tensor.name!r}, which safetensors reserves for metadata",
                advice=f"Give it another name: rename={{{tensor.name!r}: 'NAME'}}, or --rename.",
            )
        try:
            safetensors.from_torch(tensor.dtype, tensor.shape)
        except ValueError as error:
            raise UsageError(
                f"tensor {tensor.name!r} is two values of dtype {tensor.dtype} {error}, which "
                f"safetensors cannot hold",
                advice="Leave it out (only).",
            ) from error


async def _export(
    checkpoint: Checkpoint,
    place: Place,
    plan: ExportPlan,
    request: _Request,
    budget_nbytes: int,
    reporter: ProgressReporter,
) -> None:
    done_nbytes = 0
    total_nbytes = plan.nbytes

    def wrote(nbytes: int) -> None:
        nonlocal done_nbytes
        done_nbytes += nbytes
        reporter.report(done_nbytes, total_nbytes)

    async with place.opened() as driver:
        if request.format not in _FOLDERS:
            await _check_free(driver, plan.files[0].key, request.overwrite)
        else:
            await _empty_folder(driver, _FOLDERS[request.format], request.overwrite)
        visible: list[str] = []

        async def write() -> None:
            for file in plan.files:
                await FileExport(checkpoint, driver, file, plan.sources, budget_nbytes, wrote).run()
                visible.append(file.key)

        try:
            if plan.last is None:
                await write()
            else:
                _, content = await side_by_side(write(), offload(plan.last.content))
                await driver.put(plan.last.key, content)
        except BaseException:
            await _remove(driver, visible)
            raise


async def _check_free(driver: Driver, key: str, overwrite: bool) -> None:
    if overwrite:
        return
    with contextlib.suppress(NotFoundError):
        await driver.stat(key)
        raise ExistsError(
            "the file already exists",
            uri=driver.uri,
            key=key,
            advice="Export to another file, or replace it (overwrite).",
        )


@dataclass(frozen=True, slots=True)
class _Folder:
    """Files that block an export to a folder.

    ``last`` and ``files`` (a pattern) are written by an earlier export; readers take every file
    with one of ``suffixes`` for a part of the checkpoint.
    """

    last: str
    files: re.Pattern[str]
    suffixes: tuple[str, ...]


_FOLDERS = {
    "hf": _Folder(INDEX_KEY, MODEL_FILE, (".safetensors", ".safetensors.index.json")),
    "dcp": _Folder(DCP_METADATA_KEY, DCP_FILE, (".distcp", ".metadata")),
}


async def _empty_folder(driver: Driver, folder: _Folder, overwrite: bool) -> None:
    """Raise ExistsError if the folder has files that readers would mix up with the export.

    With ``overwrite``, delete the files of an earlier export, beginning with the file that the
    others depend on.
    """
    there = [
        info.key
        async for info in driver.list()
        if info.key == MANIFEST_KEY or ("/" not in info.key and info.key.endswith(folder.suffixes))
    ]
    foreign = [key for key in there if key != folder.last and not folder.files.fullmatch(key)]
    if there and (foreign or not overwrite):
        raise ExistsError(
            "the folder already has a model or a checkpoint",
            uri=driver.uri,
            key=(foreign or there)[0],
            advice="Export to an empty folder, or replace an earlier export (overwrite).",
        )
    if folder.last in there:
        await driver.delete(folder.last)
    await at_most(driver.traits.concurrency, map(driver.delete, there))


async def _remove(driver: Driver, keys: Sequence[str]) -> None:

    async def remove(key: str) -> None:
        with contextlib.suppress(StorageError):
            await driver.delete(key)

    await at_most(driver.traits.concurrency, map(remove, keys))
