"""Test which checkpoints of a folder a run resumes: by step, and along its branches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.branches import resumed, run_of, state, there

import holdfast
from holdfast.storage.format.lineage import ROOT, Lineage


@pytest.mark.parametrize("name", ["step-{}", "epoch={}", "{}"])
def test_every_checkpoint_directly_below_counts(name: str, tmp_path: Path) -> None:
    """Any name counts; only names given by the Checkpointer are deleted."""
    for step in (5, 10):
        holdfast.save(tmp_path / name.format(step), state(step))
    assert resumed(tmp_path) == (10, 10.0)
    with holdfast.Checkpointer(tmp_path, keep=1, when_busy="wait") as ckpt:
        assert ckpt.resume(state(0)) == 10
        for step in (11, 12):
            ckpt.save(step, state(step))
    assert there(tmp_path)[0] == [5, 10, 12]
    assert resumed(tmp_path) == (12, 12.0)
    assert resumed(tmp_path, step=5) == (5, 5.0)
    with holdfast.Checkpointer(tmp_path, keep=1, when_busy="wait") as ckpt:
        ckpt.resume(state(0))
        ckpt.save(20, state(20))
    assert there(tmp_path) == ([5, 20], [10])


def test_a_name_that_is_not_ours_is_not_deleted_though_it_looks_like_one(tmp_path: Path) -> None:
    """Its step is another."""
    holdfast.save(tmp_path / "step-00000001", state(3))
    run_of(tmp_path, 5, 6, keep=1)
    assert there(tmp_path)[0] == [3, 6]


def test_what_does_not_fit_and_is_not_of_the_run_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Exported weights are skipped, unless nothing else is there."""
    holdfast.save(tmp_path / "export", {"weights": torch.zeros(3)}, step=9)
    with pytest.raises(holdfast.MismatchError):
        resumed(tmp_path)
    (tmp_path / "export").rename(tmp_path.parent / "export")
    run_of(tmp_path, 5)
    (tmp_path.parent / "export").rename(tmp_path / "export")
    assert resumed(tmp_path) == (5, 5.0)
    assert "export does not fit" in caplog.text


def test_checkpoints_that_cannot_be_gone_on_from_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At a level that is seen: those without a step, and those that lie deeper."""
    holdfast.save(tmp_path / "plain", {"x": torch.zeros(3)})
    holdfast.save(tmp_path / "run" / "step-1", state(1))
    with holdfast.Checkpointer(tmp_path) as ckpt:
        assert ckpt.resume(state(0)) == 0
    assert "plain, run/step-1" in caplog.text


Walk = list[tuple[str, int]]


@given(st.lists(st.tuples(st.sampled_from(["save", "back"]), st.integers(0, 20)), max_size=30))
def test_a_lineage_is_what_a_list_of_steps_would_be(walk: Walk) -> None:
    """The live checkpoints are those that a list holds from which going back cuts what is later."""
    lineage, saved = Lineage(), dict[int, str]()  # step -> branch
    histories: dict[int, list[int]] = {}
    line: list[int] = []
    for n, (what, at) in enumerate(walk):
        if what == "save":
            step = (line[-1] if line else 0) + 1 + at
            line = [*line, step]
            saved[step] = lineage.current
            histories = {s: h for s, h in histories.items() if step not in h} | {step: line}
        elif saved:
            step = sorted(histories)[at % len(histories)] if histories else None
            if step is None:
                continue
            line = histories[step]
            lineage = lineage.gone_back(saved[step], step, f"{n:016x}")
            lineage = Lineage.decode(lineage.encode())
        live = {step for step, branch in saved.items() if lineage.is_live(branch, step)}
        assert live >= set(line)
        assert max(live, default=0) == max(line, default=0)
    assert lineage.is_live("unknown", None)


def test_a_branch_that_is_not_on_record_is_the_root() -> None:
    """A checkpoint copied from another run counts as an ancestor."""
    assert Lineage().is_live("0123456789abcdef", 10**9)
    gone = Lineage().gone_back("fedcba9876543210", 5, "0123456789abcdef")
    assert gone.parents == {"0123456789abcdef": (ROOT, 5)}
    assert [gone.is_live("fedcba9876543210", step) for step in (5, 6)] == [True, False]
