"""Watching an object: the pauses between looks, and conditional requests."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from support.clock import in_virtual_time
from support.drivers import asynchronous
from support.servers.scripted import Answer, Request, ScriptedServer, set_credentials

from holdfast.drivers.layers.throttle import LimitLayer
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.registry import open_driver
from holdfast.drivers.watching import poll


@in_virtual_time
async def test_pauses_grow_to_a_bound() -> None:
    """Looks begin 0.05 s apart, then twice as long each time up to 2 s, less a random part; the
    last one is at the timeout. The time that a look takes is part of its pause."""
    looks: list[float] = []

    async def look() -> None:
        looks.append(asyncio.get_running_loop().time())
        await asyncio.sleep(1.0 if len(looks) == 7 else 0.0)

    assert await poll(look, 7.0, chance=lambda: 0.0) is None
    pauses = [round(after - before, 6) for before, after in pairwise(looks)]
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 1.85]
    looks.clear()
    await poll(look, 0.2, chance=lambda: 0.5)
    assert looks == pytest.approx([7.0, 7.0375, 7.1125, 7.2])


@asynchronous
async def test_a_watch_takes_no_slot() -> None:
    """Other operations run during a watch, however few may run at a time."""
    below = MemoryDriver()
    driver = LimitLayer(below, 1)
    watching = asyncio.create_task(driver.watch("x", None, 60))
    await asyncio.sleep(0.01)
    await driver.put("x", b"new")
    assert await watching == b"new"


@asynchronous
async def test_an_unchanged_object_is_not_sent_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """An object store sends the content once per change; a store without tags, or one that ignores
    the condition, is polled all the same."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    pytest.importorskip("botocore", reason="botocore is not installed")
    set_credentials(monkeypatch, tmp_path)  # type: ignore[arg-type]
    content, sent, asked = [b"one"], [], []

    def answer(request: Request) -> Answer:
        tag = f'"{content[0].decode()}"'
        asked.append(request.headers.get("if-none-match"))
        headers = {"etag": tag, "last-modified": "Sun, 22 Nov 2026 16:00:00 GMT"}
        if request.headers.get("if-none-match") == tag:
            return Answer(304, b"", headers)
        sent.append(content[0])
        return Answer(200, content[0], headers)

    with ScriptedServer(answer) as server:
        driver = open_driver(f"s3://bucket/run?endpoint={server.url}&deadline=5s")
        await driver.get("x")  # imports obstore, which may take longer than the watch
        sent.clear()
        asked.clear()
        assert await driver.watch("x", b"one", 0.5) is None
        assert sent == [b"one"]
        assert asked[0] is None
        assert {*asked[1:]} == {'"one"'}
        watching = asyncio.create_task(driver.watch("x", b"one", 60))
        await asyncio.sleep(0.3)
        content[0] = b"two"
        assert await watching == b"two"
        assert sent == [b"one", b"one", b"two"]
        await driver.close()
