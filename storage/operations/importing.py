"""Makes a checkpoint of a model in safetensors files, or in a file of ``torch.save``: a save whose
chunks are read from files.

Scope: tensors, as they are. Nothing is converted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ...drivers.contract import Driver
from ...errors import DamagedError, ExistsError
from ...planner.layout import local_layout
from ..format.manifest import MANIFEST_KEY
from ..pipeline.file_chunks import FileChunks
from ..pipeline.image_writer import Progress
from ..protocol.current import current_attempt
from ..ranks.team import Solo
from ..runtime.engine import run
from ..runtime.progress import ProgressCallback, ProgressReporter
from ..state.dtypes import dtype_of
from ..state.flat_state import FlatState
from ..state.plan import ImagePlan
from .location import Place
from .model_source import Files, Model, check_unchanged, find_files, read_model
from .save import SaveJob, run_save
from .selection import chosen, refuse_values, renamed
from .torch_source import TORCH_SUFFIXES, read_torch_model

__all__ = ["ImportReport", "import_"]

BUDGET_NBYTES = 512 << 20
_FILE_SUFFIXES = (".safetensors", *TORCH_SUFFIXES)

UriLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What was made of ``source`` at ``uri``, both redacted: a checkpoint with ``nbytes`` bytes of
    ``tensors`` tensors."""

    source: str
    uri: str
    attempt: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    seconds: float


def import_(
    source: UriLike,
    uri: UriLike,
    *,
    only: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    step: int | None = None,
    overwrite: bool = False,
    budget_nbytes: int = BUDGET_NBYTES,
    source_options: Mapping[str, object] | None = None,
    uri_options: Mapping[str, object] | None = None,
    progress: ProgressCallback | None = None,
) -> ImportReport:
    """Make the checkpoint ``uri`` of the model ``source``: a safetensors file, or a folder with one
    of them, or with several and an index; or a file of ``torch.save`` (``.pt``, ``.pth``, ``.bin``,
    ``.ckpt``), of which nothing is unpickled: its tensors are found, and named by their paths.

    ``only``: patterns of names, such as ``model.*``; none: all tensors. ``rename``: patterns and
    what replaces them, such as ``{"*": "model.*"}``; the first that matches a whole name applies.
    The state of the checkpoint is a dict of the tensors by name. ``step`` is recorded with it.

    Atomic, as a save: what was at ``uri`` is replaced whole, or untouched. Files are read once, in
    chunks, within ``budget_nbytes`` of host memory. ``progress(done_nbytes, total_nbytes)`` is
    called now and then on a thread of its own, with the bytes that are written.

    Raises NotFoundError where there is no model; DamagedError where a file is not what its header or
    the index says, where an index leads out of its folder, which is refused before anything is read
    there, and where a file changes meanwhile; UnsupportedFormatError; UsageError for patterns that
    match nothing and names that would be equal; ExistsError where a checkpoint is at ``uri``
    already, unless ``overwrite``; SaveError, StorageError.
    """
    began_s = time.perf_counter()
    place = Place.of(source, source_options)
    target = Place.of(uri, uri_options)
    request = _Request(only, rename or {}, step, overwrite, budget_nbytes)
    with ProgressReporter(progress) as reporter:
        model, attempt = run(_import(place, target, request, reporter))
    return ImportReport(
        place.uri.redacted,
        target.uri.redacted,
        attempt,
        tuple(model.stamps),
        len(model.tensors),
        model.nbytes,
        time.perf_counter() - began_s,
    )


@dataclass(frozen=True, slots=True)
class _Request:
    """How to import; see :func:`import_`."""

    only: Sequence[str]
    rules: Mapping[str, str]
    step: int | None
    overwrite: bool
    budget_nbytes: int

    def chosen_of(self, model: Model) -> tuple[Model, list[str]]:
        """The tensors that are imported, and their new names. Raises UsageError."""
        names = chosen([tensor.name for tensor in model.tensors], self.only)
        new_names = renamed(names, self.rules)
        tensors = tuple(tensor for tensor in model.tensors if tensor.name in new_names)
        refuse_values(model.values, self.only)
        return Model(tensors, model.stamps), [new_names[tensor.name] for tensor in tensors]


async def _import(
    place: Place, target: Place, request: _Request, reporter: ProgressReporter
) -> tuple[Model, str]:
    folder = place
    file = None
    if place.uri.location.endswith(_FILE_SUFFIXES):
        folder, file = place.divided()
    async with folder.opened() as theirs, target.opened() as ours:
        model, names = request.chosen_of(await _model_of(theirs, file))
        await _check_free(ours, request.overwrite)
        attempt, *_ = await run_save(
            ours, Solo(), _job(theirs, model, names, request, reporter.report)
        )
        return model, attempt


async def _model_of(theirs: Driver, file: str | None) -> Model:
    """The model in a file, or in the folder."""
    if file is None:
        return await read_model(theirs, await find_files(theirs))
    if file.endswith(TORCH_SUFFIXES):
        return await read_torch_model(theirs, file)
    return await read_model(theirs, Files([file]))


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


def _aliases(model: Model) -> list[int]:
    """Per tensor, an earlier one that is the same part of a file, or -1."""
    first: dict[object, int] = {}
    aliases = []
    for row, tensor in enumerate(model.tensors):
        same = (tensor.where, tensor.dtype, tensor.shape)
        before = first.setdefault(same, row) if tensor.where.nbytes else row
        aliases.append(before if before != row else -1)
    return aliases


def _job(
    theirs: Driver,
    model: Model,
    names: Sequence[str],
    request: _Request,
    wrote: Callable[[int, int], None],
) -> SaveJob:
    """The save of a state that has these tensors by name."""
    flat = FlatState(
        names=list(names),
        containers=[0] * len(names),
        shapes=[tensor.shape for tensor in model.tensors],
        dtypes=[dtype_of(tensor.dtype, tensor.itemsize) for tensor in model.tensors],
        layouts=[local_layout(tensor.shape) for tensor in model.tensors],
        alias=_aliases(model),
    )

    def chunks_of(plan: ImagePlan) -> FileChunks:
        places = [model.tensors[row].where for row in plan.held.tensor.tolist()]
        return FileChunks(plan.layout, theirs, places, partial(check_unchanged, theirs, model))

    return SaveJob(
        flat,
        request.step,
        request.budget_nbytes // theirs.traits.read_copies,
        progress=Progress(lambda: None, lambda: None, wrote=wrote),
        chunks=chunks_of,
    )
