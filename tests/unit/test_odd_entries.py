"""Test folders with unreadable or foreign entries: each is named, and all else works."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import holdfast
from holdfast.storage.integrations.newest import newest_checkpoint

NOBODY = 65534
STATE = {"w": torch.arange(5.0)}
DEAD = "20200101T000000-00000000"


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Root enters any folder, so act as somebody else."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def train(folder: Path, steps: int) -> int:
    """Resume and train ``steps`` more steps; return the step it resumed from."""
    state = {"w": torch.zeros(5)}
    with holdfast.Checkpointer(folder, every=1, keep=2, grace_s=None, when_busy="wait") as run:
        began = run.resume(state)
        for step in range(began + 1, began + steps + 1):
            run.step(step, STATE)
        assert run.counters.failed == 0
    return began


def hand_over(folder: Path) -> None:
    """Let all of it belong to nobody."""
    if os.geteuid() == 0:
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return the folder of a run that has reached step 3, owned by the user nobody."""
    root = Path(tempfile.mkdtemp(prefix="holdfast-odd-"))
    root.chmod(0o755)
    folder = root / "run"
    train(folder, 3)
    holdfast.prune(folder, keep_last=2)
    hand_over(folder)
    yield folder
    shutil.rmtree(root)


OLD = "step-00000002"


def unreadable_folder(folder: Path) -> str:
    """Add the lost+found of an ext4 volume."""
    (folder / "lost+found").mkdir(mode=0)
    return "lost+found"


def closed(path: str) -> Callable[[Path], str]:
    """Close a folder or file of an old step."""

    def odd(folder: Path) -> str:
        (folder / OLD / path).chmod(0)
        return OLD

    return odd


def linked_image(folder: Path) -> str:
    """Put a link in the place of an image."""
    (image,) = (folder / OLD).rglob("0.safetensors")
    image.rename(folder / "elsewhere")
    image.symlink_to(folder / "elsewhere")
    return OLD


def in_place_of_manifest(make: Callable[[Path], object]) -> Callable[[Path], str]:
    """Put something in the place of the manifest of an old step."""

    def odd(folder: Path) -> str:
        manifest = folder / OLD / "manifest.safetensors"
        manifest.rename(folder / "elsewhere")
        make(manifest)
        return OLD

    return odd


def listen_at(path: Path) -> None:
    """Make a socket."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def no_checkpoints(folder: Path) -> None:
    """Add everything that cannot be a checkpoint, including names that are not UTF-8."""
    (folder / "latest").symlink_to("nothing")
    (folder / "circle").symlink_to("circle")
    os.mkfifo(folder / "pipe")
    listen_at(folder / "socket")
    (folder / "other/manifest.safetensors").mkdir(parents=True)
    (folder / "other").chmod(0o777)
    os.makedirs(os.fsencode(folder) + b"/\xff\xfe/x")
    with open(os.fsencode(folder) + b"/\xff\xfe/x/f\xff", "w"):
        pass


ODD: dict[str, Callable[[Path], str | None]] = {
    "unreadable folder": unreadable_folder,
    "unreadable step": closed(""),
    "unreadable data": closed("data"),
    "unreadable manifest": closed("manifest.safetensors"),
    "linked image": linked_image,
    "linked manifest": in_place_of_manifest(lambda path: path.symlink_to("../elsewhere")),
    "circular manifest": in_place_of_manifest(lambda path: path.symlink_to(path.name)),
    "pipe for manifest": in_place_of_manifest(os.mkfifo),
    "folder for manifest": in_place_of_manifest(lambda path: (path.mkdir(), (path / "x").touch())),
    "no checkpoints": no_checkpoints,
}


@pytest.mark.nightly(5)
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_one_odd_entry_leaves_everything_else_working(
    odd: Callable[[Path], str | None], folder: Path
) -> None:
    """The run resumes, saves and prunes; nothing unreadable is deleted."""
    problem = odd(folder)
    before = sorted(folder.glob("step-00000002/**/*"))
    for path in before:
        os.utime(path, (0, 0), follow_symlinks=False)
    with as_nobody():
        lines = {c.path: c.problem for c in holdfast.list_checkpoints(folder)}
        assert lines.pop("step-00000003") is None
        assert [path for path, what in lines.items() if what] == ([problem] if problem else [])
        holdfast.save(folder / "step-00000007", STATE, step=7)
        holdfast.prune(folder, keep_last=1, idle_s=0)
        assert train(folder, 2) == 7
        listed = holdfast.list_checkpoints(folder)
    assert [c.step for c in listed[-2:]] == [8, 9]
    if problem == "step-00000002":
        (folder / "step-00000002").chmod(0o755)
        assert sorted(folder.glob("step-00000002/**/*")) == before


@pytest.mark.parametrize("add", [unreadable_folder, closed("")])
def test_the_last_ones_are_listed_with_folders_that_cannot_be_read(
    folder: Path, add: Callable[[Path], str]
) -> None:
    """Ask for one checkpoint: the newest is listed, and so is the folder that may hold another."""
    name = add(folder)
    with as_nobody():
        problem, newest = holdfast.list_checkpoints(folder, last=1)
    assert (problem.path, newest.path) == (name, "step-00000003")
    assert problem.problem is not None


def unreadable_old_lock(data: Path) -> None:
    """Add an old lock that cannot be read."""
    lock = data / "pruning"
    lock.write_bytes(b"0" * 16)
    lock.chmod(0)
    os.utime(lock, (0, 0))


BESIDE: dict[str, Callable[[Path], object]] = {
    "unreadable attempt": lambda data: (data / DEAD).mkdir(mode=0),
    "unreadable part": lambda data: (next(data.iterdir()) / "sub").mkdir(mode=0),
    "no lock": lambda data: (data / "pruning").write_bytes(b"junk"),
    "unreadable old lock": unreadable_old_lock,
}


@pytest.mark.parametrize("odd", BESIDE.values(), ids=BESIDE)
def test_a_step_is_saved_again_beside_odd_data(odd: Callable[[Path], None], folder: Path) -> None:
    """A save leaves unreadable and foreign entries alone."""
    odd(folder / "step-00000003/data")
    with as_nobody():
        holdfast.save(folder / "step-00000003", {"w": torch.ones(5)}, step=3)
        assert torch.equal(holdfast.load(folder / "step-00000003")["w"], torch.ones(5))


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "other contents": lambda path: path.write_bytes(b"junk"),
    "another list": lambda path: path.write_bytes(b"[]"),
    "mode 0": lambda path: path.touch(mode=0),
    "link": lambda path: path.symlink_to("metrics.json"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "folder": lambda path: path.mkdir(mode=0o777),
    "named pipe": os.mkfifo,
    "socket": listen_at,
}


@pytest.mark.nightly(4)
@pytest.mark.parametrize("make", UNREADABLE.values(), ids=UNREADABLE)
def test_a_lineage_that_cannot_be_read(
    folder: Path, make: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is deleted, and only an explicit step can be resumed."""
    make(folder / "lineage.json")
    hand_over(folder)
    with as_nobody():
        lines = [(c.path, c.problem is None) for c in holdfast.list_checkpoints(folder)]
        assert lines == [
            ("lineage.json", False), ("step-00000002", True), ("step-00000003", True),
        ]  # fmt: skip
        report = holdfast.prune(folder, keep_last=1, idle_s=0)
        assert (report.checkpoints, report.leftovers, [*report.failed]) == ((), (), [""])
        assert report.failed[""] in caplog.text
        with pytest.raises(holdfast.DamagedError, match=r"lineage\.json"):
            newest_checkpoint(folder)
        with holdfast.Checkpointer(folder, every=1, keep=1, grace_s=None) as run:
            for back in ({}, {"before": 3}):
                with pytest.raises(holdfast.DamagedError, match=r"resume\(state, step=…\)"):
                    run.resume({"w": torch.zeros(5)}, **back)
            assert run.resume({"w": torch.zeros(5)}, step=2) == 2
            run.step(3, STATE)
        assert [c.step for c in holdfast.list_checkpoints(folder)] == [3]
        assert train(folder, 1) == 3


def test_a_lineage_that_becomes_unreadable_fails_no_save(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A committed save counts as saved. Nothing is deleted until the record can be read."""
    with as_nobody(), holdfast.Checkpointer(folder, every=1, keep=1, grace_s=None) as run:
        run.resume({"w": torch.zeros(5)})
        (folder / "lineage.json").symlink_to("nothing")
        run.step(4, STATE)
        run.wait()
        assert (run.counters.saved, run.counters.failed, run.counters.pruned) == (1, 0, 0)
        assert "lineage.json cannot be read" in caplog.text
        (folder / "lineage.json").unlink()
        run.step(5, STATE)
        run.wait()
        assert run.counters.pruned == 3


def a_file_for_data(data: Path) -> None:
    """Replace the data folder by a file; the manifest stays."""
    shutil.rmtree(data)
    data.touch()


def within_dead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Add a dead attempt whose record is an odd entry."""

    def add(data: Path) -> None:
        (data / DEAD).mkdir()
        (data / DEAD / "0.safetensors").write_bytes(b"0")
        make(data / DEAD / "fate")

    return add


def closed_dead(data: Path) -> None:
    """Add a dead attempt in a folder that cannot be written."""
    within_dead(lambda fate: fate.parent.chmod(0o555))(data)


FAILING: dict[str, Callable[[Path], None]] = {
    "data is a file": a_file_for_data,
    "fate is a folder": within_dead(lambda path: path.mkdir()),
    "fate is a link": within_dead(lambda path: path.symlink_to("nothing")),
    "fate has mode 0": within_dead(lambda path: path.touch(mode=0)),
    "dead attempt is closed": closed_dead,
    "checkpoint is closed": lambda data: next(data.iterdir()).chmod(0o555),
    "data is closed": lambda data: data.chmod(0o555),
    "lock is a link": lambda data: (data / "pruning").symlink_to("nothing"),
}


@pytest.mark.nightly(4)
@pytest.mark.parametrize("odd", FAILING.values(), ids=FAILING)
def test_a_folder_that_cannot_be_pruned_leaves_the_others_pruned(
    folder: Path, odd: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The log and the report name it, and the others are pruned."""
    odd(folder / "step-00000002/data")
    within_dead(lambda fate: None)(folder / "step-00000003/data")
    hand_over(folder)
    with as_nobody():
        report = holdfast.prune(folder, keep_last=1, idle_s=0)
        assert [*report.failed] == ["step-00000002"]
        assert [x.path for x in report.leftovers] == ["step-00000003"]
        assert "the folder step-00000002 cannot be pruned" in caplog.text
        assert train(folder, 2) == 3


def said(uri: Any, call: Callable[[Any], Any] = holdfast.load) -> str:
    """Return the text of the error."""
    with pytest.raises(holdfast.NotACheckpointError) as caught:
        call(uri)
    return str(caught.value)


def touch(folder: Path, *names: str) -> Path:
    """Make a folder with empty files."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def test_a_folder_of_torchs_distributed_checkpoint(tmp_path: Path) -> None:
    """It is recognised by load, open, copy and on the command line; torch itself wrote it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is only one process
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c", no_dist=True)
    for call in (holdfast.load, holdfast.open, lambda uri: holdfast.copy(uri, tmp_path / "d")):
        text = said(tmp_path / "c", call)
        assert "it looks like a checkpoint of torch.distributed.checkpoint" in text
        assert (
            "`holdfast import SRC DEST`, or holdfast.import_, converts it to a checkpoint" in text
        )


def test_files_of_torch_save(tmp_path: Path) -> None:
    """They are recognised by their first bytes, of either kind, and in a folder by their names."""
    torch.save({"w": torch.ones(3)}, tmp_path / "new.pt")
    torch.save({"w": torch.ones(3)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    torch.save({"state_dict": {}}, tmp_path / "epoch=1.ckpt")
    assert "it is a file of torch.save (in" in said(tmp_path / "new.pt")
    assert "it is a pickle of an older version of torch.save" in said(
        tmp_path / "old.bin", holdfast.open
    )
    assert "as Lightning's Trainer writes it" in said(tmp_path / "epoch=1.ckpt")
    assert "it looks like files of torch.save" in said(tmp_path)
    assert "it is a file of torch.save" in said(tmp_path / "new.pt", holdfast.list_checkpoints)


def test_safetensors(tmp_path: Path) -> None:
    """A file and a model's folder are recognised."""
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    assert "it is a safetensors file" in said(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert "it looks like a model in Hugging Face's safetensors" in said(tmp_path)


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (("latest", "global_step10/mp_rank_00_model_states.pt"), "a DeepSpeed checkpoint"),
        (("meta.pt", ".metadata", "__0_0.distcp"), "a Lightning checkpoint"),
        (("latest_checkpointed_iteration.txt", "iter_10/common.pt"), "a Megatron-LM checkpoint"),
        (("common.pt", "metadata.json", ".metadata"), "a checkpoint of Megatron-core"),
        (("step-10/.metadata",), "a checkpoint of torch.distributed.checkpoint"),
        (("100/default/manifest.ocdbt", "100/_CHECKPOINT_METADATA"), "an Orbax checkpoint"),
        (("model.safetensors.index.json",), "a model in Hugging Face's safetensors"),
        (("trainer_state.json", "model.safetensors"), "a checkpoint of Hugging Face's Trainer"),
        (("random_states_0.pkl", "model.safetensors"), "a checkpoint of Accelerate"),
        (("ckpt-1.index", "ckpt-1.data-00000-of-00001"), "a TensorFlow checkpoint"),
    ],
)
def test_folders_are_known_by_their_names(
    names: tuple[str, ...], what: str, tmp_path: Path
) -> None:
    """No file in them is opened."""
    assert f"it looks like {what}" in said(touch(tmp_path / "c", *names))


def test_what_is_not_known_is_not_guessed(tmp_path: Path) -> None:
    """This holds for nothing, an empty folder, notes, and an image of a cat."""
    plain = "nothing is committed here (key manifest.safetensors"
    empty = tmp_path / "alone" / "empty"  # not next to what other tests have saved
    empty.mkdir(parents=True)
    assert plain in said(empty / "nowhere")
    assert plain in said(empty)
    assert plain in said(touch(empty / "c", "notes.txt", "cat.png"))
    assert plain in said("memory://nothing/here")
    (empty / "cat.png").write_bytes(b"\x89PNG")
    assert "it is a file" in said(empty / "cat.png")


def test_checkpoints_below_are_named(tmp_path: Path) -> None:
    """The error names the last one, by number, and how many there are."""
    for step in (9, 10, 8):
        holdfast.save(tmp_path / "run" / f"step-{step}", {"step": step})
    text = said(tmp_path / "run")
    assert "3 checkpoints are below it" in text
    assert f"Did you mean file://{tmp_path}/run/step-10?" in text
    holdfast.save("memory://below/one/c", {"step": 1})
    assert "a checkpoint is below it" in said("memory://below/one")


def test_checkpoints_beside_a_misspelled_name_are_named(tmp_path: Path) -> None:
    """The error names the one with the same number, or the most similar name, or the last one."""
    for step in (9, 10):
        holdfast.save(tmp_path / f"step-{step:08d}", {"step": step})
    assert f"Did you mean file://{tmp_path}/step-00000009?" in said(tmp_path / "step-9")
    assert f"Did you mean file://{tmp_path}/step-00000010?" in said(tmp_path / "stp-00000010")
    assert f"Did you mean file://{tmp_path}/step-00000010?" in said(tmp_path / "best")


def test_parts_of_a_checkpoint_are_recognised(tmp_path: Path) -> None:
    """A manifest alone and the images of an interrupted save are not foreign formats."""
    holdfast.save(tmp_path / "c", {"w": torch.ones(3)})
    manifest = tmp_path / "c" / "manifest.safetensors"
    assert "it is the manifest of a checkpoint" in said(manifest)
    manifest.unlink()
    assert "a save of Holdfast is in progress, or was interrupted" in said(tmp_path / "c")


def test_a_bounded_number_of_names_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket may have millions of names."""
    touch(tmp_path / "c", *(f"{i}.distcp" for i in range(50)))
    monkeypatch.setattr("holdfast.storage.operations.foreign_formats.LOOKED_AT", 10)
    assert "torch.distributed.checkpoint" in said(tmp_path / "c")
