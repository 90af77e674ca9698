"""Selects older generations to retain, so that a resume can go further back. Pure.

Distances widen: steps are divided into spans of 4, 16, 64 and so on kept steps. The first agreed
generation of a span is a *mark* of that span's level, and of all lower levels. Level 1 retains its
newest mark before the newest generation; each further level, its newest mark before that of the
previous level. All keepers select the same marks, since marks follow from agreed steps alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...arenas.label import GenerationId

FACTOR = 4
LEVELS_MAX = 16


def levels_of(agreed: Sequence[GenerationId], every: int) -> dict[GenerationId, int]:
    """Return the highest level that each agreed generation is a mark of, 0 for none. ``agreed``:
    ascending; generations between them that were dropped count as none; ``every``: distance of kept
    steps."""
    levels: dict[GenerationId, int] = {}
    before: GenerationId | None = None
    for id in agreed:
        level = LEVELS_MAX if before is None else 0
        span = FACTOR * every
        while before is not None and level < LEVELS_MAX and id.step // span != before.step // span:
            level += 1
            span *= FACTOR
        levels[id] = level
        before = id
    return levels


def retained(
    levels: Mapping[GenerationId, int], newest: GenerationId | None, count: int
) -> list[GenerationId]:
    """Return at most ``count`` generations to retain, newest first. ``levels``: the level of each
    agreed generation; ``newest``: the one that a restart would use."""
    found: list[GenerationId] = []
    limit = newest
    for level in range(1, count + 1):
        marks = [id for id, of in levels.items() if of >= level and (limit is None or id < limit)]
        limit = max(marks, default=None)
        if limit is None:
            break
        found.append(limit)
    return found
