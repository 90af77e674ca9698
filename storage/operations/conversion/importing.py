"""Imports other programs' files as a checkpoint. Its chunks are read directly from those files.

Scope: tensors without conversion, and small values if the format names them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ....drivers.contract import Driver
from ....errors import DamagedError, ExistsError, UsageError
from ...format.dcp_metadata import DCP_METADATA_KEY
from ...format.manifest import MANIFEST_KEY
from ...format.part import Selection
from ...format.torch_pickle import StoredTensor, Value, leaves
from ...protocol.current import current_attempt
from ...runtime.engine import run
from ...runtime.progress import ProgressCallback, ProgressReporter
from ..location import Place, UriLike
from ..reading.selection import chosen, refuse_values, renamed, without
from .archive_reader import read_archive
from .dcp_source import read_contents, read_items
from .deepspeed_source import deepspeed_folder, read_deepspeed_model
from .imported_images import ImagesJob, write_and_commit
from .megatron_source import is_megatrons, read_megatron_model
from .model_source import (
    Files,
    Model,
    SourceTensor,
    find_files,
    indexed_files,
    is_index,
    read_model,
    stamps_of,
)

BUDGET_NBYTES = 512 << 20
IMAGE_NBYTES = 4 << 30
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_FILE_SUFFIXES = (".safetensors", *_TORCH_SUFFIXES)


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Result of an import from ``source`` to ``uri``, both redacted.

    ``nbytes``: size of the ``tensors`` tensors. ``reused_nbytes``: size of images that an earlier,
    interrupted import had written.
    """

    source: str
    uri: str
    attempt: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    reused_nbytes: int
    seconds: float


def import_(
    source: UriLike,
    uri: UriLike,
    *,
    only: Selection = (),
    skip: Selection = (),
    rename: Mapping[str, str] | None = None,
    step: int | None = None,
    overwrite: bool = False,
    budget_nbytes: int = BUDGET_NBYTES,
    image_nbytes: int = IMAGE_NBYTES,
    source_options: Mapping[str, object] | None = None,
    uri_options: Mapping[str, object] | None = None,
    progress: ProgressCallback | None = None,
) -> ImportReport:
    """Import ``source`` as the checkpoint ``uri``. ``source`` is one of

    - a safetensors file, a folder with one, a folder with several and an index, or that index;
    - a ``torch.save`` file (``.pt``, ``.pth``, ``.bin``, ``.ckpt``);
    - a folder of torch's distributed checkpoint, with a file ``.metadata``;
    - such a folder written by Megatron-core, also with an additional ``common.pt``;
    - a folder of DeepSpeed's ZeRO with ``latest``, or one of its subfolders.

    Pickles are read as data, never unpickled. Tensors of a ``torch.save`` file are named by their
    paths.

    ``only``: the names to import, such as ``"model"``, as in :func:`~holdfast.export`; empty
    selects everything. ``skip``: the names to exclude, likewise. ``rename``: patterns and
    replacements such as ``{"*": "model.*"}``; the first that matches a whole name applies. The
    state of the checkpoint is a dict by name. Items of a distributed checkpoint that keep their
    name also keep their place in the state; items from Megatron go where a loading job expects
    them. ``step`` is recorded in the checkpoint.

    Atomic like a save: existing contents of ``uri`` are replaced completely or stay untouched.
    Files are read once, in chunks, within ``budget_nbytes`` of host memory. ``progress(done_nbytes,
    total_nbytes)`` is called periodically on a separate thread, counting bytes at the destination.

    An interrupted import resumes if it is called again with the same source, selection and names:
    images already complete at the destination are not written again, unless a file has changed. An
    image holds ``image_nbytes`` of tensors, or one larger tensor. If all tensors fit into one
    image, an interrupted import starts over.

    Raises NotFoundError if there is no model; DamagedError if a file contradicts its header, the
    index or ``.metadata``, if an index points outside its folder (checked before anything is read
    there), or if a file changes during the import; UnsupportedFormatError, naming unsupported
    content of a pickle or of ``.metadata``; UsageError for names that match nothing and for
    colliding names; ExistsError if ``uri`` already has a checkpoint, unless ``overwrite``;
    SaveError and StorageError.
    """
    began_s = time.perf_counter()
    place = Place.of(source, source_options)
    target = Place.of(uri, uri_options)
    request = _Request(only, skip, rename or {}, step, overwrite, budget_nbytes, image_nbytes)
    if image_nbytes < 1:
        raise UsageError(f"image_nbytes is {image_nbytes:,}, and must be at least 1")
    with ProgressReporter(progress) as reporter:
        model, attempt, reused_nbytes = run(_import(place, target, request, reporter))
    return ImportReport(
        place.uri.redacted,
        target.uri.redacted,
        attempt,
        tuple(model.stamps),
        len({tensor.name for tensor in model.tensors}),
        model.nbytes,
        reused_nbytes,
        time.perf_counter() - began_s,
    )


@dataclass(frozen=True, slots=True)
class _Request:
    """Arguments of an import; see :func:`import_`."""

    only: Selection
    skip: Selection
    rules: Mapping[str, str]
    step: int | None
    overwrite: bool
    budget_nbytes: int
    image_nbytes: int

    def chosen(self, names: Iterable[str]) -> list[str]:
        return without(chosen(names, self.only), self.skip)

    def new_names(self, model: Model) -> dict[str, str]:
        refuse_values(without(model.left, self.skip), self.only)
        return renamed(self.chosen(model.names), self.rules)


async def _import(
    place: Place, target: Place, request: _Request, reporter: ProgressReporter
) -> tuple[Model, str, int]:
    folder = place
    file = None
    if place.uri.location.endswith(_FILE_SUFFIXES) or is_index(place.uri.location):
        folder, file = place.divided()
    async with folder.opened() as theirs, target.opened() as ours:
        model = await _model_of(theirs, file, request)
        new_names = request.new_names(model)
        await _check_free(ours, request.overwrite)
        model = model.of(new_names)
        budget_nbytes = request.budget_nbytes // (1 + theirs.traits.read_copies)
        job = ImagesJob(
            model, new_names, request.step, budget_nbytes, request.image_nbytes, reporter.report
        )
        return model, *await write_and_commit(theirs, ours, job)


async def _model_of(theirs: Driver, file: str | None, request: _Request) -> Model:
    if file is None:
        return await _model_of_folder(theirs, request)
    if file.endswith(_TORCH_SUFFIXES):
        return await _torch_model(theirs, file)
    if is_index(file):
        return await read_model(theirs, await indexed_files(theirs, file))
    return await read_model(theirs, Files([file]))


async def _model_of_folder(theirs: Driver, request: _Request) -> Model:
    keys = sorted([info.key async for info in theirs.list() if "/" not in info.key])
    if DCP_METADATA_KEY in keys:
        contents = await read_contents(theirs)
        if is_megatrons(keys, contents):
            return await read_megatron_model(theirs, contents, request.chosen)
        names = request.chosen([*contents.tensors, *contents.values])
        return await read_items(theirs, contents, names)
    zero = await deepspeed_folder(theirs, keys)
    if zero is not None:
        return await read_deepspeed_model(theirs, zero)
    return await read_model(theirs, await find_files(theirs, keys))


async def _torch_model(driver: Driver, key: str) -> Model:
    stamps = await stamps_of(driver, [key])
    archive, found = await read_archive(driver, key, _by_path)
    tensors = {name: value for name, value in found.items() if isinstance(value, StoredTensor)}
    places = await archive.places_or_records(tensors)
    return Model(
        tuple(SourceTensor(name, t.dtype, t.shape, places[name]) for name, t in tensors.items()),
        stamps,
        tuple(name for name in found if name not in tensors),
    )


def _by_path(value: Value) -> dict[str, Value]:
    found = list(leaves(value))
    by_path = dict(found)
    if len(by_path) < len(found):
        raise ValueError("two of its values have the same dotted path")
    return by_path


async def _check_free(ours: Driver, overwrite: bool) -> None:
    if overwrite:
        return
    try:
        there = await current_attempt(ours)
    except DamagedError:
        there = "damaged"
    if there is not None:
        raise ExistsError(
            "a checkpoint already exists",
            uri=ours.uri,
            key=MANIFEST_KEY,
            advice="Import to another URI, or replace it (overwrite).",
        )
