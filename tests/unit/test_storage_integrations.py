"""Common parts of the trainer integrations: values, saves, and finding and deleting checkpoints."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.bits import fresh_uri
from torch import nn

import holdfast
from holdfast.storage.integrations.doors import Door, RunFolder
from holdfast.storage.integrations.newest import newest_checkpoint
from holdfast.storage.integrations.value_conversion import from_stored, to_stored
from holdfast.storage.operations.maintenance.prune import remove

STATE: dict[str, Any] = {
    "args": Namespace(lr=0.1, nested=[Namespace(path=Path("a/b"))]),
    "simple": SimpleNamespace(a={1, 2}),
    "frozen": frozenset({"x"}),
    "tuple": (Path("c"), 1),
    "empty": {},
    3: None,
}


def test_values_round_trip(tmp_path: Path) -> None:
    """Namespaces, paths and sets come back from a checkpoint, at any depth."""
    holdfast.save(tmp_path / "c", to_stored(STATE))
    assert from_stored(holdfast.load(tmp_path / "c")) == STATE
    assert to_stored(PurePosixPath("a")) == to_stored(Path("a"))


def test_storable_values_are_not_copied() -> None:
    """Containers keep their types, and tensors stay the same objects."""
    state = OrderedDict(w=torch.ones(2), of=OrderedDict(a=[1, 2]))
    assert to_stored(state) is state
    assert from_stored(state) is state


def test_object_with_state_is_refused() -> None:
    """An object with a state is refused by path, since it would load as a dict."""
    with pytest.raises(holdfast.StateError, match=r'state\["a"\]\[1\] is a Linear, and would'):
        to_stored({"a": [0, nn.Linear(1, 1)]})


@pytest.mark.parametrize(
    "value", [{"holdfast.type": "os.system", "value": "true"}, {"holdfast.type": "set"}]
)
def test_forged_type_is_damage(value: object) -> None:
    """A checkpoint that names a type outside the supported few is damaged."""
    with pytest.raises(holdfast.DamagedError):
        from_stored({"a": value})


def test_container_in_itself_is_refused() -> None:
    """A save refuses a container that contains itself."""
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(holdfast.StateError):
        holdfast.save("memory://", to_stored(state))


def saved(folder: Path, *steps: int) -> Path:
    """Save a checkpoint for each of these steps; return the folder."""
    for step in steps:
        holdfast.save(folder / f"step-{step}", {"w": torch.ones(2)}, step=step)
    return folder


def test_newest_checkpoint(tmp_path: Path) -> None:
    """The newest checkpoint is the intact one with the highest step; None without any."""
    assert newest_checkpoint(tmp_path / "nothing") is None
    holdfast.save(tmp_path / "weights", {"w": torch.ones(2)})
    assert newest_checkpoint(tmp_path) is None
    saved(tmp_path, 2, 10, 9)
    assert newest_checkpoint(tmp_path) == str(tmp_path / "step-10")
    for image in (tmp_path / "step-10").rglob("data/*/*.safetensors"):
        image.unlink()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "step-9")
    with_options = f"file://{tmp_path}?threads=2"
    assert newest_checkpoint(with_options) == f"file://{tmp_path}/step-9?threads=2"


@pytest.mark.parametrize(
    ("count", "options", "kept"),
    [
        (2, {}, [9, 10]),
        (2, {"also": (None,)}, [9, 10]),
        (2, {"also": (2,)}, [2, 10]),
        (1, {"also": (2,)}, [2, 10]),
        (0, {}, [10]),
        (1, {"before": 10}, [9, 10]),
        (9, {}, [2, 8, 9, 10]),
    ],
)
def test_retention(count: int, options: dict[str, Any], kept: list[int]) -> None:
    """A run keeps its newest checkpoints, at least one, and the named ones."""
    uri = fresh_uri()
    for name, step in (("step-2", 2), ("step-10", 10), ("step-9", 9), ("step-8", 8), ("x", 1)):
        holdfast.save(f"{uri}/{name}", {"n": step}, step=step)
    run = RunFolder(uri, "step-", None)
    run.retain(count, **options)
    assert run.steps() == kept
    assert holdfast.load(f"{uri}/x") == {"n": 1}


def test_retention_counts_whole_checkpoints(tmp_path: Path) -> None:
    """A damaged checkpoint never takes the place of a whole one."""
    for image in (saved(tmp_path, 1, 2, 3) / "step-3").rglob("data/*/*.safetensors"):
        image.unlink()
    RunFolder(tmp_path, "step-", None).retain(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]


@pytest.mark.parametrize("lazy", [None, False, True])
def test_checkpoint_is_removed_after_saves(tmp_path: Path, lazy: bool | None) -> None:
    """A door deletes a checkpoint once its saves in flight have succeeded."""
    door = Door()
    saved(tmp_path, 1)
    door.save(tmp_path / "step-2", {"w": torch.ones(2)}, step=2, lazy=lazy)
    door.remove(tmp_path / "step-1")
    assert (tmp_path / "step-1").exists() is (lazy is not None)
    door.wait()
    assert not (tmp_path / "step-1").exists()
    (tmp_path / "file").touch()

    def replace() -> None:
        door.save(tmp_path / "file" / "step-3", {"w": torch.ones(2)}, lazy=lazy)
        door.remove(tmp_path / "step-2")
        door.wait()

    with pytest.raises(holdfast.StorageError):
        replace()
    door.wait()
    assert door.load(tmp_path / "step-2")["w"].tolist() == [1, 1]


def test_remove_deletes_the_whole_checkpoint(tmp_path: Path) -> None:
    """A removal deletes the checkpoint and its folder, unless other files are there."""
    for name in ("a b=1", "kept", "shared"):
        holdfast.save(tmp_path / name, {"w": torch.ones(2)})
    (tmp_path / "shared" / "notes.txt").write_text("mine")
    assert remove(tmp_path / "a b=1")
    assert remove(f"file://{tmp_path}/shared")
    assert not remove(tmp_path / "a b=1")
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("*")) == ["kept", "shared"]
    assert [c.path for c in holdfast.list_checkpoints(tmp_path)] == ["kept"]
    assert (tmp_path / "shared" / "notes.txt").read_text() == "mine"


def test_remove_at_the_root_of_a_storage() -> None:
    """A checkpoint at the root of a storage, without a folder above, can be removed."""
    holdfast.save("memory://removed", {"w": torch.ones(2)})
    assert remove("memory://removed")
    assert holdfast.list_checkpoints("memory://removed") == []
