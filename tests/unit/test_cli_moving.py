"""``holdfast cp`` and ``holdfast prune``: their output and exit status."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import fresh_uri
from support.commands import HOLDFAST, Printed, finished, on_a_terminal, run, run_json
from support.copies import flipped, images
from support.ranks import saved_as_ranks

import holdfast
from holdfast.cli import progress
from holdfast.drivers.memory import MemoryDriver


@pytest.fixture
def root() -> str:
    """Save three checkpoints in memory."""
    root = fresh_uri()
    for step in (1, 2, 3):
        holdfast.save(f"{root}/step-{step}", {"x": torch.ones(1000), "step": step})
    return root


def test_cp_prints_the_copies(root: str, tmp_path: Path) -> None:
    """A checkpoint has one line with files, bytes and rate. The second time there is nothing to send."""
    out = run("cp", f"{root}/step-2", tmp_path).stdout
    assert re.fullmatch(rf"copied: file://{tmp_path}: 1 file, 8\.0\d KiB, 0\.\d\d GB/s\n", out)
    assert holdfast.load(tmp_path)["step"] == 2
    out = run("cp", f"{root}/step-2", tmp_path).stdout
    assert re.fullmatch(rf"there: file://{tmp_path}: 1 file, 8\.0\d KiB, nothing to send\n", out)


def test_cp_writes_another_layout(tmp_path: Path) -> None:
    """``--layout`` makes files of about that size, instead of one per rank."""
    source = saved_as_ranks([{"x": torch.full((4000,), float(r))} for r in range(3)]).uri
    out = run("cp", "--layout", "24kB", source, tmp_path).stdout
    assert out.startswith(f"copied: file://{tmp_path}: 2 files, ")
    out = run("cp", "--layout", "24kB", source, tmp_path).stdout
    assert out.endswith("nothing to send\n")


def test_cp_of_a_folder(root: str, tmp_path: Path) -> None:
    """Each checkpoint has a line, and so have all together. Damage gives status 1."""
    storage = MemoryDriver(f"{root.removeprefix('memory://')}/step-3")
    flipped(storage, images(storage)[0], 5000)
    out = run("cp", "-r", root, tmp_path, status=1).stdout
    lines = out.splitlines()
    assert [line.split(": ")[:2] for line in lines[:3]] == [
        ["copied", "step-1"], ["copied", "step-2"], ["not copied", "step-3"]
    ]  # fmt: skip
    assert "tensor 'x'" in lines[2]
    assert re.fullmatch(r"2 of 3 checkpoints, 16\.0 KiB, 0\.\d\d GB/s", lines[3])
    assert [c.step for c in holdfast.list_checkpoints(tmp_path)] == [1, 2]


def test_cp_prints_json(root: str) -> None:
    """The document has the figures of each checkpoint."""
    there = fresh_uri()
    told = run_json("cp", "--recursive", root, there)
    assert (told["source"], told["uri"], told["ok"]) == (root, there, True)
    assert told["sent_nbytes"] == told["nbytes"]
    first = told["checkpoints"][0]
    assert first.pop("seconds") > 0
    assert first == {
        "path": "step-1", "step": 1, "files": 1, "nbytes": 8208, "sent_nbytes": 8208, "problem": None,
        "borrowed_nbytes": 0, "why_whole": "",
    }  # fmt: skip


def test_cp_borrows_from_a_base() -> None:
    """The line and the document tell the bytes that the destination copied, and why not all."""
    root, there = fresh_uri(), fresh_uri()
    state = {"x": torch.arange(1 << 20), "step": 1}
    for step in (1, 2, 3):
        state["x"][0] = step
        holdfast.save(f"{root}/step-{step}", state | {"step": step})
    run("cp", f"{root}/step-1", f"{there}/step-1")
    base = ("--base", f"{there}/step-1")
    told = run_json("cp", f"{root}/step-2", f"{there}/step-2", *base)
    assert told["borrowed_nbytes"] + told["sent_nbytes"] == told["nbytes"]
    assert told["borrowed_nbytes"] > 0.9 * told["nbytes"]
    out = run("cp", f"{root}/step-3", f"{there}/step-3", *base).stdout
    assert re.search(r"step-3: 1 file, 8\.01 MiB, 7\.94 MiB of it borrowed there, ", out)
    out = run(
        "cp", "--overwrite", f"{root}/step-1", f"{there}/step-3", "--base", f"{there}/no"
    ).stdout
    assert "more was sent than differs from the base: the earlier checkpoint is gone" in out


def test_progress_goes_to_a_log(capsys: Any) -> None:
    """Without a terminal, a line is printed every few seconds, with the rate since the start."""
    with progress.progress_bar("cp", lines=True, line_every_s=0.05) as told:
        for done in (1 << 30, (1 << 30) + 1):
            told(done, 2 << 30)
        time.sleep(0.1)
        told((1 << 30) + (10 << 20), 2 << 30)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"cp: 1\.01 GiB of 2\.00 GiB, 0\.\d\d GB/s", line)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Save three checkpoints on disk."""
    for step in (1, 2, 3):
        holdfast.save(tmp_path / f"step-{step}", {"x": torch.ones(1000), "step": step})
    return tmp_path


def steps(folder: Path) -> list[int | None]:
    """Return the steps of all checkpoints."""
    return [c.step for c in holdfast.list_checkpoints(folder)]


def test_prune_asks_on_a_terminal(folder: Path) -> None:
    """The plan is shown first. A no deletes nothing, with status 1."""
    status, shown = on_a_terminal("prune", str(folder), "--keep-last", "2", answer="n")
    assert status == 1
    assert "step 1" in shown
    assert "Delete 1 checkpoint, " in shown
    assert steps(folder) == [1, 2, 3]
    status, shown = on_a_terminal("prune", str(folder), "--keep-last", "2", answer="y")
    assert status == 0
    assert "deleted" in shown
    assert steps(folder) == [2, 3]


def test_prune_without_a_terminal_needs_yes(folder: Path) -> None:
    """A dry run and an empty plan need no consent."""
    command = [*HOLDFAST, "prune", folder, "--keep-last", "2"]
    refused = finished(command, stdin=subprocess.DEVNULL)
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    out = run("prune", folder, "--keep-last", "2", "--dry-run").stdout
    assert out.splitlines()[-1] == "dry run: nothing was deleted"
    assert steps(folder) == [1, 2, 3]
    printed = run("prune", folder, "--keep-last", "3")
    assert printed == Printed("", "holdfast: nothing to delete; 3 checkpoints kept\n")


def test_prune_prints_json(folder: Path) -> None:
    """The document has the deleted and the kept checkpoints."""
    dead = folder / "step-9" / "data" / "20200101T000000-00000000"
    dead.mkdir(parents=True)
    (dead / "attempt.json").write_text("{}")
    told = run_json("prune", folder, "--keep-last", "1", "--idle-hours", "0", "--yes")
    assert (told["uri"], told["done"], told["kept"]) == (f"file://{folder}", True, ["step-3"])
    assert [(c["path"], c["step"]) for c in told["checkpoints"]] == [("step-1", 1), ("step-2", 2)]
    assert told["leftovers"] == [{"path": "step-9", "attempt": dead.name, "nbytes": 2}]
    assert told["nbytes"] == sum(c["nbytes"] for c in told["checkpoints"]) + 2
    assert sorted(p.name for p in folder.iterdir()) == ["step-3"]


def test_prune_and_ls_show_abandoned_and_damaged_checkpoints(folder: Path) -> None:
    """--abandoned deletes abandoned checkpoints; one without its image does not count as kept."""
    with holdfast.Checkpointer(folder, grace_s=None) as ckpt:
        ckpt.resume({"x": torch.ones(1000), "step": 0}, step=2)
    for image in (folder / "step-1").glob("data/*/0.safetensors"):
        image.unlink()
    listed = run("ls", folder).stdout.splitlines()
    assert [line.split()[-1] for line in listed[1:]] == ["abandoned", "missing", "step-2"]
    told = {c["path"]: (c["abandoned"], c["damage"]) for c in run_json("ls", folder)["checkpoints"]}
    damage = "the image of rank 0 is missing"
    assert told == {"step-3": (True, None), "step-1": (False, damage), "step-2": (False, None)}
    out = run("prune", folder, "--keep-last", "1", "--abandoned", "--verify", "--yes").stdout
    first, second, last = out.splitlines()
    assert first.endswith("  damaged: the image of rank 0 is missing")
    assert second.endswith("  abandoned")
    assert last.startswith("deleted: 2 checkpoints")
    assert steps(folder) == [2]


def test_ctrl_c_ends_a_copy_cleanly(tmp_path: Path) -> None:
    """The status is 130, no temporary file stays, and the same command continues the copy."""
    holdfast.save(tmp_path / "src", {"x": torch.ones(10)})
    code = (
        "import asyncio, signal, sys, holdfast.cli\n"
        # a shell has its background jobs ignore it
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from holdfast.drivers.local.driver import LocalUpload\n"
        "async def slow(self, start, data):\n"
        "    print('writing', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "LocalUpload.write = slow\n"
        "holdfast.cli.main()"
    )
    arguments = ["cp", str(tmp_path / "src"), str(tmp_path / "dst")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "continues where it stopped" in err
    assert "Traceback" not in err
    assert [p.name for p in (tmp_path / "dst").rglob("*") if p.is_file()] == ["attempt.json"]
    run(*arguments)
    assert torch.equal(holdfast.load(tmp_path / "dst")["x"], torch.ones(10))
