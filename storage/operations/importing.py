"""Makes a checkpoint of what other programs have written: its chunks are read from their files.

Scope: tensors, as they are, and small values where the format names them. Nothing is converted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...drivers.contract import Driver
from ...errors import DamagedError, ExistsError, UsageError
from ..format.dcp_metadata import DCP_METADATA_KEY
from ..format.manifest import MANIFEST_KEY
from ..protocol.current import current_attempt
from ..runtime.engine import run
from ..runtime.progress import ProgressCallback, ProgressReporter
from .dcp_source import read_dcp_model
from .deepspeed_source import deepspeed_folder, read_deepspeed_model
from .imported_images import ImagesJob, write_and_commit
from .location import Place
from .megatron_source import MEGATRON_COMMON_KEY, read_megatron_model
from .model_source import Files, Model, find_files, indexed_files, is_index, read_model
from .selection import chosen, refuse_values, renamed, without
from .source_state import source_state
from .torch_source import TORCH_SUFFIXES, read_torch_model

__all__ = ["ImportReport", "import_"]

BUDGET_NBYTES = 512 << 20
IMAGE_NBYTES = 4 << 30
_FILE_SUFFIXES = (".safetensors", *TORCH_SUFFIXES)

UriLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What was made of ``source`` at ``uri``, both redacted: a checkpoint with ``nbytes`` bytes of
    ``tensors`` tensors. ``reused_nbytes`` are those of images that were there already, from an
    earlier import that was interrupted."""

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
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    step: int | None = None,
    overwrite: bool = False,
    budget_nbytes: int = BUDGET_NBYTES,
    image_nbytes: int = IMAGE_NBYTES,
    source_options: Mapping[str, object] | None = None,
    uri_options: Mapping[str, object] | None = None,
    progress: ProgressCallback | None = None,
) -> ImportReport:
    """Make the checkpoint ``uri`` of ``source``, which is one of

    - a safetensors file, or a folder with one of them, or with several and an index, or that
      index;
    - a file of ``torch.save`` (``.pt``, ``.pth``, ``.bin``, ``.ckpt``);
    - a folder of torch's distributed checkpoint, with a file ``.metadata``;
    - such a folder of Megatron-core, with ``common.pt`` beside it;
    - a folder of DeepSpeed's ZeRO, with ``latest``, or one of the folders in it.

    Nothing is unpickled: pickles are read as data. The tensors of a file of ``torch.save`` are
    named by their paths.

    ``only``: patterns of names, such as ``model.*``; none: all. ``skip``: patterns of names that
    are left out all the same. ``rename``: patterns and what replaces them, such as
    ``{"*": "model.*"}``; the first that matches a whole name applies. The state of the checkpoint
    is a dict by name; what comes from a distributed checkpoint, and keeps its name, is where it was
    in the state; what comes from Megatron, where a job that loads looks for it. ``step`` is
    recorded with it.

    Atomic, as a save: what was at ``uri`` is replaced whole, or untouched. Files are read once, in
    chunks, within ``budget_nbytes`` of host memory. ``progress(done_nbytes, total_nbytes)`` is
    called now and then on a thread of its own, with the bytes that are at the destination.

    Interrupted, it goes on where it stopped when it is called again with the same source, choice
    and names: images that are whole at the destination are not written again, unless a file has
    changed. An image has ``image_nbytes`` of tensors, or a larger one alone; where all tensors have
    no more, there is one image, and what was written of it is lost.

    Raises NotFoundError where there is no model; DamagedError where a file is not what its header,
    the index or ``.metadata`` says, where an index leads out of its folder, which is refused before
    anything is read there, and where a file changes meanwhile; UnsupportedFormatError, by name, for
    what a pickle should not name, or ``.metadata`` not say; UsageError for patterns that
    match nothing and names that would be equal; ExistsError where a checkpoint is at ``uri``
    already, unless ``overwrite``; SaveError, StorageError.
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
    """How to import; see :func:`import_`."""

    only: Sequence[str]
    skip: Sequence[str]
    rules: Mapping[str, str]
    step: int | None
    overwrite: bool
    budget_nbytes: int
    image_nbytes: int

    def chosen(self, names: Iterable[str]) -> list[str]:
        """The names of what is imported. Raises UsageError."""
        return without(chosen(names, self.only), self.skip)

    def new_names(self, model: Model) -> dict[str, str]:
        """What is imported, by name, and its new name. Raises UsageError."""
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
        flat, sources = source_state(model, new_names)
        budget_nbytes = request.budget_nbytes // (1 + theirs.traits.read_copies)
        wrote = reporter.report
        job = ImagesJob(
            model, flat, sources, request.step, budget_nbytes, request.image_nbytes, wrote
        )
        return model, *await write_and_commit(theirs, ours, job)


async def _model_of(theirs: Driver, file: str | None, request: _Request) -> Model:
    """The model in a file, or in the folder."""
    if file is None:
        return await _model_of_folder(theirs, request)
    if file.endswith(TORCH_SUFFIXES):
        return await read_torch_model(theirs, file)
    if is_index(file):
        return await read_model(theirs, await indexed_files(theirs, file))
    return await read_model(theirs, Files([file]))


async def _model_of_folder(theirs: Driver, request: _Request) -> Model:
    keys = sorted([info.key async for info in theirs.list() if "/" not in info.key])
    if DCP_METADATA_KEY in keys and MEGATRON_COMMON_KEY in keys:
        return await read_megatron_model(theirs, request.chosen)
    if DCP_METADATA_KEY in keys:
        return await read_dcp_model(theirs, request.chosen)
    zero = await deepspeed_folder(theirs, keys)
    if zero is not None:
        return await read_deepspeed_model(theirs, zero)
    return await read_model(theirs, await find_files(theirs, keys))


async def _check_free(ours: Driver, overwrite: bool) -> None:
    """Raise ExistsError where a checkpoint is there that may not be replaced."""
    if overwrite:
        return
    try:
        there = await current_attempt(ours)
    except DamagedError:
        there = "damaged"
    if there is not None:
        raise ExistsError(
            "a checkpoint is there",
            uri=ours.uri,
            key=MANIFEST_KEY,
            advice="Import to another URI, or replace it (overwrite).",
        )
