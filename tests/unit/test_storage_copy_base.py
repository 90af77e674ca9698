"""Copies that borrow from a base: the destination copies or links equal blocks; others are sent."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
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
from holdfast.storage.pipeline.mapping import image_driver
from holdfast.storage.pipeline.verifier import verify_images
from holdfast.storage.protocol.current import read_manifest

ELEMENTS = 12 << 20
STATE: dict[str, Any] = {"x": torch.arange(float(ELEMENTS)), "y": torch.ones(100)}
"""A state of 48 MiB; each of two ranks has an image of two chunks."""
NBYTES = 4 * ELEMENTS


def changed(share: float = 0.03) -> dict[str, Any]:
    """Return the state with other values in a share of it."""
    x = STATE["x"].clone()
    x[ELEMENTS // 5 :][: int(share * ELEMENTS)] = -1
    return {**STATE, "x": x}


There = Callable[[str], Driver]
"""Opens a folder at the destination."""


def checkpoint(
    state: dict[str, Any],
    at: Driver | None = None,
    ranks: int = 2,
    packed: Compression | None = None,
) -> Any:
    """Return storage with a checkpoint."""
    storage = at or MemoryDriver()
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


@pytest.fixture(params=["copy", "link"])
def operation(request: pytest.FixtureRequest) -> str:
    """Return the destination's traits for bytes that it already has."""
    return str(request.param)


@pytest.fixture
def there(operation: str) -> Iterator[There]:
    """Yield a function that opens folders of one storage. Memory copies; tmpfs only links."""
    if operation == "copy":
        host = fresh_uri().removeprefix("memory://")
        yield lambda name: MemoryDriver(f"{host}/{name}")
        return
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    opened: list[LocalDriver] = []

    def opening(name: str) -> LocalDriver:
        opened.append(LocalDriver(folder / name))
        return opened[-1]

    yield opening
    for driver in opened:
        run(driver.close())
    shutil.rmtree(folder)


def test_only_what_differs_passes_through_this_host(there: There, operation: str) -> None:
    """If 3 % of a state changes, at most 4 % is read and sent. The copy equals its source, also when
    the base is gone."""
    read = Counter[str]()
    theirs, base = checkpoint(changed()), checkpoint(STATE, there("a"))

    class Reading(MemoryDriver):
        async def read(self, key: str, start: int, into: Any) -> None:
            read["nbytes"] += len(into)
            await super().read(key, start, into)

    source = Reading()
    source.objects = theirs.objects
    ours = there("b")
    sent = copied(source, ours, base)
    assert sent.why_whole == ""
    assert sent.nbytes <= 0.04 * NBYTES
    assert read["nbytes"] <= 0.04 * NBYTES
    run(base.delete_all("data"))
    assert difference(loaded(ours), changed()) is None
    made, _ = run(read_manifest(ours))
    assert (made.extents is None) == (operation == "copy")
    assert made.increments == 1
    for row, image in enumerate(images(theirs)):
        expected = run(theirs.get(image))
        data = bytearray(len(expected))
        run(image_driver(ours, made).read(made.image_key(row), 0, memoryview(data)))
        assert data == expected


@pytest.mark.parametrize("share", [0, 1])
def test_nothing_and_everything_may_differ(there: There, share: float) -> None:
    """An equal checkpoint is copied there; one that differs everywhere is sent."""
    base, ours = checkpoint(STATE, there("a")), there("b")
    state = changed(share * 0.8)
    if share:
        state["x"] = -STATE["x"] - 1
    sent = copied(checkpoint(state), ours, base)
    assert sent.nbytes <= 0.001 * NBYTES if share == 0 else sent.borrowed_nbytes <= 0.001 * NBYTES
    assert difference(loaded(ours), state) is None


WHOLE = {
    "gone": "is gone",
    "other storage": "cannot copy from",
    "another layout": "another layout",
    "packed base": "compressed",
    "packed source": "compressed",
    "new layout": "layout of the images is new",
}


@pytest.mark.parametrize("reason", WHOLE)
def test_everything_is_sent_if_nothing_can_be_borrowed(
    reason: str, there: There, caplog: pytest.LogCaptureFixture
) -> None:
    """No base is an error. The report says why everything was sent, and the log says it once."""
    packed_base: Compression | None = "lz4" if reason == "packed base" else None
    packed: Compression | None = "lz4" if reason == "packed source" else None
    ranks = 3 if reason == "another layout" else 2
    theirs = checkpoint(changed(), packed=packed)
    base = checkpoint(STATE, there("a"), ranks, packed_base)
    if reason == "gone":
        run(base.delete_all("manifest.safetensors"))
    ours = MemoryDriver() if reason == "other storage" else there("b")
    sent = copied(theirs, ours, base, NBYTES if reason == "new layout" else None)
    assert sent.borrowed_nbytes == 0
    assert WHOLE[reason] in sent.why_whole
    assert len(caplog.messages) == 1
    assert run(read_manifest(ours))[0].extents is None
    assert difference(loaded(ours), changed()) is None


def test_a_rank_with_another_layout_is_sent_as_a_whole(there: There) -> None:
    """The other ranks borrow."""
    base, ours, theirs = there("a"), there("b"), MemoryDriver()
    own = [{"own": torch.arange(1 << 18) + rank} for rank in range(3)]
    save_as_ranks(base, own)
    own[1]["own"] = torch.arange(1 << 17)
    save_as_ranks(theirs, own)
    sent = copied(theirs, ours, base)
    assert 1 << 20 < sent.nbytes < 1.1 * (1 << 20)
    assert "another layout" in sent.why_whole
    run(base.delete_all("data"))
    made, _ = run(read_manifest(ours))
    assert run(verify_images(image_driver(ours, made), made, BUDGET_NBYTES, lambda *_: None)).ok


def test_damaged_digests_of_a_base_only_cost_bytes(there: There) -> None:
    """The blocks that they belong to are sent."""
    base, ours = checkpoint(STATE, there("a")), there("b")
    for image in images(base):
        flipped(base, image, -5)
    assert copied(checkpoint(STATE), ours, base).nbytes <= 0.01 * NBYTES
    assert difference(loaded(ours), STATE) is None


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_base_that_disappears_meanwhile_is_done_without(
    times: int, there: There, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After any number of copies or links, the rest is sent, and the copy is whole."""
    theirs, base, turn = checkpoint(changed()), checkpoint(STATE, there("a")), asyncio.Lock()
    made = 0

    async def remove(called: str, key: str) -> None:
        async with turn:
            if called == operation and made == times:
                await base.delete_all("data")

    async def count(called: str, key: str) -> None:
        nonlocal made
        made += called == operation
        await remove(called, key)

    ours = there("b")
    sent = copied(theirs, HookedDriver(ours, remove, count), base)
    assert (sent.why_whole == "") == (caplog.messages == [])
    if times == 0 or operation == "copy":  # else the other link may be made already
        assert "no such" in sent.why_whole.lower()
    assert (sent.borrowed_nbytes > 0) == (times > 0)
    run(base.delete_all("data"))
    assert difference(loaded(ours), changed()) is None


def test_what_is_sent_is_verified(there: There, operation: str) -> None:
    """Damage of the source where it differs from the base is an error, before and after a failed
    copy; nothing is then visible."""
    base = checkpoint(STATE, there("a"))
    for borrows in (True, False):
        theirs = checkpoint(changed())
        at = 4 * (ELEMENTS // 5) + 200_000 if borrows else 100_000
        flipped(theirs, images(theirs)[0], at)
        ours = there("b")

        async def remove(called: str, key: str, borrows: bool = borrows) -> None:
            if called == operation and not borrows:
                await base.delete_all("data")

        with pytest.raises(holdfast.DamagedError, match="'x'"):
            copied(theirs, HookedDriver(ours, before=remove), base)
        with pytest.raises(holdfast.NotACheckpointError):
            loaded(ours)


@pytest.mark.parametrize("is_given", [True, False])
def test_each_checkpoint_of_a_run_borrows_from_the_one_before(
    is_given: bool, operation: str, there: There
) -> None:
    """With ``recursive``, the first checkpoint of a folder borrows from the base, if one is given.
    Each later one borrows from its predecessor, or only incremental ones do. A repeated copy
    continues after the last one. Each step can be deleted."""
    to = there("x").uri.removesuffix("/x")
    root = fresh_uri()
    base = f"{to}/first" if is_given else None
    states: list[dict[str, Any]] = [{"x": torch.arange(2 << 20)}]

    def saved(step: int) -> None:
        x = states[-1]["x"].clone()
        x[step << 18 :][:9] = 0
        states.append({"x": x, "step": step})
        earlier = None if step in (1, 3) else f"{root}/run/step-{step - 1}"
        holdfast.save(f"{root}/run/step-{step}", states[-1], base=earlier, step=step)

    for step in (1, 2, 3, 4):
        saved(step)
    if is_given:
        assert holdfast.copy(f"{root}/run/step-1", f"{to}/first").borrowed_nbytes == 0
    report = holdfast.copy(root, to, recursive=True, base=base)
    assert [c.step for c in report.checkpoints] == [1, 2, 3, 4]
    borrows = [c.sent_nbytes < 0.1 * c.nbytes for c in report.checkpoints]
    assert borrows == [is_given, True, is_given, True]
    assert [c.borrowed_nbytes > 0 for c in report.checkpoints] == borrows
    saved(5)
    report = holdfast.copy(root, to, recursive=True, base=base)
    assert [c.borrowed_nbytes > 0 for c in report.checkpoints] == [False] * 4 + [True]
    assert report.borrowed_nbytes + report.sent_nbytes == report.checkpoints[4].nbytes
    there_again = holdfast.copy(root, to, recursive=True, overwrite=True)  # verifies all
    assert there_again.sent_nbytes == 0
    for step in (1, 4, 3, 2):
        run(there(f"run/step-{step}").delete_all("data"))
        assert difference(holdfast.load(f"{to}/run/step-5"), states[5]) is None
