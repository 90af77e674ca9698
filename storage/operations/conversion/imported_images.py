"""Writes the state of an import as images and commits them: image by image, resumable.

No tensor of the state is in memory: chunks are read from the source files.

An interrupted import leaves its complete images in its attempt. The attempt's marker identifies
which bytes of which files make up the images (``commit.begin_import``). A later import of the same
files keeps those images and writes the rest (``docs/decisions/0078-imports-go-on.md``). Files are
compared by the storage's metadata and by samples of their bytes.

Scope: the layout of the files is already known; :mod:`.importing` determines it.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ....core.aio import at_most
from ....core.garbage import collector_paused
from ....drivers.contract import Driver
from ....errors import CheckpointError, NotFoundError, SaveError, UsageError
from ....planner.box import Box
from ....planner.columns import Ints, volumes
from ....planner.layout import Layout, box_layout
from ....planner.table import ShardTable
from ...format.digest import digest
from ...format.fragment import Fragment, Group
from ...format.manifest import Manifest, image_key
from ...format.merge import merge
from ...format.tables import ImageTable
from ...format.tree import ByRank
from ...pipeline.file_chunks import Enclosed, FileChunks, Stretch
from ...pipeline.image_writer import (
    Callbacks,
    ImageWriter,
    WrittenImage,
    check_image_size,
    stored_image,
)
from ...protocol.attempt import Attempt, check_marker, delete_attempt
from ...protocol.commit import abandon, abandon_failed, begin_import, commit, settle
from ...runtime.engine import offload
from ...state.adapters.shards import Shard
from ...state.dtypes import dtype_of
from ...state.flat_state import FlatState
from ...state.flattening.by_path import Path, flat_state_at, sound_paths
from ...state.plan import ImagePlan, plan_images
from .model_source import Model, SourceTensor, check_unchanged

_SAMPLES = 4
_SAMPLE_NBYTES = 16 << 10
"""Samples per file, and their size, used to tell a file from another of equal name, size and
time."""
_RULES = "import 1"
"""Version of the rules by which files map to image bytes. An attempt under other rules is not
resumed."""

Place = tuple[Stretch | Enclosed, int, int]


@dataclass(frozen=True, slots=True)
class ImagesJob:
    """An import of ``model`` under new names. ``image_nbytes``: see :func:`.importing.import_`."""

    model: Model
    new_names: Mapping[str, str]
    step: int | None
    budget_nbytes: int
    image_nbytes: int
    wrote: Callable[[int, int], None]


async def write_and_commit(theirs: Driver, ours: Driver, job: ImagesJob) -> tuple[str, int]:
    """Write the missing images to ``ours`` and commit.

    Returns the attempt, and the bytes of images reused from an earlier import. Images stay for a
    later import after an error, unless the error would recur: damage, a changed file, a value that
    cannot be stored. Raises like :func:`.importing.import_`.
    """
    created_s = time.time()
    with collector_paused():
        flat, sources = _source_state(job.model, job.new_names)
    plans = await offload(plan_images, flat, job.image_nbytes)
    for plan in plans:
        check_image_size(ours, plan.layout.nbytes)
    places = [_places_of(plan, sources) for plan in plans]
    images = _Images(theirs, ours, job, plans, places)
    attempt, resumed = await begin_import(ours, await images.identity())
    try:
        written = await images.write(attempt, resumed)
        head = (attempt.id, job.step, created_s)
        manifest = await offload(_manifest, head, flat, plans, written)
        manifest = replace(manifest, metadata=job.model.metadata)
        obsolete = await commit(ours, attempt, manifest)
    except (NotFoundError, SaveError):
        await abandon_failed(ours, attempt)
        raise
    except (CheckpointError, UsageError):
        await abandon(ours, attempt)
        raise
    if ours.traits.exclusive_is_atomic:
        # Otherwise a concurrent import of the same files may still put its manifest, see
        # ``commit``.
        await settle(ours, attempt)
    if obsolete is not None:
        await delete_attempt(ours, obsolete)
    return attempt.id, images.reused_nbytes


_STAND_IN = torch.empty(0)
"""Stands for every tensor, because none is in memory."""


def _source_state(
    model: Model, new_names: Mapping[str, str]
) -> tuple[FlatState, Sequence[SourceTensor]]:
    """Return a state with the contents of ``model`` under new names, and the source of each row.

    An item that keeps its name also keeps its path in the state, if known; otherwise its name is a
    top-level key. Raises StateError for a value that cannot be stored.
    """
    parts: defaultdict[str, list[SourceTensor]] = defaultdict(list)
    for tensor in model.tensors:
        parts[new_names[tensor.name]].append(tensor)
    values = {new_names[name]: value for name, value in model.values.items()}
    items = {**values, **dict.fromkeys(parts, _STAND_IN)}
    flat = flat_state_at(_paths_of(model, new_names), items)
    flat.placeholders = {}  # tensors without elements are imported as such: no module holds them
    sources = [parts[name][0] for name in flat.names]
    for name, container in list(zip(flat.names, flat.containers, strict=True)):
        further = parts[name][1:]
        flat.names += [name] * len(further)
        flat.containers += [container] * len(further)
        sources += further
    flat.shapes = [tensor.shape for tensor in sources]
    flat.dtypes = [dtype_of(tensor.dtype, tensor.itemsize) for tensor in sources]
    flat.layouts = [_layout_of(tensor) for tensor in sources]
    flat.locals = [_STAND_IN] * len(sources)
    flat.origins = [_STAND_IN] * len(sources)
    flat.alias = _aliases(sources)
    return flat, sources


def _places_of(plan: ImagePlan, sources: Sequence[SourceTensor]) -> list[Place]:
    """Return the source of each shard of an image: a place, the offset in it, and a size in
    bytes."""
    held = plan.held
    starts = (held.local_start * held.itemsize).tolist()
    sizes = (volumes(held.lengths) * held.itemsize).tolist()
    places = [sources[row].where for row in held.tensor.tolist()]
    return list(zip(places, starts, sizes, strict=True))


def _paths_of(model: Model, new_names: Mapping[str, str]) -> dict[str, Path]:
    if not model.paths:
        return {new_name: (new_name,) for new_name in new_names.values()}
    paths: dict[str, Path] = {}
    for name, new_name in new_names.items():
        path = model.paths.get(name, ())
        if new_name != name or ".".join(map(str, path)) != name:
            path = (new_name,)
        paths[new_name] = path
    return sound_paths(paths)


def _layout_of(tensor: SourceTensor) -> Layout:
    if not isinstance(tensor.part, tuple):
        box = tensor.part or Box((0,) * len(tensor.shape), tensor.shape)
        return box_layout(tensor.shape, box)
    start, stop = tensor.part
    return Shard(torch.empty(()).expand(stop - start), shape=tensor.shape, flat=tensor.part).layout


def _aliases(sources: Sequence[SourceTensor]) -> list[int]:
    """Return per row an earlier row that is the same whole tensor in the same file range, or -1."""
    first: dict[object, int] = {}
    aliases = []
    for row, tensor in enumerate(sources):
        before = row
        if tensor.where.nbytes and tensor.part is None:
            before = first.setdefault((tensor.where, tensor.dtype, tensor.shape), row)
        aliases.append(before if before != row else -1)
    return aliases


@dataclass(eq=False)
class _Images:
    """The images of one import."""

    _theirs: Driver
    _ours: Driver
    _job: ImagesJob
    _plans: Sequence[ImagePlan]
    _places: Sequence[Sequence[Place]]
    reused_nbytes: int = 0
    """Bytes of reused images."""
    _done_nbytes: int = 0

    def __post_init__(self) -> None:
        self._total_nbytes = sum(plan.layout.hashed_end for plan in self._plans)

    async def identity(self) -> str:
        """Return a digest of everything that determines the bytes of all images."""
        samples = await self._samples()
        return await offload(self._digest, samples)

    async def write(self, attempt: Attempt, resumed: bool) -> list[WrittenImage]:
        written: list[WrittenImage] = []
        for number, plan in enumerate(self._plans):
            key = image_key(attempt.id, number)
            image = None
            if resumed:
                image = await stored_image(self._ours, key, plan.layout)
            if image is not None:
                self.reused_nbytes += image.stored_nbytes
            else:
                await check_marker(self._ours, attempt)
                image = await self._write(key, number, attempt)
            self._done_nbytes += plan.layout.hashed_end
            self._job.wrote(self._done_nbytes, self._total_nbytes)
            written.append(image)
        return written

    async def _write(self, key: str, number: int, attempt: Attempt) -> WrittenImage:
        layout = self._plans[number].layout
        before_nbytes = self._done_nbytes

        async def check() -> None:
            await check_unchanged(self._theirs, self._job.model)
            await check_marker(self._ours, attempt)

        async def known_key() -> str:
            return key

        def wrote(nbytes: int, _: int) -> None:
            self._job.wrote(before_nbytes + nbytes, self._total_nbytes)

        chunks = FileChunks(layout, self._theirs, self._places[number], check)
        callbacks = Callbacks(lambda: None, lambda: None, wrote=wrote)
        budget_nbytes = self._job.budget_nbytes
        return await ImageWriter(self._ours, layout, chunks, budget_nbytes, callbacks).write(
            known_key
        )

    async def _samples(self) -> list[str]:
        """Return digests of samples from each file, in file order.

        Samples suffice to detect another version of a model: training changes most weights.
        """

        async def sample(where: Stretch) -> str:
            content = bytearray(where.nbytes)
            await self._theirs.read(where.key, where.start, memoryview(content))
            return digest(bytes(content)).hex()

        wanted = _samples(place for places in self._places for place in places)
        return await at_most(self._theirs.traits.concurrency, map(sample, wanted))

    def _digest(self, samples: Sequence[str]) -> str:
        rows: list[object] = []
        for plan, places in zip(self._plans, self._places, strict=True):
            rows.append(digest(plan.layout.header).hex())
            for place in places:
                where = _around(place)
                skip = place[0].skip if isinstance(place[0], Enclosed) else -1
                rows.append([where.key, where.start, where.nbytes, skip, *place[1:]])
        whole = [_RULES, self._theirs.uri, sorted(self._job.model.stamps.items()), rows]
        return digest(json.dumps([*whole, samples]).encode()).hex()


def _samples(places: Iterable[Place]) -> list[Stretch]:
    """Return the ranges to sample: in each file, the middle of some evenly spaced places."""
    by_file: defaultdict[str, list[Stretch]] = defaultdict(list)
    for place in places:
        where = _around(place)
        if where.nbytes:
            by_file[where.key].append(where)
    found = []
    for key in sorted(by_file):
        there = sorted(by_file[key], key=lambda where: where.start)
        chosen = {(2 * i + 1) * len(there) // (2 * _SAMPLES): None for i in range(_SAMPLES)}
        for where in (there[number] for number in chosen):
            nbytes = min(where.nbytes, _SAMPLE_NBYTES)
            found.append(Stretch(key, where.start + (where.nbytes - nbytes) // 2, nbytes))
    return found


def _around(place: Place) -> Stretch:
    if isinstance(place[0], Enclosed):
        return place[0].around
    return place[0]


def _manifest(
    head: tuple[str, int | None, float],
    flat: FlatState,
    plans: Sequence[ImagePlan],
    written: Sequence[WrittenImage],
) -> Manifest:
    """Return the manifest of these images, each of which counts as a rank with the same values.

    Raises SaveError if no reader would accept it.
    """
    ranks: Ints = np.arange(len(plans))
    tables = [
        ImageTable.of(rank, plan.layout.hashed_end, image.digests)
        for rank, plan, image in zip(ranks.tolist(), plans, written, strict=True)
    ]
    shards = ShardTable.concat([plan.shards for plan in plans])
    values: list[ByRank] = [[(ranks.tolist(), v.by_rank[0][1])] for v in flat.tree.values]
    group = Group(plans[0].reported, ranks, shards, ImageTable.joined(tables), values)
    return merge([Fragment(head, [group])])
