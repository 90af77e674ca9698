"""The leftovers of a failed load are repaired by the next load, or named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import load_as_ranks, save_as_ranks

import holdfast
from holdfast.drivers.contract import Buffer
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.runtime.engine import offload

N = 8 << 20


def run_of(folder: Path, *states: dict[str, Any]) -> None:
    """Save checkpoints of a run, and damage the last one in the middle of ``a``."""
    with holdfast.Checkpointer(folder, grace_s=None) as checkpoints:
        for step, state in enumerate(states, 1):
            checkpoints.save(step, state)
            checkpoints.wait()
    image = next((folder / f"step-{len(states):08d}").glob("data/*/0.safetensors"))
    with holdfast.open(folder / f"step-{len(states):08d}") as checkpoint:
        assert next(iter(checkpoint.tensors)) == "a"
    with image.open("r+b") as file:
        file.seek(30 << 20)
        file.write(b"\xff" * 64)


def full(value: float, *names: str) -> dict[str, Any]:
    """A state of large tensors."""
    return {name: torch.full((N if name == "a" else 1 << 20,), value) for name in names}


@pytest.mark.parametrize("strict", ["state", False])
def test_an_older_checkpoint_that_lacks_what_was_touched_is_refused(
    strict: Any, tmp_path: Path
) -> None:
    """No state may mix two steps after a failed load."""
    run_of(tmp_path, full(1.0, "a"), full(2.0, "a", "b"))
    into = full(0.0, "a", "b")
    with (
        holdfast.Checkpointer(tmp_path, grace_s=None) as checkpoints,
        pytest.raises(holdfast.MismatchError) as caught,
    ):
        checkpoints.resume(into, strict=strict)
    text = str(caught.value)
    assert "'b'" in text
    if strict is False:
        assert "'b' still has values of a failed load" in text
        assert "create it again" in text
    assert set(into["a"].unique().tolist()) <= {0.0, 2.0}


def test_an_older_checkpoint_that_has_all_that_was_touched_is_loaded_whole(tmp_path: Path) -> None:
    """Other parts of the state stay unchanged, because no checkpoint touched them."""
    run_of(tmp_path, full(1.0, "a", "b", "d"), full(2.0, "a", "b"))
    into = full(0.0, "a", "b", "c", "d")
    with holdfast.Checkpointer(tmp_path, grace_s=None) as checkpoints:
        assert checkpoints.resume(into, strict=False) == 1
    assert {name: t.unique().tolist() for name, t in into.items()} == {
        "a": [1.0],
        "b": [1.0],
        "c": [0.0],
        "d": [1.0],
    }


class Averages:
    """An object that keeps entries missing from a loaded state."""

    def __init__(self, *names: str) -> None:
        self.of = {name: torch.zeros(1 << 20) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Its tensors."""
        return dict(self.of)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the given entries."""
        self.of |= state


def test_what_an_object_was_given_in_place_counts(tmp_path: Path) -> None:
    """Its tensors are filled before it is asked to take them."""
    old, new = Averages("x"), Averages("x", "y")
    new.of["y"].fill_(2.0)
    run_of(tmp_path, full(1.0, "a") | {"ema": old}, full(2.0, "a") | {"ema": new})
    with (
        holdfast.Checkpointer(tmp_path, grace_s=None) as checkpoints,
        pytest.raises(holdfast.MismatchError) as caught,
    ):
        checkpoints.resume(full(0.0, "a") | {"ema": Averages("x", "y")}, strict=False)
    assert "ema.y" in str(caught.value)


class Replaced(MemoryDriver):
    """Another save replaces the checkpoint while it is read: some of it was, and the rest is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.new: Any = None
        self.reads = 0

    async def read(self, key: str, start: int, into: Buffer) -> None:
        """As ever, until the third time."""
        self.reads += 1
        new, self.new = (None, self.new) if self.reads < 3 else (self.new, None)
        if new is not None:
            await offload(save_as_ranks, self, [new])
        await super().read(key, start, into)


@pytest.mark.parametrize(("new", "fits"), [(full(2.0, "a", "b"), True), (full(2.0, "b"), False)])
def test_a_checkpoint_that_is_replaced_by_one_with_less_is_refused(new: Any, fits: bool) -> None:
    """The load restarts with the new checkpoint, which must have all names that it began to fill."""
    driver = Replaced()
    save_as_ranks(driver, [full(1.0, "a", "b")])
    driver.new = new
    into = full(0.0, "a", "b")
    if fits:
        load_as_ranks(driver, [into], strict=False)
        assert into["a"].unique().tolist() == into["b"].unique().tolist() == [2.0]
        return
    with pytest.raises(holdfast.MismatchError, match="'a' still has values of a failed load"):
        load_as_ranks(driver, [into], strict=False)
