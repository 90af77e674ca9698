"""The ranks' reports to the committing leader, without digests of the data, which does not
exist."""

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
    """Return the report of ``rank`` at commit, with empty digests."""
    images = int(len(plan.shards) > 0)  # a rank without bytes of its own writes no image
    digests = np.zeros((images * plan.layout.chunks, DIGEST_NBYTES), np.uint8)
    hashed = np.full(images, plan.layout.hashed_end, np.int64)
    table = ImageTable(np.full(images, rank, np.int64), hashed, digests)
    return fragment_of(HEAD, rank, plan.reported, plan.shards, table, flat.tree)


def by_host(fragments: Iterator[Fragment], host_ranks: int = HOST_RANKS) -> Iterator[Fragment]:
    """Yield the reports joined by host."""
    while host := list(itertools.islice(fragments, host_ranks)):
        yield join(host)
