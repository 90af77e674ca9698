"""Checkpoints copied to real servers and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.bits import difference
from support.drivers import keys, used
from support.framework_jobs import run_job

import holdfast
from holdfast.cli import app


@pytest.fixture(params=["s3", "hdfs", "az", "gs"])
def server(request: pytest.FixtureRequest) -> str:
    """Return an empty root on a real server."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


def below(url: str, path: str) -> str:
    """Return the URI of ``path`` below ``url``."""
    location, mark, options = url.partition("?")
    return f"{location}/{path}{mark}{options}"


@pytest.mark.nightly(10)
def test_there_and_back(server: str, tmp_path: Path) -> None:
    """A checkpoint is copied there, saved compressed, listed, verified, pruned and copied back."""
    state = {"x": torch.randn(6 << 20, dtype=torch.float64), "small": [torch.arange(9), "text"]}
    holdfast.save(tmp_path / "a", state, step=7)
    there = below(server, "run/step-7")
    assert holdfast.copy(tmp_path / "a", there).sent_nbytes > 48 << 20
    assert holdfast.copy(tmp_path / "a", there).sent_nbytes == 0
    for command in ("show", "verify"):
        assert app.run([command, there]) == 0

    # An upload that ends long before the size that it was declared with.
    mask = torch.arange(3 << 20) // (1 << 10)
    report = holdfast.save(below(server, "run/step-8"), {"mask": mask}, step=8, compression="lz4")
    assert report.stored_nbytes < report.nbytes / 2
    with holdfast.open(below(server, "run/step-8")) as c:
        rows = slice(2_000_000, 2_000_010)
        assert torch.equal(c.read("mask", rows=rows), mask[rows])

    holdfast.copy(server, tmp_path / "back", recursive=True)
    assert difference(state, holdfast.load(tmp_path / "back/run/step-7")) is None
    assert torch.equal(holdfast.load(tmp_path / "back/run/step-8")["mask"], mask)
    holdfast.prune(below(server, "run"), keep_last=1)
    assert [(c.path, c.step) for c in holdfast.list_checkpoints(server)] == [("run/step-8", 8)]
    assert {key.split("/")[1] for key in used(server, keys)} == {"step-8"}


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_two_ranks_save_and_load_in_another_layout(server: str, tmp_path: Path) -> None:
    """Under torchrun a tensor is saved by rows and loaded by columns, then read by this process."""
    run_job("torchrun", tmp_path, server, world=2)
    with holdfast.open(server) as c:
        assert c.world == 2
        assert torch.equal(c.read("w"), torch.arange(15.0).reshape(5, 3))
