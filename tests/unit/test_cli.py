"""The commands: output for people and for programs, and exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.bits import fresh_uri
from support.commands import HOLDFAST, Printed, finished, on_a_terminal, run, run_json
from support.copies import flipped, images
from support.drivers import storage_at
from support.ranks import save_as_ranks

import holdfast
from holdfast.cli import text
from holdfast.drivers.layers.metrics import snapshots

ESCAPE = "\x1b"


@pytest.fixture
def root() -> str:
    """Return an unused place in memory."""
    return fresh_uri()


@pytest.fixture
def uri(root: str) -> str:
    """Save a checkpoint, and return its URI."""
    w = torch.arange(800.0).reshape(100, 8)
    model = {"w": w, "tied": w, "b": torch.ones(3, dtype=torch.bfloat16), "none": torch.empty(0, 2)}
    state = {"model": model, "layers": [1, torch.ones(2)], "note": "x" * 100, "step": 7}
    holdfast.save(f"{root}/step-7", state)
    return f"{root}/step-7"


def test_package_runs_as_the_command() -> None:
    """``python -m holdfast`` serves where scripts are not on the path."""
    done = finished([sys.executable, "-m", "holdfast", "--version"])
    assert done.stdout == f"holdfast {holdfast.__version__}\n"


def test_ls_lists_checkpoints_by_step(root: str) -> None:
    """Each checkpoint is a line with its figures, lowest step first."""
    for step in (20, 3):
        holdfast.save(f"{root}/run/step-{step}", {"w": torch.ones(256), "step": step})
    lines = run("ls", root).stdout.splitlines()
    titles = ["step", "saved", "age", "ranks", "tensors", "own", "total", "path"]
    assert lines[0].split() == titles
    ends = [(line.split()[0], line.split()[-1]) for line in lines[1:]]
    assert ends == [("3", "run/step-3"), ("20", "run/step-20")]
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", lines[1])
    assert lines[1].count("8.02 KiB") == 2


def test_ls_of_the_last_reads_no_other(root: str) -> None:
    """--last selects by time of storage, reads only those manifests, and lists by step."""
    for step in (30, 10, 40, 20):
        holdfast.save(f"{root}/step-{step}", {"step": step})
    entries = run_json("ls", "--last", "2", f"{root}?metrics=on")["checkpoints"]
    assert [entry["path"] for entry in entries] == ["step-20", "step-40"]
    (seen,) = [seen for uri, seen in snapshots().items() if uri == root]
    assert seen.operations["get"].count == 3  # two manifests, and a lineage, which is not there
    run("ls", "--last", "0", root, status=2)


def test_ls_prints_json(root: str, uri: str) -> None:
    """The document has the fields of each checkpoint. At its own URI, a checkpoint's path is a dot."""
    document = run_json("ls", root)
    assert document["uri"] == root
    (entry,) = document["checkpoints"]
    assert entry.pop("created_s") == pytest.approx(time.time(), abs=60)
    assert re.fullmatch(r"[0-9: -]+Z", entry.pop("saved"))
    figures = {"step": 7, "world": 1, "tensors": 5, "nbytes": 3214, "abandoned": False}
    assert entry.pop("own_nbytes") == entry.pop("stored_nbytes") > 3214
    none = {"problem": None, "damage": None, "is_version": False}
    assert entry == {"path": "step-7", "uri": uri, **none, **figures}
    assert run("ls", uri).stdout.splitlines()[1].endswith("  .")


def test_ls_without_a_checkpoint_says_so(root: str) -> None:
    """The exit status is 1, with a message on stderr and, as JSON, an empty list."""
    printed = run("ls", root, status=1)
    assert printed == Printed("", f"holdfast: no checkpoint at or below {root}\n")
    assert run_json("ls", root, status=1)["checkpoints"] == []


def test_ls_shows_damaged_checkpoints(root: str, uri: str) -> None:
    """A checkpoint that cannot be opened is listed with its problem."""
    holdfast.save(f"{root}/step-8", {"step": 8})
    flipped(storage_at(uri), "manifest.safetensors", 100)
    (line,) = [line for line in run("ls", root).stdout.splitlines() if "step-7" in line]
    problem = "the manifest does not match its own checksum"
    assert line.endswith(f"step-7  {problem}")
    damaged = {c["path"]: c for c in run_json("ls", root)["checkpoints"]}["step-7"]
    assert (damaged["problem"], damaged["nbytes"]) == (problem, None)


def test_show_draws_the_state(uri: str) -> None:
    """The tree has values, tensors and containers. Long values are cut without --values."""
    header, tree = run("show", uri).stdout.split("\n\n")
    titles = [line.split()[0] for line in header.splitlines()]
    assert titles == ["uri", "step", "saved", "ranks", "tensors", "files", "format"]
    assert tree.splitlines() == [
        "state  5 tensors, 3.14 KiB, 3 values",
        f"  note  '{'x' * 58}… (102 characters)",
        "  step  7",
        "  model  4 tensors, 3.13 KiB",
        "    w  float32 [100×8]  3.12 KiB  tied to model.tied",
        "    tied  float32 [100×8]  3.12 KiB  whole, rank 0",
        "    b  bfloat16 [3]  6 B  whole, rank 0",
        "    none  float32 [0×2]  0 B  empty",
        "  layers  1 tensor, 8 B, 1 value",
        "    0  1",
        "    1  float32 [2]  8 B  whole, rank 0",
    ]
    assert "x" * 100 in run("show", uri, "--values").stdout


def test_show_sums_up_below_a_depth(uri: str) -> None:
    """--depth 1 shows the containers without their contents."""
    tree = run("show", uri, "--depth", "1").stdout.split("\n\n")[1].splitlines()
    assert tree[-2:] == ["  model  4 tensors, 3.13 KiB", "  layers  1 tensor, 8 B, 1 value"]
    tree = run("show", uri, "--depth", "0").stdout.split("\n\n")[1].splitlines()
    assert tree == ["state  5 tensors, 3.14 KiB, 3 values"]


def test_show_says_how_ranks_share_tensors(root: str) -> None:
    """Split tensors, tensors per rank and values that differ are each described in a few words."""
    shared = torch.arange(4096.0).reshape(1024, 4)
    own = [{"own": torch.full((3,), rank), "odd": {"n": rank}} for rank in range(4)]
    save_as_ranks(
        storage_at(root), [{"w": shared, "lr": rank // 2, **own[rank]} for rank in range(4)]
    )
    lines = [line.strip() for line in run("show", root).stdout.splitlines()]
    assert "w  float32 [1024×4]  16.0 KiB  4 shards [256×4] on ranks 0–3" in lines
    assert "own  int64 [3]  24 B  per rank 0–3" in lines
    assert "lr  0 (ranks 0–1); 1 (ranks 2–3)" in lines
    assert "n  0 (rank 0); 1 (rank 1); 2 (rank 2); and 1 more" in lines
    values = "n  0 (rank 0); 1 (rank 1); 2 (rank 2); 3 (rank 3)"
    assert values in run("show", root, "--values").stdout


def test_show_prints_json(root: str) -> None:
    """The document has shards, ranks, owners and ties of tensors, and encoded values by rank."""
    w = torch.ones(1024, 4)
    common = {"w": w, "x": w, "b": b"abc"}
    states = [{**common, "own": torch.full((3,), rank), "n": rank} for rank in (0, 1)]
    save_as_ranks(storage_at(root), states)
    document = run_json("show", root)
    own, w, x = sorted(document["tensors"], key=lambda tensor: tensor["name"])
    assert (w["shape"], w["dtype"], w["shards"], w["ranks"]) == ([1024, 4], "float32", 2, [0, 1])
    assert (x["alias_of"], x["shards"]) == ("w", 0)
    assert (own["owners"], own["shards"], own["alias_of"]) == ([0, 1], 2, None)
    values = {v["path"]: v["by_rank"] for v in document["values"]}
    assert values['state["b"]'] == [{"ranks": [0, 1], "value": {"$bytes": "YWJj"}}]
    assert values['state["n"]'] == [{"ranks": [0], "value": 0}, {"ranks": [1], "value": 1}]
    assert (document["world"], document["files"], document["format_version"]) == (2, 3, 1)


def test_names_cannot_command_the_terminal(root: str) -> None:
    """Control characters in names and values are escaped."""
    hostile = {f"a{ESCAPE}[31m": torch.ones(1), "b": f"{ESCAPE}]0;title\x07", "c\nd": {"e": 1}}
    holdfast.save(root, hostile)
    for command in ("show", "ls"):
        assert not {ESCAPE, "\x07"} & set(run(command, root).stdout)
    assert r"a\x1b[31m" in run("show", root).stdout
    assert r"c\nd" in run("show", root).stdout


def test_verify_finds_a_flipped_bit(uri: str) -> None:
    """The exit status is 1, and the damage is printed with file, bytes and tensor."""
    key = images(storage_at(uri))[0]
    flipped(storage_at(uri), key, 4096)  # the first byte of the first tensor
    first, second = run("verify", uri, status=1).stdout.splitlines()
    assert first.startswith("damaged: 1 place; 2 files, ")
    said = "bytes 0 to 8,192: not what was written; tensors: model.tied"
    assert second.startswith(f"  {key}: {said}")
    (damage,) = run_json("verify", uri, status=1)["damages"]
    assert (damage["key"], damage["start"], damage["stop"]) == (key, 0, 8192)
    assert (damage["what"], damage["tensors"][0]) == ("not what was written", "model.tied")


def test_verify_joins_neighbours(root: str) -> None:
    """Adjacent damaged blocks are joined into one place."""
    holdfast.save(root, {"w": torch.zeros(1 << 18)})
    for at in (70_000, 140_000, 600_000):
        flipped(storage_at(root), images(storage_at(root))[0], at)
    damages = run_json("verify", root, status=1)["damages"]
    assert [(d["start"], d["stop"]) for d in damages] == [(65536, 196608), (589824, 655360)]


def test_verify_finds_a_damaged_manifest(uri: str) -> None:
    """A damaged manifest is damage, not a failure."""
    flipped(storage_at(uri), "manifest.safetensors", 100)
    said = "manifest.safetensors: the manifest does not match its own checksum"
    assert said in run("verify", uri, status=1).stdout


def test_failure_is_a_message_and_not_a_traceback(root: str) -> None:
    """The exit status is 2, and stderr has the reason, the place and the remedy."""
    printed = run("show", root, status=2)
    said = f"holdfast: nothing is committed here (key manifest.safetensors, in {root}). "
    assert printed.stderr.startswith(said)
    assert printed.stdout == ""


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["show"], ["show", "memory://x", "--depth", "-1"], ["ls", "--no"]]
)
def test_wrong_call_has_status_2(arguments: list[str]) -> None:
    """Unknown commands and options, and missing and impossible arguments, are wrong calls."""
    run(*arguments, status=2)


def test_without_a_command_help_is_shown() -> None:
    """Help goes to stderr, with status 2, because a script that forgot the command must fail."""
    printed = run(status=2)
    assert printed.stdout == ""
    assert "verify" in printed.stderr


def test_bug_has_status_3() -> None:
    """Status 1 would mean damage. The traceback is shown."""
    code = (
        "import sys, holdfast.cli, holdfast.storage.operations.maintenance.listing as listing\n"
        "def broken(uri, **_): raise RuntimeError('broken')\n"
        "listing.list_checkpoints = broken\n"
        "sys.argv = ['holdfast', 'ls', 'memory://x']; holdfast.cli.main()"
    )
    done = finished([sys.executable, "-c", code])
    assert (done.returncode, done.stderr.splitlines()[-1]) == (3, "RuntimeError: broken")


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """Save a checkpoint in a folder, for commands in other processes."""
    model = {f"w{i}": torch.ones(4) for i in range(20_000)}
    holdfast.save(tmp_path / "step-1", {"model": model, "step": 1})
    return str(tmp_path / "step-1")


def test_terminal_gets_guides_and_colours(stored: str) -> None:
    """NO_COLOR switches colours off."""
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    env["TERM"] = "xterm"
    command = ("show", stored, "--depth", "1")
    status, drawn = on_a_terminal(*command, env=env)
    assert status == 0
    assert "└── " in drawn
    assert ESCAPE in drawn
    assert ESCAPE not in on_a_terminal(*command, env={**env, "NO_COLOR": "1"})[1]


def test_closed_pipe_is_no_failure(stored: str) -> None:
    """``holdfast show … | head`` ends quietly, as other commands do."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*HOLDFAST, "show", stored], **pipes) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


def test_ages_and_ranks_are_short() -> None:
    """Ages are in the largest unit that fits. Many runs of ranks are cut short."""
    ages = {-5: "now", 59: "59 s ago", 119: "1 min ago", 7200: "2 h ago", 90_000: "1 day ago"}
    assert {seconds: text.age_text(seconds) for seconds in ages} == ages
    assert text.ranks_text([8, 0, 1]) == "ranks 0–1, 8"
    assert text.ranks_text(range(0, 64, 8)) == "ranks 0, 8, 16, 24, … (8 in all)"
