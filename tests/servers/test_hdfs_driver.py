"""Test the HDFS driver on a real name node, beyond the conformance tests of all drivers."""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from pathlib import Path
from typing import Any

import hdfs_native
import numpy as np
import pytest
from support.drivers import asynchronous, bare, reads
from support.servers.hadoop import Hadoop
from support.servers.hdfs_probe import HdfsProbe

from holdfast.drivers.contract import Upload, segments
from holdfast.drivers.hdfs import uploads
from holdfast.drivers.uri import parse
from holdfast.errors import (
    AccessError,
    BusyError,
    ExistsError,
    NotFoundError,
    StorageDownError,
    StorageError,
    UriError,
)
from holdfast.storage.pipeline.image_writer import writing_order

pytestmark = pytest.mark.clocked

MIB = 1 << 20
PART = 16 * MIB


def native(server: Hadoop) -> hdfs_native.Client:
    """Return a separate client, independent of the driver under test."""
    return hdfs_native.Client(f"hdfs://{server.address}")


def path_of(url: str) -> str:
    """Return the path of a URI's root."""
    return "/" + parse(url).location.partition("/")[2]


async def fill(upload: Upload, content: memoryview, order: list[int]) -> None:
    """Write the parts of an object, begun in this order, and commit."""
    async with asyncio.TaskGroup() as group:
        for part in order:
            group.create_task(upload.write(part * PART, content[part * PART : (part + 1) * PART]))
    await upload.commit()


@pytest.mark.nightly(28)
@pytest.mark.parametrize(
    ("webhdfs", "interleaved"), [("joined", True), ("127.0.0.1:1", False), ("off", True)]
)
@asynchronous
async def test_an_object_of_several_segments_comes_back(
    hadoop: Hadoop, hdfs_url: str, webhdfs: str, interleaved: bool, rng: np.random.Generator
) -> None:
    """Segments are joined by CONCAT, or copied if WebHDFS cannot be reached, or are one stream."""
    driver = bare(hdfs_url, **({} if webhdfs == "joined" else {"webhdfs": webhdfs}))
    content = memoryview(rng.bytes(5 * PART + 12345))
    order = writing_order(6, PART, len(content), driver.traits) if interleaved else list(range(6))
    assert len(segments(len(content), driver.traits)) == (1 if webhdfs == "off" else 3)
    await fill(await driver.create("a/x", len(content)), content, order)
    assert await driver.get("a/x") == content
    into = bytearray(3 * MIB)
    await driver.read("a/x", 2 * PART - MIB, memoryview(into))  # across a joint
    assert into == content[2 * PART - MIB : 2 * PART + 2 * MIB]
    assert HdfsProbe(parse(hdfs_url)).list() == ["a/x"]
    await driver.close()


@pytest.mark.parametrize("nbytes", [0, 2 * PART])
@asynchronous
async def test_segments_behind_the_end_are_neither_made_nor_joined(
    hdfs_url: str, nbytes: int, caplog: pytest.LogCaptureFixture, rng: np.random.Generator
) -> None:
    """An upload that ends before its last segment is joined without it: CONCAT takes no empty files."""
    driver, content = bare(hdfs_url), rng.bytes(nbytes)
    upload = await driver.create("a/x", 6 * PART)
    for start in range(0, nbytes, PART):
        await upload.write(start, memoryview(content)[start : start + PART])
    await upload.commit(nbytes)
    assert await driver.get("a/x") == content
    assert HdfsProbe(parse(hdfs_url)).list() == ["a/x"]
    assert "joined by copying" not in caplog.text
    await driver.close()


@asynchronous
async def test_block_size_replication_and_sync(hadoop: Hadoop, hdfs_url: str) -> None:
    """New files are made as the options say, and synced ones are there as others are."""
    driver = bare(hdfs_url, block_size="1MiB", replication="2", sync="on")
    await driver.put("x", bytes(3 * MIB))
    status = native(hadoop).get_file_info(f"{path_of(hdfs_url)}/x")
    assert (status.blocksize, status.replication, status.length) == (MIB, 2, 3 * MIB)
    assert await driver.get("x") == bytes(3 * MIB)
    await driver.close()


@asynchronous
async def test_a_stranger_is_refused(
    hadoop: Hadoop, hdfs_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads and writes raise AccessError, with advice on how to set the user."""
    client, root = native(hadoop), path_of(hdfs_url)
    await bare(hdfs_url).put("x", b"mine")
    client.set_permission(root, 0o700)
    monkeypatch.setenv("HADOOP_USER_NAME", "stranger")
    driver = bare(hdfs_url)
    writing = (driver.put("y", b""), driver.create("y", 1), driver.delete("x"))
    for call in (driver.get("x"), *writing, driver.delete_all("x")):
        with pytest.raises(AccessError, match="HADOOP_USER_NAME"):
            await call
    await driver.close()


@pytest.mark.nightly(5)
@asynchronous
async def test_safe_mode_is_busy(hadoop: Hadoop, hdfs_url: str) -> None:
    """A name node in safe mode raises BusyError instead of StorageDownError; reads still work."""
    driver = bare(hdfs_url)
    await driver.put("x", b"content")
    await asyncio.to_thread(hadoop.admin, "-safemode", "enter")
    try:
        with pytest.raises(BusyError, match="safe mode"):
            await driver.put("y", b"")
        assert await driver.get("x") == b"content"
    finally:
        await asyncio.to_thread(hadoop.admin, "-safemode", "leave")
    await driver.put("y", b"")
    await driver.close()


@pytest.mark.nightly(4)
@asynchronous
async def test_a_black_hole_is_an_error_at_the_deadline(tmp_path: object) -> None:
    """Every call and close() end by the deadline if a host never answers or nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        driver = bare(f"hdfs://127.0.0.1:{silent.getsockname()[1]}/x", timeout="500ms")
        writing = (driver.put("a", b""), driver.delete_all("a"), driver.sweep("a"))
        for call in (driver.get("a"), driver.stat("a"), *writing):
            began_s = time.monotonic()
            with pytest.raises(StorageDownError, match=r"no answer for 0\.5 s") as caught:
                await call
            assert time.monotonic() - began_s < 3
            assert (caught.value.key, caught.value.temporary) == ("a", True)
        await driver.close()
        port = silent.getsockname()[1]
    driver = bare(f"hdfs://127.0.0.1:{port}/x", timeout="2s")
    began_s = time.monotonic()
    with pytest.raises(StorageDownError):
        await driver.get("a")
    assert time.monotonic() - began_s < 10
    await driver.close()


@asynchronous
async def test_a_sweep_takes_the_dead_only(hadoop: Hadoop, hdfs_url: str) -> None:
    """Temporary files an hour old by the name node's clock are deleted, with empty folders."""
    client, root = native(hadoop), path_of(hdfs_url)
    driver = bare(hdfs_url)
    live = await driver.create("data/a/live", 10)
    probe = HdfsProbe(parse(hdfs_url))
    hour_ago_ms = int((time.time() - 3700) * 1000)
    for begin in ("data/b/.0", ".manifest", ".other"):
        name = f"{begin}.0123456789abcdef.0.tmp"
        probe.write(name, b"dead")
        client.set_times(f"{root}/{name}", hour_ago_ms, hour_ago_ms)
    await driver.put("data/a/x", b"")
    await driver.sweep("data")
    await driver.sweep("manifest")
    (upload,) = [name for name in probe.list() if name.startswith("data/a/.")]
    assert probe.list() == [".other.0123456789abcdef.0.tmp", upload, "data/a/x"]
    with pytest.raises(FileNotFoundError):
        client.get_file_info(f"{root}/data/b")
    await live.write(0, memoryview(bytes(10)))
    await live.commit()
    assert (await driver.stat("data/a/live")).nbytes == 10
    await driver.close()


@asynchronous
async def test_a_live_upload_shows_that_it_lives(
    hadoop: Hadoop, hdfs_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing renews the time of all its files, so that nobody takes them for dead."""
    monkeypatch.setattr("holdfast.drivers.hdfs.uploads.TOUCH_S", 0.0)
    client, driver = native(hadoop), bare(hdfs_url)
    upload = await driver.create("x", 2 * PART)
    (first,) = [status.path for status in client.list_status(path_of(hdfs_url))]
    client.set_times(first, 1, 1)
    await upload.write(PART, memoryview(b"1"))
    assert all(status.modification_time > 1 for status in client.list_status(path_of(hdfs_url)))
    await upload.abort()
    await driver.close()


@asynchronous
async def test_a_rename_whose_answer_was_lost_is_looked_up(
    hdfs_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put whose rename lost its answer succeeds exactly if the key holds its own file."""
    driver = bare(hdfs_url)
    rename = driver._client.rename

    async def renamed_twice(source: str, target: str, key: str, *, overwrite: bool) -> None:
        await rename(source, target, key, overwrite=overwrite)
        await rename(source, target, key, overwrite=overwrite)

    monkeypatch.setattr(driver._client, "rename", renamed_twice)
    await driver.put("x", b"ours", exclusive=True)
    with pytest.raises(ExistsError):
        await driver.put("x", b"theirs", exclusive=True)
    assert await driver.get("x") == b"ours"
    await driver.close()


@asynchronous
async def test_a_rename_that_finds_nothing_does_not_take_anothers_file_for_ours(
    hdfs_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary file is gone, and another writer's file has the key: the put failed."""
    driver, other = bare(hdfs_url), bare(hdfs_url)
    rename = driver._client.rename

    async def overtaken(source: str, target: str, key: str, *, overwrite: bool) -> None:
        await driver._client.delete(source, key)
        await other.put("x", b"another's")
        await rename(source, target, key, overwrite=overwrite)

    monkeypatch.setattr(driver._client, "rename", overtaken)
    with pytest.raises(StorageError):
        await driver.put("x", b"ours, which is lost")
    assert await other.get("x") == b"another's"
    await driver.close()
    await other.close()


@asynchronous
async def test_a_file_that_was_completed_short_never_gets_the_key(
    hdfs_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that a failing writer completed too short is never renamed to its key."""
    driver = bare(hdfs_url)
    write = uploads._write

    def short(call: Any, *, writer: Any, data: Any) -> None:
        write(call, writer=writer, data=data[:-1])

    monkeypatch.setattr(uploads, "_write", short)
    with pytest.raises(StorageDownError, match="2 of 3 bytes arrived"):
        await driver.put("x", b"abc")
    with pytest.raises(NotFoundError):
        await driver.stat("x")
    await driver.close()


@asynchronous
async def test_what_lies_there_besides_is_left_alone(hadoop: Hadoop, hdfs_url: str) -> None:
    """Folders are no objects; files under names that no key would get are not listed."""
    client, driver, root = native(hadoop), bare(hdfs_url), path_of(hdfs_url)
    client.mkdirs(f"{root}/folder", create_parent=True)
    with client.create(f"{root}/50%", hdfs_native.WriteOptions()) as file:
        file.write(b"foreign")
    for call in reads(driver, "folder"):
        with pytest.raises(NotFoundError):
            await call
    assert [info async for info in driver.list()] == []
    await driver.close()


@asynchronous
async def test_an_upload_whose_file_was_deleted_says_so(hadoop: Hadoop, hdfs_url: str) -> None:
    """The error for an unfinished file that somebody deleted says to save again."""
    client, driver = native(hadoop), bare(hdfs_url)
    upload = await driver.create("x", MIB)
    await upload.write(0, memoryview(bytes(MIB)))
    client.delete(path_of(hdfs_url), True)
    with pytest.raises(StorageError, match="Save again") as caught:
        await upload.commit()
    assert not isinstance(caught.value, NotFoundError)
    await driver.close()


def test_parts_are_joined_behind_a_link_of_a_viewfs(
    hadoop: Hadoop, tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """The name node knows the files by other paths than the URI, and is asked by those."""
    target = f"/{uuid.uuid4().hex}"
    table = "fs.viewfs.mounttable.cluster"
    properties = {
        "fs.defaultFS": "viewfs://cluster",
        f"{table}.link./data": f"hdfs://{hadoop.address}{target}",
        f"{table}.linkFallback": f"hdfs://{hadoop.address}/",
    }
    entries = [
        f"<property><name>{key}</name><value>{value}</value></property>"
        for key, value in properties.items()
    ]
    (tmp_path / "core-site.xml").write_text(f"<configuration>{''.join(entries)}</configuration>")
    content = memoryview(rng.bytes(3 * PART))

    async def put() -> bytes:
        webhdfs = parse(hadoop.uri).options["webhdfs"]
        driver = bare("hdfs:///data/run", conf=str(tmp_path), webhdfs=webhdfs)
        assert len(segments(len(content), driver.traits)) > 1
        await fill(await driver.create("a", len(content)), content, list(range(3)))
        found = await driver.get("a")
        await driver.close()
        return found

    assert asyncio.run(put()) == content
    assert native(hadoop).get_file_info(f"{target}/run/a").length == len(content)
    assert "joined by copying" not in caplog.text


def test_a_uri_that_leads_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples are an unknown name service, and a user, which the library would ignore."""
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    with pytest.raises(UriError, match="namenodes="):
        bare("hdfs://nowhere/x")
    with pytest.raises(UriError, match="HADOOP_USER_NAME"):
        bare("hdfs://alice@localhost:8020/x")
    bare("hdfs://somewhere/x", namenodes="localhost:1,localhost:2")
