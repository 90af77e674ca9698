"""What the ranks of a job tell the committing one, but for the digests of data that is
not there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from ...planner.image import DIGEST_NBYTES
from ...storage.format.fragment import Fragment, fragment_of, join
from ...storage.format.tables import ImageTable
from ...storage.state.flat_state import FlatState
from ...storage.state.plan import ImagePlan

__all__ = ["HEAD", "HOST_RANKS", "by_host", "fragment_told"]

HEAD = ("20260101T000000-00000000", 100, 0.0)
HOST_RANKS = 8


def fragment_told(plan: ImagePlan, rank: int, flat: FlatState) -> Fragment:
    """What ``rank`` tells at commit, but for data."""
    images = int(len(plan.shards) > 0)  # a rank without bytes of its own writes no image
    digests = np.zeros((images * plan.layout.chunks, DIGEST_NBYTES), np.uint8)
    hashed = np.full(images, plan.layout.hashed_end, np.int64)
    table = ImageTable(np.full(images, rank, np.int64), hashed, digests)
    return fragment_of(HEAD, rank, plan.reported, plan.shards, table, flat.tree)


def by_host(fragments: Iterator[Fragment], host_ranks: int = HOST_RANKS) -> Iterator[Fragment]:
    """Those of each host's ranks as one."""
    while host := list(itertools.islice(fragments, host_ranks)):
        yield join(host)
