"""Copies that borrow from a base: the destination copies equal blocks, and the others are sent."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import difference, fresh_uri
from support.copies import BUDGET_NBYTES, flipped, images, loaded, run
from support.drivers import HookedDriver
from support.ranks import save_as_ranks

import holdfast
from holdfast.drivers.contract import Driver
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.format.packed import Compression
from holdfast.storage.operations.maintenance.copy import Orders, Sent, copy_checkpoint

ELEMENTS = 12 << 20
STATE: dict[str, Any] = {"x": torch.arange(float(ELEMENTS)), "y": torch.ones(100)}
"""A state of 48 MiB; each of two ranks has an image of two chunks."""
NBYTES = 4 * ELEMENTS


def changed(share: float = 0.03) -> dict[str, Any]:
    """Return the state with other values in a share of it."""
    x = STATE["x"].clone()
    x[ELEMENTS // 5 :][: int(share * ELEMENTS)] = -1
    return {**STATE, "x": x}


def checkpoint(
    state: dict[str, Any], name: str = "", ranks: int = 2, packed: Compression | None = None
) -> MemoryDriver:
    """Return storage with a checkpoint. Storage with the same host in its ``name`` is shared."""
    storage = MemoryDriver(name)
    save_as_ranks(storage, [state] * ranks, packed)
    return storage


def copied(
    theirs: Driver, ours: Driver, base: Driver | None, image_nbytes: int | None = None
) -> Sent:
    """Copy, and return the counts. Progress reports every byte once."""
    told: list[int] = []
    orders = Orders(False, BUDGET_NBYTES, image_nbytes)
    pair, sent = run(copy_checkpoint(theirs, ours, orders, told.append, base))
    assert sent.nbytes + sent.borrowed_nbytes == pair.nbytes == sum(told)
    return sent


@pytest.fixture
def host() -> str:
    """Return the name of storage at the destination that its drivers share."""
    return fresh_uri().removeprefix("memory://")


def test_only_what_differs_passes_through_this_host(host: str) -> None:
    """If 3 % of a state changes, at most 4 % is read and sent. The copy equals its source."""
    read = Counter[str]()
    theirs, base = checkpoint(changed()), checkpoint(STATE, f"{host}/a")

    class Reading(MemoryDriver):
        async def read(self, key: str, start: int, into: Any) -> None:
            read["nbytes"] += len(into)
            await super().read(key, start, into)

    source = Reading()
    source.objects = theirs.objects
    ours = MemoryDriver(f"{host}/b")
    sent = copied(source, ours, base)
    assert sent.why_whole == ""
    assert sent.nbytes <= 0.04 * NBYTES
    assert read["nbytes"] <= 0.04 * NBYTES
    assert difference(loaded(ours), changed()) is None
    run(base.delete_all("data"))
    assert difference(loaded(ours), changed()) is None
    for image, copy in zip(images(theirs), images(ours), strict=True):
        assert run(theirs.get(image)) == run(ours.get(copy))


@pytest.mark.parametrize("share", [0, 1])
def test_nothing_and_everything_may_differ(host: str, share: float) -> None:
    """An equal checkpoint is copied there; one that differs everywhere is sent."""
    base, ours = checkpoint(STATE, f"{host}/a"), MemoryDriver(f"{host}/b")
    state = changed(share * 0.8)
    if share:
        state["x"] = -STATE["x"] - 1
    sent = copied(checkpoint(state), ours, base)
    assert sent.nbytes <= 0.001 * NBYTES if share == 0 else sent.borrowed_nbytes <= 0.001 * NBYTES
    assert difference(loaded(ours), state) is None


WHOLE = {
    "gone": "cannot be read",
    "other storage": "cannot copy from it",
    "another layout": "another layout",
    "packed base": "compressed",
    "packed source": "compressed",
    "new layout": "layout of the images is new",
    "damaged base": "are not what was written",
}


@pytest.mark.parametrize("reason", WHOLE)
def test_everything_is_sent_if_nothing_can_be_borrowed(
    reason: str, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No base is an error: the report says why everything was sent, and the log says it once."""
    packed_base: Compression | None = "lz4" if reason == "packed base" else None
    packed: Compression | None = "lz4" if reason == "packed source" else None
    ranks = 3 if reason == "another layout" else 2
    theirs = checkpoint(changed(), packed=packed)
    base = checkpoint(STATE, f"{host}/a", ranks, packed_base)
    if reason == "gone":
        run(base.delete_all("manifest.safetensors"))
    if reason == "damaged base":
        for image in images(base):
            flipped(base, image, -5)
    ours = MemoryDriver("" if reason == "other storage" else f"{host}/b")
    sent = copied(theirs, ours, base, NBYTES if reason == "new layout" else None)
    assert sent.borrowed_nbytes == 0
    assert WHOLE[reason] in sent.why_whole
    assert len(caplog.messages) == (reason != "new layout")
    assert difference(loaded(ours), changed()) is None


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_a_base_that_disappears_meanwhile_is_done_without(
    copies: int, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After any number of copies, the rest is sent, and the copy is whole."""
    theirs, base = checkpoint(changed()), checkpoint(STATE, f"{host}/a")
    made = 0

    async def remove(operation: str, key: str) -> None:
        nonlocal made
        if operation == "copy" and made == copies:
            await base.delete_all("data")
        made += operation == "copy"

    ours = MemoryDriver(f"{host}/b")
    sent = copied(theirs, HookedDriver(ours, before=remove), base)
    assert "no such object" in sent.why_whole
    assert len(caplog.messages) == 1
    assert (sent.borrowed_nbytes > 0) == (copies > 0)
    assert difference(loaded(ours), changed()) is None


def test_what_is_sent_is_verified(host: str) -> None:
    """Damage of the source where it differs from the base is an error, before and after a failed
    copy; nothing is then visible."""
    base = checkpoint(STATE, f"{host}/a")
    for copies in (True, False):
        theirs = checkpoint(changed())
        at = 4 * (ELEMENTS // 5) + 200_000 if copies else 100_000
        flipped(theirs, images(theirs)[0], at)
        ours = MemoryDriver(f"{host}/b")

        async def remove(operation: str, key: str, copies: bool = copies) -> None:
            if operation == "copy" and not copies:
                await base.delete_all("data")

        with pytest.raises(holdfast.DamagedError, match="'x'"):
            copied(theirs, HookedDriver(ours, before=remove), base)
        with pytest.raises(holdfast.NotACheckpointError):
            loaded(ours)


def test_each_checkpoint_of_a_run_borrows_from_the_one_before() -> None:
    """With ``recursive``, the first checkpoint of a folder borrows from the base, and each later one
    from its predecessor. A repeated copy continues after the last one."""
    root, there = fresh_uri(), fresh_uri()
    state = {"x": torch.arange(1 << 20)}
    for step in (1, 2, 3):
        state["x"][step << 18] = 0
        holdfast.save(f"{root}/run/step-{step}", state | {"step": step})
    assert holdfast.copy(f"{root}/run/step-1", f"{there}/first").borrowed_nbytes == 0
    report = holdfast.copy(root, there, recursive=True, base=f"{there}/first")
    assert all(c.sent_nbytes < 0.1 * c.nbytes for c in report.checkpoints)
    holdfast.save(f"{root}/run/step-4", state | {"step": 4})
    report = holdfast.copy(root, there, recursive=True, base=f"{there}/first")
    assert [c.borrowed_nbytes > 0 for c in report.checkpoints] == [False, False, False, True]
    assert report.borrowed_nbytes + report.sent_nbytes == report.checkpoints[3].nbytes


def test_a_storage_without_copies_is_sent_everything(tmp_path: Path) -> None:
    """A base on a file system that cannot copy is as good as none."""
    driver = LocalDriver(tmp_path / "b")
    if driver.traits.copies is not None:
        pytest.skip("this file system copies")
    base = LocalDriver(tmp_path / "a")
    save_as_ranks(base, [STATE])
    sent = copied(checkpoint(changed(), ranks=1), driver, base)
    assert sent.why_whole == "the destination cannot copy from it"
    for used in (base, driver):
        run(used.close())
