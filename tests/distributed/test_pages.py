"""How-to pages as scripts of jobs that are killed, and resume on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.framework_jobs import check_page

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("kind", "worlds"),
    [
        pytest.param("ddp", (2, 1, 2), marks=pytest.mark.nightly(18)),
        ("fsdp2", (1, 2, 1)),
        pytest.param("fsdp1", (2, 1, 2), marks=pytest.mark.nightly(18)),
    ],
)
def test_a_training_loop(tmp_path: Path, kind: str, worlds: tuple[int, ...]) -> None:
    """The loop resumes, whatever divides the model."""
    check_page("checkpoint-a-training-loop.md", tmp_path, "--kind", kind, worlds=worlds)


@pytest.mark.parametrize(
    "worlds", [(1, 2, 1), pytest.param((2, 1, 2), marks=pytest.mark.nightly(15))]
)
def test_a_loop_that_saves_with_dcp(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    """DCP's calls resume, and another part of the page loads their checkpoint without DCP."""
    check_page("coming-from-dcp.md", tmp_path, worlds=worlds)
