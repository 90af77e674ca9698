"""Uploads to a fake object store that loses data after acknowledging it, and parts of uploads."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.drivers.contract import ObjectInfo
from holdfast.drivers.objects import runtime
from holdfast.drivers.objects.uploads import PARTS_MAX, Cutter, PartsUpload, Target, part_nbytes_for
from holdfast.errors import NotFoundError, StorageDownError, StorageError

PART_NBYTES = 5 << 20


class Store:
    """A store that receives one object and keeps ``kept`` of its bytes; None: all."""

    def __init__(self, kept: int | None = None) -> None:
        self.kept = kept
        self.nbytes = 0
        self.asked = 0

    async def put(self, feed: Any, **options: Any) -> None:
        """Store the parts; release each once it is stored, as obstore does."""
        async for part in feed:
            self.nbytes += len(part)
            del part

    async def stat(self) -> ObjectInfo:
        """Return the size and time of the object, as the store reports them."""
        self.asked += 1
        return ObjectInfo("image", self.nbytes if self.kept is None else self.kept, time.time())

    async def drop_unfinished(self, since_s: float) -> None:
        """Do nothing: no upload is left."""

    def target(self, nbytes: int, limit_s: float = 60.0) -> Target:
        """Return the target of an upload to this store."""
        return Target(
            "s3://bucket", "image", ("bucket", "image"), nbytes, PART_NBYTES, 4, limit_s, self.put, self.stat,
            self.drop_unfinished,
        )  # fmt: skip


async def uploaded(store: Store, nbytes: int) -> None:
    """Upload an object of ``nbytes``."""
    upload = PartsUpload(store.target(nbytes))
    await upload.begin()
    try:
        for start in range(0, nbytes, PART_NBYTES):
            await upload.write(start, memoryview(bytes(min(PART_NBYTES, nbytes - start))))
        await upload.commit()
    finally:
        await upload.abort()


@pytest.mark.parametrize("kept", [0, 3 * PART_NBYTES + 8])
def test_a_store_that_has_not_kept_what_it_acknowledged_is_found_out(kept: int) -> None:
    """Commit asks the store for the object's size, and fails if bytes are missing or surplus."""
    nbytes = 3 * PART_NBYTES + 7
    with pytest.raises(StorageError, match=f"acknowledged {nbytes} bytes, but has {kept}"):
        asyncio.run(asyncio.wait_for(uploaded(Store(kept), nbytes), 60))


class Forgetful(Store):
    """A store that completes or drops the upload, then answers a retry with "no such upload".

    ``age_s`` is the age of the object at that time, None without an object.
    """

    def __init__(self, age_s: float | None, kept: int | None = None) -> None:
        super().__init__(kept)
        self.age_s = age_s

    async def put(self, feed: Any, **options: Any) -> None:
        """Take all parts, then fail."""
        await super().put(feed, **options)
        raise FileNotFoundError("<Code>NoSuchUpload</Code>")

    async def stat(self) -> ObjectInfo:
        if self.age_s is None:
            raise NotFoundError("no such object")
        found = await super().stat()
        return ObjectInfo(found.key, found.nbytes, found.modified_s - self.age_s)


def test_a_completed_upload_whose_answer_was_lost_is_committed() -> None:
    """An upload that the store no longer knows is committed if its object is new and whole."""
    store = Forgetful(age_s=0)
    asyncio.run(asyncio.wait_for(uploaded(store, 2 * PART_NBYTES + 7), 60))
    assert store.asked == 1


@pytest.mark.parametrize(
    ("age_s", "kept"), [(None, None), (3600, None), (0, 17)], ids=["none", "old", "of another size"]
)
def test_an_upload_that_somebody_dropped_is_not_taken_for_committed(
    age_s: float | None, kept: int | None
) -> None:
    """No object, an older one or one of another size all mean that the upload was lost."""
    with pytest.raises(NotFoundError):
        asyncio.run(asyncio.wait_for(uploaded(Forgetful(age_s, kept), 2 * PART_NBYTES + 7), 60))


class Silent(Store):
    """A store that accepts parts and never answers. It releases a cancelled last part first."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []

    async def put(self, feed: Any, **options: Any) -> None:
        """Take all parts, then wait until cancelled."""
        try:
            async for part in feed:
                self.held.append(part)
                del part
        finally:
            for n in range(len(self.held)):
                asyncio.get_running_loop().call_later(0.1 * n, self.held.pop)


async def written_side_by_side(limit_s: float, timeout_s: float) -> list[BaseException]:
    """Return the errors of two concurrent writes, the first limited by ``timeout_s``."""
    upload = PartsUpload(Silent().target(2 * PART_NBYTES, limit_s))
    failures: list[BaseException] = []

    async def write(start: int, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await upload.write(start, memoryview(bytes(PART_NBYTES)))
        except Exception as error:
            failures.append(error)

    await upload.begin()
    first = asyncio.create_task(write(0, timeout_s))
    await asyncio.sleep(0.05)  # the limit of the second write is reached later, too
    await asyncio.gather(first, write(PART_NBYTES, None))
    await upload.abort()
    return failures


@pytest.mark.parametrize(
    ("limit_s", "timeout_s", "kind"),
    [(60.0, 0.2, TimeoutError), (0.2, 60.0, StorageDownError)],
    ids=["deadline", "limit"],
)
def test_of_writes_side_by_side_the_one_that_knows_why_fails_first(
    limit_s: float, timeout_s: float, kind: type[Exception]
) -> None:
    """The first write to fail names the cause; the others only report that the upload is over."""
    failures = asyncio.run(asyncio.wait_for(written_side_by_side(limit_s, timeout_s), 60))
    assert isinstance(failures[0], kind)
    assert "the upload is over" in str(failures[1])


MIB = 1 << 20


@given(st.integers(0, 10 << 40), st.integers(5 << 20, 5 << 30))
def test_parts_are_few_enough_and_no_larger_than_needed(nbytes: int, preferred: int) -> None:
    """For any size there are at most 10,000 parts; one step smaller would exceed that."""
    part = part_nbytes_for(nbytes, preferred)
    assert part % preferred == 0
    assert -(-nbytes // part) <= PARTS_MAX
    assert part == preferred or -(-nbytes // (part - preferred)) > PARTS_MAX


@given(
    st.integers(1, 500), st.integers(0, 100), st.integers(1, 60), st.randoms(use_true_random=False)
)
def test_whatever_is_written_comes_out_once_and_in_order(
    nbytes: int, spare_nbytes: int, part_nbytes: int, rnd: random.Random
) -> None:
    """Pieces of any length become parts of the requested length; only the last may be shorter."""
    content = rnd.randbytes(nbytes)
    cutter, parts, at = Cutter(nbytes + spare_nbytes, part_nbytes), [], 0
    while at < nbytes:
        step = rnd.randint(1, nbytes - at)
        parts += [bytes(part) for part in cutter.cut(memoryview(content)[at : at + step])]
        at += step
    rest = cutter.rest()
    assert (rest is None) == (spare_nbytes == 0 or nbytes % part_nbytes == 0)
    parts += [] if rest is None else [bytes(rest)]
    assert cutter.rest() is None
    assert b"".join(parts) == content
    assert {len(part) for part in parts[:-1]} <= {part_nbytes}
    assert len(parts) == -(-nbytes // part_nbytes)


def test_a_part_that_one_write_fills_is_the_callers_memory() -> None:
    """Whole parts are views; parts from several writes, and a short last part, are copies."""
    memory = np.arange(25, dtype=np.uint8)
    cutter = Cutter(25, 10)
    first, second = cutter.cut(memoryview(memory)[:20])
    (last,) = cutter.cut(memoryview(memory)[20:])
    shared = [np.shares_memory(part, memory) for part in (first, second, last)]
    assert shared == [True, True, False]
    cutter = Cutter(20, 10)
    assert list(cutter.cut(memoryview(memory)[:5])) == []
    (gathered,) = cutter.cut(memoryview(memory)[5:10])
    assert (bytes(gathered), np.shares_memory(gathered, memory)) == (bytes(range(10)), False)


TASKS = Path("/proc/self/task")


@pytest.mark.skipif(not TASKS.is_dir(), reason="threads are told apart by /proc")
def test_the_end_waits_for_threads_that_may_want_the_lock() -> None:
    """The exit waits for a busy thread of obstore, which may need the interpreter's lock."""
    runtime.use("s3://bucket")
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        (TASKS / str(threading.get_native_id()) / "comm").write_text("tokio-runtime-worker"[:15])
        begun.set()
        hashlib.sha256(bytes(32 << 20)).digest()
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    runtime.settle()
    assert ended.is_set()
    thread.join()
