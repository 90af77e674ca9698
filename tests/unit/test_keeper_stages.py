"""Test the stages that a save through a keeper reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.kept_runs import keepers_below_a_folder

import holdfast
from holdfast.errors import HoldfastError, SaveError, UsageError
from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.arenas.messages import Agreed, Event, Local, Protected, Sealed, Voided
from holdfast.storage.operations.saving.handle import SaveHandle, StageHandle
from holdfast.storage.operations.saving.keeper_request import ByKeeper, Keeping

ID = GenerationId(0, 7)


class Told:
    """A save that waits for its stages."""

    def __init__(self, *, local: bool = True, protects: bool = False) -> None:
        self.handle = SaveHandle("a step", agreed=StageHandle("agreed"))
        if local:
            self.handle.local = StageHandle("local")
        if protects:
            self.handle.protected = StageHandle("protected")
        arena: Any = None
        by = ByKeeper(arena, protects=protects, local=local)
        self.keeping = Keeping(by, self.handle, self.handle.sealed.reach)

    @property
    def ended(self) -> dict[str, HoldfastError | None]:
        """How each stage has ended."""
        ended: dict[str, HoldfastError | None] = {}
        for name in ("sealed", "agreed", "local", "protected"):
            stage: StageHandle = getattr(self.handle, name)
            if stage.status in ("reached", "failed"):
                ended[name] = None
                try:
                    stage.wait(0)
                except HoldfastError as error:
                    ended[name] = error
        return ended

    def hear(self, *events: Event) -> bool:
        """Pass events from the keeper; return whether the save waits for more."""
        return [self.keeping.tell(event) for event in events][-1]


def test_a_step_is_on_storage_of_the_host_once_the_keeper_says_so() -> None:
    """The agreement announces only that the step will be written there."""
    save = Told()
    assert save.hear(Sealed(1, ID), Agreed(ID, local=True))
    assert "local" not in save.ended
    assert not save.hear(Local(ID))
    assert save.ended == {"sealed": None, "agreed": None, "local": None}


def test_a_step_that_is_not_written_there_says_so_when_it_is_agreed_on() -> None:
    """Nobody waits for it until another one is."""
    save = Told()
    assert not save.hear(Sealed(1, ID), Agreed(ID))
    assert isinstance(save.ended["local"], UsageError)
    assert "is not written to the host's storage" in str(save.ended["local"])


@pytest.mark.parametrize(
    ("event", "said"), [(Local(ID, "the disk is full"), "the disk is full"), (Voided(ID, "x"), "x")]
)
def test_a_step_that_could_not_be_written_there_says_why(event: Event, said: str) -> None:
    """A failed write to local storage reports its reason, or that the keeper is gone."""
    save = Told()
    save.hear(Sealed(1, ID), Agreed(ID, local=True), event)
    assert isinstance(save.ended["local"], SaveError)
    assert said in str(save.ended["local"])


def test_protection_and_storage_of_the_host_are_waited_for_side_by_side() -> None:
    """A save waits for protection and local storage in any order."""
    save = Told(protects=True)
    assert save.hear(Sealed(1, ID), Agreed(ID, local=True), Protected(ID))
    assert not save.hear(Local(ID))
    assert set(save.ended.values()) == {None}


def test_a_checkpointer_whose_keeper_writes_to_storage_of_the_host_says_when(
    tmp_path: Path,
) -> None:
    """Steps that are not due there say so, and so do saves without a keeper."""
    state = {"w": torch.arange(8)}
    keeper = holdfast.Keeper(
        local=tmp_path / "nvme", local_every=2, memory="64MiB", linger="60s", deadline_s=60
    )
    with (
        keepers_below_a_folder(),
        holdfast.Checkpointer(tmp_path / "run", every=None, keeper=keeper) as run,
    ):
        run.resume(state)
        first = run.step(1, state)
        assert first is not None
        first.wait(60)
        second = run.step(2, state)
        assert second is not None
        second.wait(60)
        second.local.wait(60)
        assert "local reached" in repr(second)
        with pytest.raises(UsageError, match="is not written to the host's storage"):
            first.local.wait(60)
        assert first.local.done()
        (kept,) = (tmp_path / "nvme").iterdir()
        assert [path.name for path in kept.iterdir()] == ["0-2"]
    handle = holdfast.async_save(tmp_path / "c", state)
    with pytest.raises(UsageError, match="the host's storage"):
        handle.local.wait()
    with pytest.raises(UsageError, match="does not use a keeper"):
        handle.agreed.wait(1)
    handle.wait()
