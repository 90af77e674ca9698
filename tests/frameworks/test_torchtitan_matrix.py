"""The checkpoints that torchtitan's manager leaves behind, and ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.rank_processes import RankProcesses

pytest.importorskip("torchtitan", reason="not installed: make frameworks")

from support.torchtitan_matrix import CASES, END, SWITCHED, Case, outcomes

# Warnings of torchtitan and of the packages it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

PARTS = 17


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    """Run two ranks, which import torchtitan once."""
    with RankProcesses(2) as made:
        yield made


def live(case: Case, before: list[int]) -> list[int]:
    """Return the steps that a run of two parts has saved, without abandoned ones."""
    back = case["load_step"]
    due = [step for step in range(1, END) if step % case["interval"] == 0]
    if case["enable_first_step_checkpoint"]:
        due.insert(0, 1)
    return [step for step in before if step <= back] + [step for step in due if step > back]


@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=[pytest.mark.nightly(15)] if part else []) for part in range(PARTS)],
)
def test_same_checkpoints_are_left_as_by_torchtitan(
    ranks: RankProcesses, tmp_path: Path, part: int
) -> None:
    """Our manager keeps the same checkpoints, and computes the same losses. After a step back,
    abandoned checkpoints are deleted first. A checkpoint that replaces one of torchtitan itself is
    loaded in its place."""
    numbers = list(range(part, len(CASES), PARTS))
    found: dict[int, Any] = ranks.run(outcomes, str(tmp_path), numbers, timeout_s=250)[0]
    differing = []
    for number, (stock, ours) in found.items():
        case = CASES[number]
        before, after, losses = stock
        keep = case["keep_latest_k"]
        steps = list(after)
        if case["async_mode"] == SWITCHED:  # checkpoints of torchtitan itself are never deleted
            steps = sorted({*before, *after, *ours[1]})
        elif keep and case["load_step"] in before and END in after:
            steps = [*live(case, before)[-keep:], END]
        both = after.keys() & steps
        if (ours[0], list(ours[1]), ours[2]) != (before, steps, losses) or {
            step: ours[1][step] for step in both
        } != {step: after[step] for step in both}:
            differing.append((case, stock, ours))
    assert differing == []
