"""The checkpoints that Accelerate itself leaves behind, and ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.rank_processes import RankProcesses

pytest.importorskip("accelerate", reason="not installed: make frameworks")

from support.accelerate_matrix import CASES, END, MIDDLE, SWITCHED, TAKEN, Case, outcomes

# Warnings of accelerate and of the packages it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

PARTS = 17


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    """Run two ranks, which import accelerate once."""
    with RankProcesses(2) as made:
        yield made


def expected(case: Case, stock: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the outcome of a case with our checkpoints, given that with Accelerate's own."""
    before, after, losses, iteration, newest = stock
    if not case["is_automatic"] or losses == "not loaded":
        return stock
    back = min(case["back"], len(before) - 1)
    if case["iteration"] == TAKEN:  # Accelerate refuses that, too, once it has deleted one
        is_late = case["mode"] in ("async", "lazy")
        newest = MIDDLE if case["mode"] == SWITCHED else MIDDLE - 2 * back
        return before, before, "not saved", before[-1] + is_late, newest
    begins_again = case["iteration"] == 0
    saved = list(range(0 if begins_again else before[-1] + 1, iteration))
    limit = case["total_limit"]
    if limit is not None and case["mode"] == SWITCHED:
        after = sorted({*before, *saved[-limit:]})
    elif limit is not None:
        live = [] if begins_again else before[: len(before) - back]
        after = [*live, *saved][-limit:]
    return (
        before,
        after,
        losses,
        iteration,
        MIDDLE if begins_again and case["mode"] == SWITCHED else END,
    )


@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=[pytest.mark.nightly(15)] if part else []) for part in range(PARTS)],
)
def test_same_checkpoints_are_left_as_by_accelerate(
    ranks: RankProcesses, tmp_path: Path, part: int
) -> None:
    """Our functions keep the same checkpoints, and compute the same losses.

    After a step back, abandoned checkpoints are deleted first, and passed over. A name that is
    taken is refused before anything is deleted. Accelerate's own checkpoints are never deleted.
    """
    numbers = list(range(part, len(CASES), PARTS))
    found: list[dict[int, Any]] = ranks.run(outcomes, str(tmp_path), numbers, timeout_s=250)
    assert [
        (CASES[number], stock, ours)
        for of_rank in found
        for number, (stock, ours) in of_rank.items()
        if ours != expected(CASES[number], stock)
    ] == []
