"""``holdfast weights``, and the output of other commands for a channel and its versions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.bits import difference, flip
from support.commands import run, run_json

import holdfast
from holdfast.cli import weights as command
from holdfast.storage.integrations.newest import newest_checkpoint

VERSIONS = range(10, 80, 10)
ANCHORS = (10, 50)


def weights(version: int) -> dict[str, torch.Tensor]:
    """Return the weights of a version. One element in a hundred differs from the previous one."""
    w = torch.arange(300_000, dtype=torch.float32).view(torch.int16)
    for before in range(10, version, 10):
        chosen = torch.rand(len(w), generator=torch.Generator().manual_seed(before)) < 0.01
        w[chosen] += 1
    return {"w": w.view(torch.bfloat16).view(600, 1000), "norm": torch.full((7,), float(version))}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Publish seven versions; the first and the fifth are anchors."""
    channel = tmp_path_factory.mktemp("channel")
    with holdfast.publish(channel, keep=6, anchor=4) as publisher:
        for version in VERSIONS:
            publisher.push(version, {"model": weights(version)}).wait()
    return channel


@pytest.fixture
def channel(published: Path, tmp_path: Path) -> Path:
    """Copy the channel, for a test that changes it."""
    shutil.copytree(published, tmp_path / "channel")
    return tmp_path / "channel"


def test_ls_shows_each_version(published: Path) -> None:
    """Patches take a small part of the weights. Versions that are only bases are marked."""
    lines = run("weights", "ls", published).stdout.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        [f"{n:08d}", str(version), "anchor" if version in ANCHORS else "patch"]
        for n, version in enumerate(VERSIONS, 1)
    ]
    assert [line.endswith("kept as a base") for line in lines[1:]] == [True] + 6 * [False]
    told = run_json("weights", "ls", published)["versions"]
    assert [v["share"] < 0.05 for v in told] == [v not in ANCHORS for v in VERSIONS]
    assert {v["leases"] for v in told} == {0}


def test_a_folder_without_versions_has_nothing_to_show(tmp_path: Path) -> None:
    """A listing returns a failure status. The other commands fail, and say what to look for."""
    assert "no version of weights" in run("weights", "ls", tmp_path, status=1).stderr
    for words in (["show"], ["pull"], ["pull", "--checkpoint"]):
        rest = ["/never"] if words[0] == "pull" else []
        failed = run("weights", words[0], tmp_path, *rest, *words[1:], status=2)
        assert "holdfast.publish?" in failed.stderr


def test_show_says_how_much_has_changed(published: Path) -> None:
    """By default the newest version is shown; one that does not exist is an error."""
    told = run_json("weights", "show", published)
    assert (told["version"], told["sequence"], told["is_anchor"]) == (70, 7, False)
    assert told["changed"] == pytest.approx(0.01, rel=0.3)
    (rank,) = told["ranks"]
    assert rank["stored_nbytes"] == told["stored_nbytes"] < 0.05 * told["nbytes"]
    told = run_json("weights", "show", published, "50")
    assert told["is_anchor"]
    assert told["stored_nbytes"] > told["nbytes"]
    out = run("weights", "show", published, "60").stdout
    assert "patches of 00000005" in out
    assert "bfloat16 [600×1000]" in out
    assert run_json("weights", "show", published, "10")["changed"] is None
    assert "weights ls" in run("weights", "show", published, "11", status=2).stderr


@pytest.mark.parametrize("version", [20, 50, 70])
def test_pull_writes_a_version_as_files(published: Path, tmp_path: Path, version: int) -> None:
    """Files and checkpoints have the published weights, of an anchor and of patches."""
    out = run("weights", "pull", published, tmp_path / "files", str(version)).stdout
    assert out.startswith(f"pulled: version {version}: ")
    assert difference(load_file(tmp_path / "files/model.safetensors"), weights(version)) is None
    run("weights", "pull", published, tmp_path / "saved", str(version), "--checkpoint")
    assert difference(holdfast.load(tmp_path / "saved")["model"], weights(version)) is None
    (saved,) = holdfast.list_checkpoints(tmp_path / "saved")
    assert (saved.step, saved.is_version, saved.damage) == (version, False, None)
    err = run("weights", "pull", published, tmp_path / "files", status=2).stderr
    assert "already has a model" in err
    assert not list((published / "leases").iterdir())


def test_pull_takes_names(published: Path, tmp_path: Path) -> None:
    """--only and --rename choose tensors and their names, as for an export."""
    chosen = ["--only", "model.norm", "--rename", "model.*=n.*"]
    run("weights", "pull", published, tmp_path / "files", *chosen)
    assert list(load_file(tmp_path / "files/model.safetensors")) == ["n.norm"]
    words = ["weights", "pull", published, tmp_path / "files", "--checkpoint", *chosen]
    assert "as a whole" in run(*words, status=2).stderr


def test_follow_keeps_a_file_up_to_date(tmp_path: Path) -> None:
    """Each run of the command begins with the newest version. The file is always complete."""
    with holdfast.publish(tmp_path / "channel") as publisher:
        for version in VERSIONS[:3]:
            publisher.push(version, {"model": weights(version)}).wait()
            words = ["weights", "follow", tmp_path / "channel", "--count", "1"]
            told = run_json(*words, "--into", tmp_path / "models")
            assert (told["version"], told["kind"]) == (
                version,
                "anchor" if version == 10 else "patch",
            )
            file = load_file(tmp_path / "models/model.safetensors")
            assert difference(file, weights(version)) is None
            assert f"version {version}  number" in run(*words).stdout


def test_follow_skips_a_damaged_version(channel: Path, tmp_path: Path, capsys: Any) -> None:
    """The file keeps an earlier version until the next intact one."""
    run("weights", "follow", channel, "--count", "1", "--into", tmp_path / "models")
    with holdfast.publish(channel) as publisher:
        publisher.push(80, {"model": weights(80)}).wait()
        publisher.push(90, {"model": weights(90)}).wait()
    (patch,) = (channel / "00000009").rglob("*.patch")
    flip(patch, 40)
    with command.Channel(str(channel), holds_all=True) as reader:
        version = reader.find()
        assert command._kept_up_to_date(reader, version, str(tmp_path / "models")) is None
    assert "version 90 is skipped" in capsys.readouterr().err
    assert difference(load_file(tmp_path / "models/model.safetensors"), weights(70)) is None


def test_push_publishes_files_and_checkpoints(tmp_path: Path) -> None:
    """Versions continue with the step of a checkpoint, or with the next number."""
    channel = tmp_path / "channel"
    save_file(weights(10), tmp_path / "model.safetensors")
    holdfast.save(tmp_path / "saved", {"model": weights(20), "optim": torch.ones(3)}, step=20)
    out = run("weights", "push", channel, tmp_path / "model.safetensors").stdout
    assert out.startswith("published: version 0: ")
    assert (
        run_json("weights", "push", channel, tmp_path / "saved", "--only", "model")["version"] == 20
    )
    err = run("weights", "push", channel, tmp_path / "saved", status=2).stderr
    assert "not newer than 20" in err
    words = ["weights", "push", channel, tmp_path / "model.safetensors", "--only", "norm"]
    assert run_json(*words, "--as", "33")["version"] == 33
    for version, expected in (
        (0, weights(10)),
        (20, weights(20)),
        (33, {"norm": weights(10)["norm"]}),
    ):
        run("weights", "pull", channel, tmp_path / str(version), str(version))
        assert difference(load_file(tmp_path / f"{version}/model.safetensors"), expected) is None


def test_verify_applies_the_patches_of_a_version(channel: Path) -> None:
    """The result of a version is verified, so damage in a base shows in all dependent versions."""
    assert run_json("verify", channel)["damages"] == []
    assert run_json("verify", channel / "00000006")["ok"]
    (patch,) = (channel / "00000006").rglob("*.patch")
    flip(patch, 60)
    (damage,) = run_json("verify", channel / "00000006", status=1)["damages"]
    assert damage["key"].endswith("0.safetensors.patch")
    told = run_json("verify", channel, status=1)["damages"]
    assert {path for damage in told for path in damage["checkpoints"]} == {"00000006", "00000007"}
    for image in (channel / "00000005").rglob("*.safetensors"):
        image.unlink() if image.parent.parent.name == "data" else None
    told = run_json("verify", channel / "00000007", status=1)["damages"]
    assert "00000005" in told[0]["key"]
    shutil.move(channel / "00000007", channel / "moved")
    assert "folder of its channel" in run("verify", channel / "moved", status=2).stderr


def test_no_version_is_deleted_as_a_checkpoint(channel: Path) -> None:
    """Pruning a run or a channel leaves its versions alone; trainers do not resume from them."""
    root = channel.parent
    for step in (1, 2, 3):
        holdfast.save(root / f"step-{step:08d}", {"x": torch.ones(10)}, step=step)
    before = sorted(channel.rglob("*"))
    for uri in (channel, root):
        told = run_json("prune", uri, "--keep-last", "1", "--yes")
        assert [c["path"] for c in told["checkpoints"]] == (
            [] if uri == channel else ["step-00000001", "step-00000002"]
        )
        assert told["channels"] == ["" if uri == channel else "channel"]
    assert "is a weight channel" in run("prune", root, "--keep-last", "1", "--yes").stderr
    with holdfast.Checkpointer(channel, every=1, keep=1) as ckpt:
        state = {"x": torch.zeros(10)}
        assert ckpt.resume(state) == 0
        for step in (1, 2, 3):
            ckpt.save(step, state).wait()
    shutil.rmtree(channel / "step-00000003")
    assert set(before) <= set(channel.rglob("*"))
    newest = newest_checkpoint(root)
    assert newest is not None
    assert newest.endswith("step-00000003")


def test_copies_of_versions(channel: Path, tmp_path: Path) -> None:
    """An anchor is copied as a checkpoint; a patch is refused with the way to copy it."""
    run("cp", channel / "00000005", tmp_path / "copy")
    assert difference(holdfast.load(tmp_path / "copy")["model"], weights(50)) is None
    assert "patches" not in run("show", tmp_path / "copy").stdout
    assert not run_json("ls", tmp_path / "copy")["checkpoints"][0]["is_version"]
    for words in (
        ["cp", channel / "00000006", tmp_path / "no"],
        ["export", channel / "00000006", tmp_path / "no"],
    ):
        assert "holdfast weights pull" in run(*words, status=2).stderr
    told = run_json("cp", "-r", channel, tmp_path / "all", status=1)["checkpoints"]
    copied = [int(c["path"]) * 10 for c in told if c["problem"] is None]
    assert tuple(copied) == ANCHORS
    assert len(told) == len(VERSIONS)


def test_other_commands_know_a_channel(published: Path) -> None:
    """They recognise it, and count all its files."""
    assert "patches of 00000005" in run("show", published / "00000006", "--depth", "0").stdout
    assert "version of weights" in run("ls", published).stdout
    assert all(g["live_nbytes"] == g["nbytes"] for g in run_json("du", published)["groups"])
    err = run("show", published, status=2).stderr
    assert "it is a weight channel" in err
