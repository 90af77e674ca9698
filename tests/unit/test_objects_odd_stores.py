"""Saves and loads on stores with odd responses: they succeed or fail clearly; none looks empty."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import difference
from support.servers.odd_store import OddStore, Unfinished, kind_of
from support.servers.scripted import Answer, Request, ScriptedServer, refusal, set_credentials

import holdfast
from holdfast.drivers.conformance.place import Held, held_now
from holdfast.drivers.conformance.test_cancellation import DELAYS_S, SUSPENSIONS_MAX, Interrupt
from holdfast.drivers.contract import Driver
from holdfast.drivers.registry import opened_driver

pytestmark = pytest.mark.clocked

pytest.importorskip("obstore", reason="obstore is not installed")
pytest.importorskip("botocore", reason="botocore is not installed")

STATE = {"x": torch.arange(1000.0), "step": 1}
LARGE = {"x": torch.arange(3_000_000.0)}
"""A state whose upload has three parts."""
PAGE = b"<!DOCTYPE html><html><head><title>Console</title></head><body></body></html>"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set dummy credentials, and forget the stores of other tests."""
    set_credentials(monkeypatch, tmp_path)


@pytest.fixture
def store() -> OddStore:
    """Return a store that answers correctly until the test sets a fault."""
    return OddStore()


@pytest.fixture
def server(store: OddStore) -> Iterator[ScriptedServer]:
    """Serve the store at a URL."""
    with ScriptedServer(store) as server:
        yield server


@pytest.fixture
def root(server: ScriptedServer) -> str:
    """Return the URI of a folder of runs, with retries for at most two seconds."""
    return f"s3://bucket/run?endpoint={server.url}&region=us-east-1&part_size=5MiB&deadline=2s"


def below(root: str, name: str) -> str:
    """Return the URI of a checkpoint in ``root``."""
    return root.replace("?", f"/{name}?", 1)


def web_site(status: int) -> Any:
    """Answer every request with the same page, and requests for objects with ``status``."""

    def answer(asked: Request) -> Answer:
        is_object = kind_of(asked) in ("get", "head", "put")
        return Answer(status if is_object else 200, PAGE, {"content-type": "text/html"})

    return answer


def resumed(root: str) -> int:
    """Return the step that a run resumes from."""
    with holdfast.Checkpointer(root) as checkpointer:
        return checkpointer.resume({"x": torch.zeros(1000), "step": 0})


CALLS = {
    "list_checkpoints": holdfast.list_checkpoints,
    "resume": resumed,
    "load": lambda root: holdfast.load(below(root, "step-1")),
    "save": lambda root: holdfast.save(below(root, "step-1"), STATE),
    "prune": lambda root: holdfast.prune(root, keep_last=1),
}


@pytest.mark.nightly(4)
@pytest.mark.parametrize(("before", "status"), [(False, 200), (True, 404)])
@pytest.mark.parametrize("call", CALLS)
def test_a_web_site_is_no_empty_store(
    call: str, status: int, before: bool, root: str, store: OddStore
) -> None:
    """Every call to a web site instead of a store, such as a login page, fails clearly."""
    if before:
        holdfast.save(below(root, "step-1"), STATE)
    store.fault = web_site(status)
    with pytest.raises(holdfast.StorageError, match=r"web site|console|key is taken"):
        CALLS[call](root)


@pytest.mark.parametrize("body", [b"", b"<a></a>"])
def test_answers_of_no_store_at_all_are_no_empty_listing(
    body: bytes, root: str, store: OddStore
) -> None:
    """A listing fails on a server that answers every request with status 200."""
    store.fault = lambda asked: Answer(200, body)
    with pytest.raises(holdfast.HoldfastError):
        holdfast.list_checkpoints(root)


def test_an_empty_store_is_empty(root: str) -> None:
    """An empty store proves that it is a store by refusing a read of a missing object."""
    assert list(holdfast.list_checkpoints(root)) == []
    assert resumed(root) == 0


@pytest.mark.parametrize("call", ["list_checkpoints", "prune"])
def test_a_listing_that_repeats_itself_ends(call: str, root: str, store: OddStore) -> None:
    """A listing ends on a store that ignores continuation tokens and repeats its first page."""
    holdfast.save(below(root, "step-0"), STATE, step=0)
    store.objects |= {f"run/step-0/more/{n}": (b"", 0.0) for n in range(300)}
    store.page, store.honours_tokens = 300, False
    with pytest.raises(holdfast.StorageError, match="does not end"):
        CALLS[call](root)


def test_objects_that_a_listing_shows_several_times_count_once(root: str, store: OddStore) -> None:
    """An object that a listing repeats, as caches and some stores do, counts once."""
    for n in range(2):
        holdfast.save(below(root, f"step-{n}"), STATE, step=n)
    junk = {f"run/step-0/{n}": (b"", 0.0) for n in range(1000)}
    store.objects = junk | store.objects

    def twice(asked: Request, answer: Answer) -> Answer:
        if kind_of(asked) != "list":
            return answer
        shown = answer.body.partition(b"<Contents>")[2].rpartition(b"</Contents>")[0]
        again = b"</Contents><Contents>".join([shown] * 2)
        return Answer(answer.status, answer.body.replace(shown, again), answer.headers)

    store.edit = twice
    assert [info.step for info in holdfast.list_checkpoints(root)] == [0, 1]


def test_redirects_in_a_circle_are_a_wrong_endpoint(root: str, store: OddStore) -> None:
    """Circular redirects mean a wrong endpoint, and are not retried like an outage."""
    store.fault = lambda asked: Answer(301, b"", {"location": asked.path})
    for call in ("list_checkpoints", "load"):
        with pytest.raises(holdfast.StorageError, match="at another endpoint"):
            CALLS[call](root)


DATES = {
    "2010, always": lambda: 1289000000.0,
    "two hours behind": lambda: time.time() - 7200,
    "a day ahead": lambda: time.time() + 86400,
}


@pytest.mark.parametrize("dates", ["2010, always", "a day ahead"])
def test_no_save_aborts_its_own_upload(dates: str, root: str, store: OddStore) -> None:
    """A save keeps its own upload, whatever start date the store reports for it."""
    store.initiated_s = DATES[dates]
    for _ in range(2):
        holdfast.save(below(root, "step-1"), LARGE)
    assert difference(holdfast.load(below(root, "step-1")), LARGE) is None
    assert store.aborted == []


@pytest.mark.parametrize("dates", DATES)
@pytest.mark.parametrize("part", [False, True], ids=["no part", "a part"])
def test_a_sweep_spares_what_another_process_uploads(
    part: bool, dates: str, root: str, store: OddStore
) -> None:
    """With wrong dates from the store, a sweep discards nothing: another rank may be uploading."""
    store.initiated_s = DATES[dates]
    theirs = Unfinished("run/step-1/data/20260101T000000-00000000/1.safetensors", DATES[dates]())
    if part:
        theirs.parts[1] = (b"x", DATES[dates]())
    store.uploads["theirs"] = theirs
    holdfast.save(below(root, "step-1"), STATE)
    assert store.aborted in ([], ["run/step-1/data/.holdfast-clock"])
    assert list(store.uploads) == ["theirs"]


def test_a_sweep_drops_what_is_dead(root: str, store: OddStore) -> None:
    """A sweep drops only an upload that began two hours ago by a correct clock."""
    for name, began_s in (("dead", time.time() - 7200), ("young", time.time() - 600)):
        store.uploads[name] = Unfinished(f"run/step-1/data/{name}/0.safetensors", began_s)
    holdfast.save(below(root, "step-1"), STATE)
    assert list(store.uploads) == ["young"]


def write(folder: Path, key: str) -> None:
    """Write the shared file of credentials."""
    text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = x\n"
    (folder / "credentials").write_text(text)


def test_credentials_renewed_during_an_upload_sign_its_next_part(
    root: str, store: OddStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials that are renewed during an upload sign its next part."""
    known = "OLD"

    def fault(asked: Request) -> Answer | None:
        nonlocal known
        if f"Credential={known}/" not in asked.headers["authorization"]:
            return refusal(403, "ExpiredToken")
        if kind_of(asked) == "part" and "partNumber=2" in asked.path:
            known = "NEW"
            write(tmp_path, known)
        return None

    write(tmp_path, known)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    store.fault = fault
    holdfast.save(below(root, "step-1") + "&concurrency=1", LARGE)
    assert known == "NEW"
    assert difference(holdfast.load(below(root, "step-1")), LARGE) is None


@pytest.mark.nightly(3)
@pytest.mark.parametrize("lazy", [False, True])
def test_credentials_that_expire_under_a_part_begin_the_image_again(
    lazy: bool, root: str, store: OddStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If credentials expire during a part, the upload restarts from the copies of the state."""
    known = "OLD"
    state, changed = {"x": torch.arange(3_000_000.0)}, threading.Event()

    def fault(asked: Request) -> Answer | None:
        nonlocal known
        if kind_of(asked) == "part" and "partNumber=2" in asked.path and known == "OLD":
            assert changed.wait(30)
            known = "NEW"
            write(tmp_path, known)
        if f"Credential={known}/" not in asked.headers["authorization"]:
            return refusal(403, "ExpiredToken")
        return None

    write(tmp_path, known)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    store.fault = fault
    handle = holdfast.async_save(below(root, "step-1"), state, lazy=lazy)
    handle.captured.wait(60)
    state["x"].zero_()
    changed.set()
    handle.wait(60)
    assert known == "NEW"
    assert difference(holdfast.load(below(root, "step-1")), LARGE) is None
    assert store.uploads == {}


@pytest.mark.parametrize("state", [STATE, LARGE], ids=["small", "large"])
def test_a_bucket_with_object_lock_gets_its_checksums(
    state: Any, root: str, store: OddStore
) -> None:
    """A bucket with object lock gets its checksums; its setting is read once per process."""
    refused = []

    def fault(asked: Request) -> Answer | None:
        names = [name for name in asked.headers if re.match("x-amz-checksum-|content-md5$", name)]
        if kind_of(asked) not in ("put", "part") or names:
            return None
        refused.append(asked)
        message = "Content-MD5 OR x-amz-checksum- HTTP header is required with Object Lock"
        body = f"<Error><Code>InvalidRequest</Code><Message>{message}</Message></Error>"
        return Answer(400, body.encode(), {"content-type": "application/xml"})

    store.fault = fault
    for _ in range(2):
        holdfast.save(below(root, "step-1"), state)
    assert difference(holdfast.load(below(root, "step-1")), state) is None
    assert len(refused) == 1
    with pytest.raises(holdfast.StorageError, match="Content-MD5"):
        holdfast.save(below(root, "step-1") + "&checksum=signed", state)


# Saves that copy from an earlier checkpoint

CHUNKS = {"x": torch.arange(12_000_000.0)}
"""A state whose image has three chunks."""


def is_copy(asked: Request) -> bool:
    """Return whether a request asks to copy a part."""
    return "x-amz-copy-source" in asked.headers


def refuse_copies(asked: Request) -> Answer | None:
    """Answer as a store that does not know such requests."""
    return refusal(501, "NotImplemented") if is_copy(asked) else None


def want_checksums(asked: Request) -> Answer | None:
    """Refuse parts without a checksum, as a bucket with Object Lock does."""
    has_one = {"content-md5", "x-amz-checksum-sha256"} & {*asked.headers}
    if kind_of(asked) != "part" or is_copy(asked) or has_one:
        return None
    text = "<Code>InvalidRequest</Code><Message>Content-MD5 HTTP header is required</Message>"
    return Answer(400, f"<Error>{text}</Error>".encode(), {"content-type": "application/xml"})


def losing(kind: str) -> Any:
    """Lose the answers to requests of a kind that were done."""
    return lambda asked, answer: refusal(500, "InternalError") if kind_of(asked) == kind else answer


def copied_nbytes(root: str) -> int:
    """Save twice; the second save changes one chunk and copies the others if it can."""
    holdfast.save(below(root, "step-1"), CHUNKS)
    changed = {"x": CHUNKS["x"].clone()}
    changed["x"][-1] = 0
    report = holdfast.save(below(root, "step-2"), changed, base=below(root, "step-1"))
    assert difference(holdfast.load(below(root, "step-2")), changed) is None
    return int(report.borrowed_nbytes)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [(lambda asked: None, 32 << 20), (want_checksums, 32 << 20), (refuse_copies, 0)],
    ids=["none", "checksums", "no copies"],
)
def test_equal_chunks_are_copied_by_the_store(
    fault: Any, expected: int, root: str, store: OddStore
) -> None:
    """A store that copies parts sends no equal chunk; with one that does not, the save is whole."""
    holdfast.save(below(root, "step-0"), STATE)
    store.fault = fault
    assert copied_nbytes(root.replace("part_size=5MiB", "part_size=16MiB")) == expected
    assert store.uploads == {}


def test_a_composed_upload_is_complete_although_its_answer_is_lost(
    root: str, store: OddStore
) -> None:
    """If the object is there with the right size, a repeated completion has succeeded."""
    lost = []

    def edit(asked: Request, answer: Answer) -> Answer:
        if kind_of(asked) == "complete" and answer.status == 200:
            lost.append(asked.path)
            return refusal(500, "InternalError")
        return answer

    store.edit = edit
    assert copied_nbytes(root) == 32 << 20
    assert len(lost) == 2


def test_a_composed_upload_whose_beginning_is_lost_is_dropped(root: str, store: OddStore) -> None:
    """An upload that the store has begun, and nobody knows by name, does not stay."""
    holdfast.save(below(root, "step-1"), CHUNKS)
    store.edit = losing("begin")
    once = below(root, "step-2") + "&retries=0"
    with pytest.raises(holdfast.StorageError):
        holdfast.save(once, CHUNKS, base=below(root, "step-1"))
    store.edit = lambda asked, answer: answer
    assert store.uploads == {}
    assert store.aborted


# Connections


async def _listed(driver: Driver) -> None:
    async for _ in driver.list("kept"):
        pass


LOOKS: dict[str, Callable[[Driver], Coroutine[Any, Any, Any]]] = {
    "get": lambda driver: driver.get("kept"),
    "fetch": lambda driver: driver.fetch("kept", 0, 1 << 20),
    "pieces": lambda driver: driver.read_pieces("kept", 0, 1 << 20, lambda piece: None),
    "list": _listed,
    "sweep": lambda driver: driver.sweep("kept"),
}


@pytest.fixture
def held(root: str, store: OddStore) -> Held:
    """Store a few objects, use a driver, and return the descriptors and threads of the process."""

    async def use() -> None:
        async with opened_driver(root) as driver:
            await driver.put("kept", bytes(1 << 20))
            await driver.sweep("kept")

    asyncio.run(use())
    store.page = 150
    store.objects |= {f"run/kept/{n:03d}": (b"x", 0.0) for n in range(300)}
    return held_now()


@pytest.mark.parametrize("look", LOOKS)
def test_close_closes_what_errors_refer_to(look: str, root: str, held: Held) -> None:
    """Cancelled calls leave no connection open, though somebody keeps their errors, and with them
    the variables of all functions that they have passed through."""
    kept: list[BaseException] = []

    async def keeping(work: Coroutine[Any, Any, Any]) -> None:
        try:
            await work
        except BaseException as error:
            kept.append(error)
            raise

    async def cancel_everywhere() -> None:
        async with opened_driver(root, retries=0, op_timeout_s="off") as driver:
            for delay_s in DELAYS_S:
                for at in range(1, SUSPENSIONS_MAX):
                    interrupt = Interrupt(at, delay_s)
                    await interrupt(keeping(LOOKS[look](driver)))
                    if not interrupt.reached:
                        break

    asyncio.run(cancel_everywhere())
    assert kept
    assert held.outlived_by() == []


def test_close_ends_a_listing(root: str, held: Held) -> None:
    """A listing that nobody has ended keeps no connection open, and cannot go on."""

    async def leave() -> Any:
        async with opened_driver(root, retries=0, op_timeout_s="off") as driver:
            listing = driver.list()
            await anext(listing)
        with pytest.raises(holdfast.StorageError, match="the driver is closed"):
            async for _ in listing:
                pass
        return listing

    listing = asyncio.run(leave())
    assert held.outlived_by() == []
    del listing
