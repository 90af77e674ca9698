"""Selects older generations to retain, so that a resume can go further back. Pure.

Distances widen: steps are divided into spans of 4, 16, 64 and so on kept steps. The first agreed
generation of a span is a *mark* of that span's level, and of all lower levels. Level 1 retains its
newest mark before the newest generation; each further level, its newest mark before that of the
previous level. All keepers select the same marks, since marks follow from agreed steps alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...arenas.label import GenerationId

FACTOR = 4
LEVELS_MAX = 16


def level_of(step: int, before: int | None, every: int) -> int:
    """Return the highest level that an agreed step is a mark of, 0 for none. ``before``: the agreed
    step before it, None without one; ``every``: distance of kept steps."""
    if before is None:
        return LEVELS_MAX
    level = 0
    span = FACTOR * every
    while level < LEVELS_MAX and step // span != before // span:
        level += 1
        span *= FACTOR
    return level


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
