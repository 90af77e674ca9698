"""Nothing is unpickled while a checkpoint is saved and loaded. Imports and calls are for ruff."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import difference

import holdfast
from holdfast.storage.integrations.fsspec import HoldfastFileSystem


def test_nothing_is_unpickled_while_checkpoints_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All operations work while everything that unpickles is out of order."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something is unpickled")

    class Refusing(pickle.Unpickler):  # a class still, for those who derive from it
        load = refuse

    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load"), (np, "load")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", Refusing)
    with pytest.raises(AssertionError, match="unpickled"):
        pickle.loads(b"")
    model = torch.nn.Linear(3, 2)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optim.step()
    values = {"rng": holdfast.RNGState(), "list": [1, (2, b"3")], "a": np.arange(3)}
    state = {"model": model, "optim": optim, **values}
    holdfast.save(tmp_path / "a", state)
    holdfast.copy(tmp_path / "a", tmp_path / "b")
    holdfast.load(tmp_path / "b", into=state)
    loaded = holdfast.load(tmp_path / "b")
    assert difference(dict(model.state_dict()), loaded["model"]) is None
    with holdfast.open(tmp_path / "b") as c:
        assert c.verify().ok
        assert torch.equal(c.read("model.weight", 1), model.weight[1])
    view = HoldfastFileSystem(str(tmp_path / "b"))
    assert all(view.cat_file(name) for name in view.find(""))
    assert len(holdfast.list_checkpoints(tmp_path)) == 2
    torch.save({"w": torch.ones(3)}, tmp_path / "c.pt")
    holdfast.import_(tmp_path / "c.pt", tmp_path / "c")
    holdfast.export(tmp_path / "c", tmp_path / "d")
    holdfast.import_(tmp_path / "d", tmp_path / "e")
    assert holdfast.diff(tmp_path / "c", tmp_path / "e").equal
