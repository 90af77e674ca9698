"""Fragments: the columns that ranks send to the leader for the manifest.

Ranks of one kind (the data-parallel and tensor-parallel ranks of a pipeline stage, say) have the
same tensors and containers, so they share a *layout*. A fragment is a list of groups of ranks. Each
group has a layout and the data that differs between its ranks: the columns of shards and images,
and values. Joining fragments concatenates the columns of groups with equal layouts, without a loop
over tensors. ``merge`` builds the manifest from them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ...core.forks.cached import cached_property
from ...errors import DamagedError
from ...planner.columns import Bools, Ints, widen
from ...planner.image import BLOCK_NBYTES, CHUNK_NBYTES, DIGEST_NBYTES
from ...planner.table import ShardTable, TensorTable
from .columns import decode_columns, encode_columns, narrowed
from .digest import digest
from .extents import Extents, extents_of
from .tables import (
    ImageTable,
    check_readable,
    image_table,
    ints_of,
    shard_columns,
    shard_table,
    tensor_columns,
    tensor_table,
)
from .tree import ByRank, Tree, Value, key_in, unite
from .values import encode_value

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, eq=False)
class StateLayout:
    """The layout that ranks of one kind share.

    ``own``: (T,) True where each rank has its own tensor under that name. ``tree`` has the places
    of values, without the values.
    """

    tensors: TensorTable
    own: Bools
    container: Ints
    tree: Tree

    @cached_property
    def encoded(self) -> bytes:
        """Return the encoded layout; equal layouts encode to equal bytes.

        Raises SaveError if no reader would accept it.
        """
        t = self.tensors
        check_readable(t, self.tree)
        columns = tensor_columns(t, self.container)
        columns["tensor.own"] = self.own.astype(np.uint8)
        places = [[v.container, encode_value(v.key, "")] for v in self.tree.values]
        head = {
            "dtypes": t.dtypes,
            "tree": replace(self.tree, values=[]).to_json(),
            "places": places,
        }
        narrow = {name: narrowed(column) for name, column in columns.items()}
        return encode_columns(narrow, {"layout": json.dumps(head, separators=(",", ":"))})

    @property
    def key(self) -> bytes:
        """A digest that identifies the layout."""
        return self.encoded[-DIGEST_NBYTES:]


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that share a layout, with their data.

    ``shards.tensor`` are rows of the layout, ``shards.image`` rows of ``images``; ``values`` match
    the layout's places, in order.
    """

    layout: StateLayout
    ranks: Ints
    shards: ShardTable
    images: ImageTable
    values: list[ByRank]
    extents: Extents | None = None
    """Where the blocks of the images lie, if an image is not simply a file."""

    def encode(self) -> bytes:
        """Encode everything except the layout."""
        columns = shard_columns(self.shards, self.images)
        columns["rank"] = self.ranks
        columns["shard.tensor"] = self.shards.tensor
        metadata = {"values": json.dumps(self.values, separators=(",", ":"))}
        if self.extents is not None:
            columns |= self.extents.columns()
            metadata["lenders"] = json.dumps(self.extents.lenders)
        narrow = {name: narrowed(column) for name, column in columns.items()}
        return encode_columns(narrow, metadata)


@dataclass(frozen=True, eq=False)
class Fragment:
    """Data about one save from some of its ranks.

    ``head``: attempt, step and time of the save, as in the manifest. ``telemetry``: concatenated
    records of ranks; see :mod:`.save_telemetry`.
    """

    head: tuple[str, int | None, float]
    groups: list[Group]
    telemetry: bytes = b""

    def encode(self, known: Collection[bytes] = ()) -> bytes:
        """Encode the fragment, each layout once. A layout whose key is in ``known`` is sent as that
        key.

        Raises SaveError if the fragment is too large for any reader.
        """
        layouts = {group.layout.key: group.layout.encoded for group in self.groups}
        row = {key: i for i, key in enumerate(layouts)}
        rows = [row[group.layout.key] for group in self.groups]
        head = json.dumps({"head": self.head, "layouts": rows}).encode()
        blobs = [head]
        blobs += [key if key in known else encoded for key, encoded in layouts.items()]
        blobs += [group.encode() for group in self.groups]
        blobs.append(self.telemetry)
        lengths = [_LENGTH.pack(len(blob)) for blob in blobs]
        body = b"".join([_LENGTH.pack(len(blobs)), *lengths, *blobs])
        return body + digest(body)

    def with_image(
        self,
        head: tuple[str, int | None, float],
        images: ImageTable,
        extents: Extents | None = None,
    ) -> Fragment:
        """Return this draft of one rank's fragment with its image."""
        groups = [replace(group, images=images, extents=extents) for group in self.groups]
        return replace(self, head=head, groups=groups)


def layout_of(tensors: TensorTable, container: Ints, tree: Tree) -> StateLayout:
    """Return the layout of a rank with these tensors and containers. ``tensors.owner``: -1, or
    this rank."""
    places = replace(tree, values=[Value(v.container, v.key, []) for v in tree.values])
    own = tensors.owner >= 0
    shared = replace(tensors, owner=np.full(len(own), -1, np.int64))
    return StateLayout(shared, own, container, places)


def fragment_of(
    head: tuple[str, int | None, float],
    rank: int,
    layout: StateLayout,
    shards: ShardTable,
    images: ImageTable,
    tree: Tree,
    extents: Extents | None = None,
) -> Fragment:
    """Return the fragment of one rank, with the values in ``tree``."""
    values: list[ByRank] = [[([rank], v.by_rank[0][1])] for v in tree.values]
    return Fragment(head, [Group(layout, np.array([rank]), shards, images, values, extents)])


def decode_fragment(data: bytes, what: str, known: MutableMapping[bytes, StateLayout]) -> Fragment:
    """Decode a fragment. Looks up layouts in ``known``, and adds new ones to it.

    Raises DamagedError, also for a layout key that is not in ``known``.
    """
    body = data[:-DIGEST_NBYTES]
    if digest(body) != data[-DIGEST_NBYTES:]:
        raise DamagedError(f"{what} does not match its own checksum")
    try:
        text, *rest, telemetry = _blobs(body)
        head = json.loads(text)
        rows = head["layouts"]
        n = len(rest) - len(rows)
        layouts = [_known_layout(blob, what, known) for blob in rest[:n]]
        groups = [
            _group(layouts[row], blob, what) for row, blob in zip(rows, rest[n:], strict=True)
        ]
        attempt, step, created_s = head["head"]
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, struct.error) as error:
        raise DamagedError(f"{what} is malformed: {error!r}") from error
    return Fragment((attempt, step, created_s), groups, telemetry)


def _blobs(data: bytes) -> list[bytes]:
    (count,) = _LENGTH.unpack_from(data)
    begin = _LENGTH.size * (1 + count)
    lengths = np.frombuffer(data[_LENGTH.size : begin], "<u8").tolist()
    cuts = np.cumsum([begin, *lengths]).tolist()
    if len(lengths) != count or cuts[-1] != len(data):
        raise ValueError("lengths disagree")
    return [data[begin:end] for begin, end in pairwise(cuts)]


def _known_layout(blob: bytes, what: str, known: MutableMapping[bytes, StateLayout]) -> StateLayout:
    key = blob[-DIGEST_NBYTES:]
    if key not in known:
        columns, metadata = decode_columns(blob, what)
        head = json.loads(metadata["layout"])
        tree = Tree.from_json(head["tree"])
        tree.values = [Value(int(c), key_in(key), []) for c, key in head["places"]]
        known[key] = StateLayout(
            tensors=tensor_table(columns, head["dtypes"]),
            own=columns["tensor.own"].astype(np.bool_),
            container=ints_of(columns, "tensor.container"),
            tree=tree,
        )
    return known[key]


def _group(layout: StateLayout, blob: bytes, what: str) -> Group:
    columns, metadata = decode_columns(blob, what)
    shards = shard_table(columns, ints_of(columns, "shard.tensor"))
    images = image_table(columns, compressed="image.stored_nbytes" in columns)
    values: list[ByRank] = [
        [(ranks, encoded) for ranks, encoded in by_rank]
        for by_rank in json.loads(metadata["values"])
    ]
    extents = None
    if "lenders" in metadata:
        extents = extents_of(columns, json.loads(metadata["lenders"]))
    return Group(layout, ints_of(columns, "rank"), shards, images, values, extents)


def join(fragments: Sequence[Fragment]) -> Fragment:
    """Join fragments, given in order of their first ranks, into one with a group per layout."""
    by_layout: dict[bytes, list[Group]] = {}
    for fragment in fragments:
        for group in fragment.groups:
            by_layout.setdefault(group.layout.key, []).append(group)
    telemetry = b"".join(fragment.telemetry for fragment in fragments)
    return Fragment(
        fragments[0].head, [_joined(groups) for groups in by_layout.values()], telemetry
    )


def _joined(groups: Sequence[Group]) -> Group:
    if len(groups) == 1:
        return groups[0]
    width = max(group.shards.offsets.shape[1] for group in groups)
    images = ImageTable.joined([group.images for group in groups])
    counts = np.array([len(group.images) for group in groups])
    before = np.repeat(np.cumsum(counts) - counts, [len(group.shards) for group in groups])
    shards = ShardTable(
        np.concatenate([group.shards.tensor for group in groups]),
        np.concatenate([widen(group.shards.offsets, width, 0) for group in groups]),
        np.concatenate([widen(group.shards.lengths, width, 1) for group in groups]),
        np.concatenate([group.shards.image for group in groups]) + before,
        np.concatenate([group.shards.start for group in groups]),
    )
    ranks = np.concatenate([group.ranks for group in groups])
    values = [unite(by) for by in zip(*(group.values for group in groups), strict=True)]
    return Group(groups[0].layout, ranks, shards, images, values, joined_extents(groups))


def joined_extents(groups: Sequence[Group]) -> Extents | None:
    """Return the extents of the images of all groups; None if each image is simply a file."""
    if all(group.extents is None for group in groups):
        return None
    return Extents.joined(
        [
            group.extents or Extents.of_images(group.images, CHUNK_NBYTES, BLOCK_NBYTES)
            for group in groups
        ]
    )
