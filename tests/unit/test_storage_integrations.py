"""Common parts of the trainer integrations: values, and finding and deleting checkpoints."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
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


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    """Namespaces, paths and sets, wherever they are, through a checkpoint."""
    holdfast.save(tmp_path / "c", to_stored(STATE))
    assert from_stored(holdfast.load(tmp_path / "c")) == STATE
    assert to_stored(PurePosixPath("a")) == to_stored(Path("a"))


def test_what_is_saved_as_it_is_is_not_copied() -> None:
    """Containers keep their types, and tensors stay the same objects."""
    state = OrderedDict(w=torch.ones(2), of=OrderedDict(a=[1, 2]))
    assert to_stored(state) is state
    assert from_stored(state) is state


def test_an_object_with_a_state_is_refused_by_its_path() -> None:
    """An object with a state is refused by path, since it would load as a dict."""
    with pytest.raises(holdfast.StateError, match=r'state\["a"\]\[1\] is a Linear, and would'):
        to_stored({"a": [0, nn.Linear(1, 1)]})


def test_a_forged_type_is_damage() -> None:
    """A checkpoint that names a type outside the supported few is damaged."""
    for value in ({"holdfast.type": "os.system", "value": "true"}, {"holdfast.type": "set"}):
        with pytest.raises(holdfast.DamagedError):
            from_stored({"a": value})


def test_a_container_in_itself_is_refused() -> None:
    """A save refuses a container that contains itself."""
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(holdfast.StateError):
        holdfast.save("memory://", to_stored(state))


def test_the_newest_checkpoint_is_the_whole_one_of_the_highest_step(tmp_path: Path) -> None:
    """The newest checkpoint is the intact one with the highest step; None without any."""
    assert newest_checkpoint(tmp_path / "nothing") is None
    holdfast.save(tmp_path / "weights", {"w": torch.ones(2)})
    assert newest_checkpoint(tmp_path) is None
    for step in (2, 10, 9):
        holdfast.save(tmp_path / f"step={step}.ckpt", {"w": torch.ones(2)}, step=step)
    assert newest_checkpoint(tmp_path) == str(tmp_path / "step=10.ckpt")
    for image in (tmp_path / "step=10.ckpt").rglob("data/*/*.safetensors"):
        image.unlink()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "step=9.ckpt")
    with_options = f"file://{tmp_path}?threads=2"
    assert newest_checkpoint(with_options) == f"file://{tmp_path}/step=9.ckpt?threads=2"


def test_a_checkpoint_is_removed_whole(tmp_path: Path) -> None:
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


def test_a_checkpoint_at_the_root_of_a_storage_is_removed() -> None:
    """A checkpoint at the root of a storage, without a folder above, can be removed."""
    holdfast.save("memory://removed", {"w": torch.ones(2)})
    assert remove("memory://removed")
    assert holdfast.list_checkpoints("memory://removed") == []
