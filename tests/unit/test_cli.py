"""The commands: what they print, for people and for programs, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.cli import app, text
from holdfast.drivers.layers.metrics import snapshots
from holdfast.drivers.registry import open_driver
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.ranks.store_team import StoreTeam
from holdfast.storage.state.flattening.flatten import flatten

ESCAPE = "\x1b"
HOLDFAST = [sys.executable, "-c", "import holdfast.cli; holdfast.cli.main()"]


@dataclass
class Result:
    """How a command ended, and what it printed."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Both, one after the other."""
        return self.stdout + self.stderr


def run(*arguments: str) -> Result:
    """What a command does in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = app.run(arguments)
        except SystemExit as ended:  # argparse's own answers
            assert isinstance(ended.code, int)
            status = ended.code
    return Result(status, out.getvalue(), err.getvalue())


def run_json(*arguments: str, status: int = 0) -> Any:
    """The one document that a command prints with --json."""
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


@pytest.fixture
def root() -> str:
    """A place in memory that no other test uses."""
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def uri(root: str) -> str:
    """A checkpoint."""
    w = torch.arange(800.0).reshape(100, 8)
    model = {"w": w, "tied": w, "b": torch.ones(3, dtype=torch.bfloat16), "none": torch.empty(0, 2)}
    holdfast.save(
        f"{root}/step-7",
        {"model": model, "layers": [1, torch.ones(2)], "note": "x" * 100, "step": 7},
    )
    return f"{root}/step-7"


def save_on_ranks(uri: str, states: Sequence[dict[str, Any]]) -> None:
    """A checkpoint of several ranks, who all live in this process."""
    store = dist.HashStore()

    async def save(rank: int) -> None:
        flat, driver = flatten(states[rank]), open_driver(uri)
        job = SaveJob(flat, None, 64 << 20)
        await run_save(driver, StoreTeam(store, rank, len(states), "test", 60), job)
        await driver.close()

    async def save_all() -> None:
        await asyncio.gather(*map(save, range(len(states))))

    asyncio.run(save_all())


def image(uri: str) -> str:
    """The key of the first image of a checkpoint."""
    with holdfast.open(uri) as checkpoint:
        return f"data/{checkpoint.attempt}/0.safetensors"


def change(uri: str, key: str, at: int) -> None:
    """Flip one bit of a stored file."""

    async def flip() -> None:
        driver = open_driver(uri)
        data = bytearray(await driver.get(key))
        data[at] ^= 1
        await driver.put(key, bytes(data))
        await driver.close()

    asyncio.run(flip())


def test_the_package_runs_as_the_command() -> None:
    """As where scripts are not on the path."""
    command = [sys.executable, "-m", "holdfast", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("holdfast ")


def test_ls_lists_checkpoints_by_step(root: str) -> None:
    """One line each, the oldest step first, with what it holds."""
    for step in (20, 3):
        holdfast.save(f"{root}/run/step-{step}", {"w": torch.ones(256), "step": step})
    lines = run("ls", root).stdout.splitlines()
    assert lines[0].split() == ["step", "saved", "age", "ranks", "tensors", "size", "path"]
    assert [(line.split()[0], line.split()[-1]) for line in lines[1:]] == [
        ("3", "run/step-3"),
        ("20", "run/step-20"),
    ]
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", lines[1])
    assert "1.00 KiB" in lines[1]


def test_ls_of_the_last_reads_no_other(root: str) -> None:
    """Those that were stored last, whatever their steps, are listed by step."""
    for step in (30, 10, 40, 20):
        holdfast.save(f"{root}/step-{step}", {"step": step})
    entries = run_json("ls", "--last", "2", f"{root}?metrics=on")["checkpoints"]
    assert [entry["path"] for entry in entries] == ["step-20", "step-40"]
    (seen,) = [seen for uri, seen in snapshots().items() if uri == root]
    assert seen.operations["get"].count == 3  # two manifests, and a lineage, which is not there
    assert run("ls", "--last", "0", root).exit_code == 2


def test_ls_tells_programs_the_same(root: str, uri: str) -> None:
    """The fields of each checkpoint, and their types."""
    document = run_json("ls", root)
    assert document["uri"] == root
    (entry,) = document["checkpoints"]
    assert entry.pop("created_s") == pytest.approx(time.time(), abs=60)
    assert re.fullmatch(r"[0-9: -]+Z", entry.pop("saved"))
    expected = {
        "path": "step-7",
        "uri": uri,
        "step": 7,
        "world": 1,
        "tensors": 5,
        "nbytes": 3214,
        "problem": None,
    }
    assert entry == {**expected, "abandoned": False, "damage": None}


def test_ls_of_a_checkpoint_is_the_checkpoint(uri: str) -> None:
    """At the URI itself the path is a dot."""
    assert run("ls", uri).stdout.splitlines()[1].endswith("  .")


def test_ls_without_a_checkpoint_says_so(root: str) -> None:
    """Exit status 1, a message on stderr, and for programs an empty list all the same."""
    result = run("ls", root)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"holdfast: no checkpoint at or below {root}\n"
    assert run_json("ls", root, status=1)["checkpoints"] == []


def test_ls_shows_damaged_checkpoints(root: str, uri: str) -> None:
    """One that cannot be opened is listed with its problem, and hides no other."""
    holdfast.save(f"{root}/step-8", {"step": 8})
    change(uri, "manifest.safetensors", 100)
    result = run("ls", root)
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if "step-7" in line]
    assert line.endswith("step-7  the manifest does not match its own checksum")
    damaged = {c["path"]: c for c in run_json("ls", root)["checkpoints"]}["step-7"]
    assert (damaged["problem"], damaged["nbytes"]) == (
        "the manifest does not match its own checksum",
        None,
    )


def test_show_draws_the_state(uri: str) -> None:
    """Values, tensors with dtype, shape, size and layout, and containers, two spaces a level."""
    result = run("show", uri)
    header, tree = result.stdout.split("\n\n")
    assert result.exit_code == 0
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


def test_show_sums_up_below_a_depth(uri: str) -> None:
    """With --depth 1 the containers are there, and what is in them is not."""
    tree = run("show", uri, "--depth", "1").stdout.split("\n\n")[1].splitlines()
    assert tree[-2:] == ["  model  4 tensors, 3.13 KiB", "  layers  1 tensor, 8 B, 1 value"]
    assert (
        run("show", uri, "--depth", "0").stdout.split("\n\n")[1]
        == "state  5 tensors, 3.14 KiB, 3 values\n"
    )


def test_show_prints_values_whole_when_asked(uri: str) -> None:
    """Without --values a long one is cut."""
    assert "x" * 100 in run("show", uri, "--values").stdout
    assert "x" * 100 not in run("show", uri).stdout


def test_show_says_how_ranks_share_tensors(root: str) -> None:
    """Split over ranks, one per rank, values that differ: each in a few words."""
    shared = torch.arange(4096.0).reshape(1024, 4)
    states = [
        {"w": shared, "own": torch.full((3,), rank), "lr": rank // 2, "odd": {"n": rank}}
        for rank in range(4)
    ]
    save_on_ranks(root, states)
    lines = [line.strip() for line in run("show", root).stdout.splitlines()]
    assert "w  float32 [1024×4]  16.0 KiB  4 shards [256×4] on ranks 0–3" in lines
    assert "own  int64 [3]  24 B  per rank 0–3" in lines
    assert "lr  0 (ranks 0–1); 1 (ranks 2–3)" in lines
    assert "n  0 (rank 0); 1 (rank 1); 2 (rank 2); and 1 more" in lines
    assert (
        "n  0 (rank 0); 1 (rank 1); 2 (rank 2); 3 (rank 3)" in run("show", root, "--values").stdout
    )


def test_show_tells_programs_everything(root: str) -> None:
    """Tensors with shards, ranks, owners and ties; values as the format has them, by rank."""
    w = torch.ones(1024, 4)
    save_on_ranks(
        root,
        [
            {"w": w, "x": w, "own": torch.full((3,), rank), "b": b"abc", "n": rank}
            for rank in (0, 1)
        ],
    )
    document = run_json("show", root)
    w, x, own = (t for t in document["tensors"])
    assert (w["name"], w["shape"], w["dtype"], w["shards"], w["ranks"]) == (
        "w",
        [1024, 4],
        "float32",
        2,
        [0, 1],
    )
    assert (x["alias_of"], x["shards"]) == ("w", 0)
    assert (own["owners"], own["shards"], own["alias_of"]) == ([0, 1], 2, None)
    values = {v["path"]: v["by_rank"] for v in document["values"]}
    assert values['state["b"]'] == [{"ranks": [0, 1], "value": {"$bytes": "YWJj"}}]
    assert values['state["n"]'] == [{"ranks": [0], "value": 0}, {"ranks": [1], "value": 1}]
    assert (document["world"], document["files"], document["format_version"]) == (2, 3, 1)


def test_show_needs_no_torch_for_values_of_torch(root: str) -> None:
    """Dtypes, devices, sizes and what JSON lacks are shown as Python writes them."""
    special = {
        "a": torch.float32,
        "b": torch.device("cpu"),
        "c": torch.Size([1, 2]),
        "d": b"\x00",
        "e": float("inf"),
    }
    holdfast.save(root, special)
    lines = [line.strip() for line in run("show", root).stdout.splitlines()[-5:]]
    assert lines == [
        "a  torch.float32",
        "b  torch.device('cpu')",
        "c  torch.Size([1, 2])",
        r"d  b'\x00'",
        "e  inf",
    ]


def test_names_cannot_command_the_terminal(root: str) -> None:
    """Names and values come from files: what a terminal would obey is shown escaped."""
    holdfast.save(
        root, {f"a{ESCAPE}[31m": torch.ones(1), "b": f"{ESCAPE}]0;title\x07", "c\nd": {"e": 1}}
    )
    for command in ("show", "ls"):
        output = run(command, root).output
        assert output
        assert ESCAPE not in output
        assert "\x07" not in output
    assert r"a\x1b[31m" in run("show", root).stdout
    assert r"c\nd" in run("show", root).stdout


def test_a_hundred_thousand_tensors_are_shown_in_seconds(root: str) -> None:
    """The work is done in columns, and lines are written in batches."""
    holdfast.save(root, {f"layers.{i}.w": torch.zeros(1) for i in range(100_000)})
    began_s = time.monotonic()
    assert run("show", root).stdout.count("whole, rank 0\n") == 100_000
    assert time.monotonic() - began_s < 30


def test_verify_of_a_whole_checkpoint(uri: str) -> None:
    """Exit status 0, and what was read at which rate."""
    result = run("verify", uri)
    assert result.exit_code == 0
    assert re.fullmatch(r"ok: 2 files, [\d.]+ KiB, [\d.]+ GB/s\n", result.stdout)
    document = run_json("verify", uri)
    assert (document["ok"], document["files"], document["damages"]) == (True, 2, [])
    assert document["nbytes"] > 3214
    assert document["seconds"] > 0


def test_verify_finds_a_flipped_bit(uri: str) -> None:
    """Exit status 1, and file, bytes and tensor of the damage."""
    key = image(uri)
    change(uri, key, 4096)  # the first byte of the first tensor
    result = run("verify", uri)
    assert result.exit_code == 1
    assert result.stdout.startswith("damaged: 1 place; 2 files, ")
    assert result.stdout.splitlines()[1].startswith(
        f"  {key}: bytes 0 to 8,192: not what was written; tensors: model.tied"
    )
    (damage,) = run_json("verify", uri, status=1)["damages"]
    assert damage["key"] == key
    assert (damage["start"], damage["stop"], damage["what"]) == (0, 8192, "not what was written")
    assert damage["tensors"][0] == "model.tied"


def test_verify_joins_neighbours(root: str) -> None:
    """Damaged blocks that touch each other are one place; others are places of their own."""
    holdfast.save(root, {"w": torch.zeros(1 << 18)})
    for at in (70_000, 140_000, 600_000):
        change(root, image(root), at)
    damages = run_json("verify", root, status=1)["damages"]
    assert [(d["start"], d["stop"]) for d in damages] == [(65536, 196608), (589824, 655360)]


def test_verify_finds_a_missing_file(uri: str) -> None:
    """A lost file is damage, and not a failure to look."""

    async def remove() -> None:
        driver = open_driver(uri)
        await driver.delete(image_key)
        await driver.close()

    image_key = image(uri)
    asyncio.run(remove())
    (damage,) = run_json("verify", uri, status=1)["damages"]
    assert (damage["key"], damage["what"]) == (image_key, "the file is missing")
    assert set(damage["tensors"]) == {"model.tied", "model.b", "layers.1"}


def test_verify_finds_a_damaged_manifest(uri: str) -> None:
    """The manifest is a file of the checkpoint like any other."""
    change(uri, "manifest.safetensors", 100)
    result = run("verify", uri)
    assert result.exit_code == 1
    assert "manifest.safetensors: the manifest does not match its own checksum" in result.stdout


@pytest.mark.parametrize("command", ["show", "verify"])
def test_what_cannot_be_read_is_a_message_and_not_a_traceback(command: str, root: str) -> None:
    """Exit status 2; stderr says what, where, and what to do."""
    result = run(command, root)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(
        f"holdfast: nothing is committed here (key manifest.safetensors, in {root}). "
    )


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
@pytest.mark.parametrize("bad", ["nowhere://x", "memory://x?colour=red", "file://elsewhere/x"])
def test_a_uri_that_nothing_serves_is_refused(command: str, bad: str) -> None:
    """Exit status 2, for every command."""
    result = run(command, bad)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("holdfast: ")


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["show"], ["show", "memory://x", "--depth", "-1"], ["ls", "--no"]]
)
def test_a_call_that_is_wrong_ends_with_two(arguments: list[str]) -> None:
    """Unknown commands and options, missing and impossible arguments."""
    assert run(*arguments).exit_code == 2


def test_version_is_the_one_of_the_package() -> None:
    """``holdfast --version`` prints name and version."""
    assert run("--version").stdout == f"holdfast {holdfast.__version__}\n"


def test_the_demo_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib or rich: exit status 2, and which extra brings them."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("demo")
    assert result.exit_code == 2
    assert "pip install matplotlib rich" in result.stderr


def test_the_demo_refuses_what_cannot_work_before_it_starts(tmp_path: Path) -> None:
    """Its options reach it: a kill that falls on no save is an error, not a run of a minute."""
    result = run("demo", "--out", str(tmp_path / "out"), "--every", "7", "--kill-at", "24")
    assert result.exit_code == 2
    assert "no save can be torn at step 24 of 40 with a save every 7" in result.stderr


def test_without_a_command_help_is_shown() -> None:
    """On stderr, with exit status 2: a script that forgot the command must not go on."""
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "verify" in result.stderr


@pytest.mark.parametrize("command", ["ls", "show", "verify", "demo"])
def test_every_command_explains_itself(command: str) -> None:
    """``holdfast COMMAND --help``; and the list of commands names it."""
    assert run(command, "--help").stdout.startswith(f"usage: holdfast {command} ")
    assert re.search(rf"^ +{command} +\w", run("--help").stdout, re.MULTILINE)


def test_commands_do_without_rich(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it there is no bar, and all the rest."""
    monkeypatch.setitem(sys.modules, "rich", None)
    assert run("verify", uri).exit_code == 0


def test_a_fault_of_ours_is_not_taken_for_an_answer() -> None:
    """An error outside of the tree ends with 3, for 1 would mean damage; its traceback is shown."""
    code = (
        "import sys, holdfast.cli, holdfast.storage.operations.maintenance.listing as listing\n"
        "def broken(uri, **_): raise RuntimeError('broken')\n"
        "listing.list_checkpoints = broken\n"
        "sys.argv = ['holdfast', 'ls', 'memory://x']; holdfast.cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (3, "RuntimeError: broken")


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """A checkpoint in a folder, for commands in processes of their own."""
    holdfast.save(
        tmp_path / "step-1", {"model": {f"w{i}": torch.ones(4) for i in range(20_000)}, "step": 1}
    )
    return str(tmp_path / "step-1")


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_a_pipe_gets_plain_text(command: str, stored: str) -> None:
    """No colours, no bar, nothing on stderr, where nobody looks at a terminal."""
    done = subprocess.run(
        [*HOLDFAST, command, stored], capture_output=True, text=True, check=True, timeout=60
    )
    assert ESCAPE not in done.stdout
    assert done.stdout
    assert done.stderr == ""


def test_a_terminal_gets_guides_and_colours(stored: str) -> None:
    """The same tree, drawn; and plain again where NO_COLOR is set."""
    drawn = on_a_terminal(stored)
    assert "└── " in drawn
    assert ESCAPE in drawn
    assert ESCAPE not in on_a_terminal(stored, NO_COLOR="1")


def on_a_terminal(uri: str, **environment: str) -> str:
    """What ``holdfast show --depth 1`` prints to a terminal."""
    ours, theirs = os.openpty()
    with open(ours, "rb", buffering=0) as terminal:
        process = subprocess.Popen(
            [*HOLDFAST, "show", uri, "--depth", "1"],
            stdout=theirs,
            env={k: v for k, v in os.environ.items() if k != "NO_COLOR"}
            | {"TERM": "xterm"}
            | environment,
        )
        os.close(theirs)
        output = b""
        try:
            while part := terminal.read(4096):
                output += part
        except OSError:  # how a terminal says that nobody writes to it any more
            pass
        assert process.wait(60) == 0
    return output.decode()


def test_a_reader_that_leaves_is_no_failure(stored: str) -> None:
    """``holdfast show … | head`` ends quietly, as other commands do."""
    with subprocess.Popen(
        [*HOLDFAST, "show", stored], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-5, "now"),
        (0.5, "now"),
        (59, "59 s ago"),
        (119, "1 min ago"),
        (7200, "2 h ago"),
        (90_000, "1 day ago"),
        (1e6, "11 days ago"),
    ],
)
def test_ages_are_in_the_largest_unit_that_fits(seconds: float, expected: str) -> None:
    """A clock that runs ahead makes nothing negative."""
    assert text.age_text(seconds) == expected


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([], "no rank"),
        ([3], "rank 3"),
        ([0, 1, 2, 3], "ranks 0–3"),
        ([8, 0, 1], "ranks 0–1, 8"),
        (range(0, 64, 8), "ranks 0, 8, 16, 24, … (8 in all)"),
    ],
)
def test_ranks_are_told_as_runs(ranks: Sequence[int], expected: str) -> None:
    """Many runs are cut short."""
    assert text.ranks_text(ranks) == expected


@pytest.mark.parametrize("seconds", [1e300, float("nan"), float("inf"), -1e20])
def test_times_that_no_calendar_has_are_no_failure(seconds: float) -> None:
    """A manifest can say anything."""
    assert text.time_text(seconds) == "?"
