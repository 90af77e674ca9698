"""Plans a save on one rank: from a flat state to an image layout, and to the source of its
bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...core.lru import LruCache
from ...planner.balance import Group
from ...planner.columns import padded
from ...planner.image import ImageLayout, lay_out, shard_names
from ...planner.layout import regions_of
from ...planner.saving import Holdings, divide
from ...planner.table import ShardTable, TensorTable
from ..format.fragment import StateLayout, layout_of
from .capture.lazy import LazyCapture
from .dtypes import dtype_name
from .fingerprint import label
from .flat_state import FlatState
from .source import ImageSource

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Agreed:
    """Facts that the ranks of a job have agreed on. The same object is kept from save to save.

    ``holders``: the ranks that hold the same bytes, for each row whose replicas a rank alone cannot
    know; an empty tuple if ranks differ and each keeps its own. ``shares``: for groups of ranks
    that do not divide their holdings evenly, see :func:`...planner.saving.divide`.
    """

    holders: Mapping[int, tuple[int, ...]]
    shares: Mapping[Group, tuple[int, ...]]


@dataclass(frozen=True)
class ImagePlan:
    """The plan of one rank's image, independent of the tensors' contents.

    ``shards`` and ``layout`` say where everything lies, ``held`` which boxes of local tensors it
    is. ``reported``: all tensors and containers this rank knows, as reported to the committing
    rank.
    """

    tensors: TensorTable
    shards: ShardTable
    layout: ImageLayout
    held: Holdings
    reported: StateLayout


@dataclass(frozen=True)
class SavePlan(ImagePlan):
    """An image plan, with the source of its bytes."""

    source: ImageSource


def _tensor_table(flat: FlatState, alias: Ints, owner: Ints) -> TensorTable:
    kinds = list(dict.fromkeys(flat.dtypes))
    code = {dtype: i for i, dtype in enumerate(kinds)}
    ndim = np.fromiter(map(len, flat.shapes), np.int64, len(flat.shapes))
    return TensorTable(
        names=tuple(flat.names),
        dtype=np.array([code[d] for d in flat.dtypes], np.uint8),
        dtypes=tuple((dtype_name(d), d.itemsize) for d in kinds),
        ndim=ndim,
        shape=padded(flat.shapes, int(ndim.max(initial=1)), 1),
        alias=alias,
        owner=owner,
    )


def plan_save(
    flat: FlatState, rank: int, agreed: Agreed | None, lazy: LazyCapture | None = None
) -> SavePlan:
    """Return the plan of :func:`plan_image`, bound to the current tensors. Recent plans are
    cached."""
    key = (rank, flat.layout_id, agreed)  # these determine the plan
    plan = None
    if flat.layout_id is not None:
        plan = _known.get(key)
    if plan is None:
        plan = plan_image(flat, rank, agreed)
        if flat.layout_id is not None:
            _known.put(key, plan)
    source = ImageSource(
        plan.layout, plan.held, flat.locals, plan.tensors.ndim[plan.held.tensor], lazy
    )
    return SavePlan(plan.tensors, plan.shards, plan.layout, plan.held, plan.reported, source)


_known: LruCache[ImagePlan] = LruCache(8)


def plan_image(flat: FlatState, rank: int, agreed: Agreed | None) -> ImagePlan:
    """Lay out the image of ``rank``. Without ``agreed``, this process is alone."""
    holders: Mapping[int, tuple[int, ...]] = {}
    shares: Mapping[Group, tuple[int, ...]] = {}
    if agreed is not None:
        holders = agreed.holders
        shares = agreed.shares
    alias = np.array(flat.alias, np.int64)
    if agreed is not None:
        for row in np.flatnonzero(alias >= 0).tolist():
            if holders.get(row) != holders.get(int(alias[row])):
                alias[row] = -1  # tied here, but not everywhere
    owner = np.full(len(flat.names), -1, np.int64)
    owner[[row for row, ranks in holders.items() if not ranks]] = rank
    owner = np.where(alias < 0, owner, owner[alias])
    tensors = _tensor_table(flat, alias, owner)
    held = divide(_holdings(flat, tensors, rank, holders), rank, shares)
    reported = layout_of(tensors, np.array(flat.containers, np.int64), flat.tree)
    return _laid_out(tensors, held, reported)


def plan_images(flat: FlatState, image_nbytes: int) -> list[ImagePlan]:
    """Lay out the images of a process that is alone.

    Each image has shards of at most ``image_nbytes`` in total, or a single larger one. Shards are
    in order across images, and each refers to its image by number.
    """
    whole = plan_image(flat, 0, None)
    begins = _begins(whole.held.nbytes.tolist(), image_nbytes)
    if len(begins) == 1:
        return [whole]
    rows = np.split(np.arange(len(whole.held)), begins[1:])
    return [
        _laid_out(whole.tensors, whole.held.take(some), whole.reported, number)
        for number, some in enumerate(rows)
    ]


def _begins(sizes: Sequence[int], most_nbytes: int) -> list[int]:
    """Return the first row of each image, if no image may exceed ``most_nbytes``."""
    begins = [0]
    room_nbytes = most_nbytes
    for row, nbytes in enumerate(sizes):
        if nbytes > room_nbytes and row > begins[-1]:
            begins.append(row)
            room_nbytes = most_nbytes
        room_nbytes -= nbytes
    return begins


def _laid_out(
    tensors: TensorTable, held: Holdings, reported: StateLayout, number: int = 0
) -> ImagePlan:
    """Return the plan of image ``number`` of this process, which holds all of ``held``."""
    ndim = tensors.ndim[held.tensor]
    dtypes = [tensors.dtypes[code][0] for code in tensors.dtype[held.tensor].tolist()]
    fqns = [tensors.names[row] for row in held.tensor.tolist()]
    names = shard_names(fqns, tensors.shape[held.tensor], ndim, held.offsets, held.lengths)
    layout = lay_out(names, dtypes, held.lengths, ndim, held.itemsize)
    image = np.full(len(held.tensor), number, np.int64)
    unsorted = ShardTable(held.tensor, held.offsets, held.lengths, image, layout.start)
    shards = ShardTable.concat([unsorted])
    return ImagePlan(tensors, shards, layout, held, reported)


def _holdings(
    flat: FlatState, tensors: TensorTable, rank: int, holders: Mapping[int, tuple[int, ...]]
) -> Holdings:
    """Return everything this rank holds, piece by piece, without aliases.

    ``holders``: see :class:`Agreed`; for the other rows, the layouts know theirs.
    """
    width = tensors.shape.shape[1]
    alone = (rank,)
    groups = _Groups()
    groups.number(alone)
    rows = np.flatnonzero(tensors.alias < 0)
    layouts = [flat.layouts[row] for row in rows.tolist()]
    group = [
        groups.number(holders.get(row) or layout.holders or alone)
        for row, layout in zip(rows.tolist(), layouts, strict=True)
    ]
    regions = regions_of(layouts, width)
    of_row = rows[regions.tensor]
    sort_keys: Sequence[str] = flat.names  # all ranks order their holdings alike
    if len(set(flat.names)) < len(flat.names):  # several parts of one name
        sort_keys = [label(flat, row) for row in range(len(flat.names))]
    return Holdings(
        tensor=of_row,
        offsets=regions.offsets,
        lengths=regions.lengths,
        local_start=regions.local_start,
        local_shape=regions.local_shape,
        itemsize=tensors.itemsize[of_row],
        group=np.array(group, np.int64)[regions.tensor],
        groups=tuple(groups.numbers),
        order=_order(sort_keys, of_row, len(groups.numbers)),
    )


class _Groups:
    """Groups of ranks, numbered in order of appearance.

    They are looked up by identity first: thousands of tensors share a group of thousands.
    """

    def __init__(self) -> None:
        self.numbers: dict[Group, int] = {}
        self._by_id: dict[int, int] = {}

    def number(self, ranks: Group) -> int:
        """Return the number of ``ranks``, which must outlive this object."""
        number = self._by_id.get(id(ranks))
        if number is None:
            number = self._by_id[id(ranks)] = self.numbers.setdefault(ranks, len(self.numbers))
        return number


def _order(names: Sequence[str], row: Ints, groups: int) -> Ints:
    """Return sort keys that all holders of a group agree on: by name, then by piece."""
    if groups == 1:
        return np.arange(len(row))
    by_name = np.empty(len(names), np.int64)
    by_name[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    return by_name[row] * (len(row) + 1) + np.arange(len(row))
