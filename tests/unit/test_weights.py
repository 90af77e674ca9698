"""Weight channels in one process: updates, lag, failures, retention."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import difference, fresh_uri

import holdfast
from holdfast.drivers.contract import ObjectInfo
from holdfast.drivers.memory import STORES, MemoryDriver
from holdfast.storage.weights.channel import LEASE_S, Head, encoded_lease, leased

SIZE = 3_000_000
"""Elements of the largest tensor: its image has two chunks."""


class Model(torch.nn.Module):
    """A model with tensors of several dtypes, a tied one and a buffer."""

    def __init__(self, seed: int, size: int = 10_000) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
            values = torch.randn(*shape, generator=generator) * 0.02
            return torch.nn.Parameter(values.to(dtype), requires_grad=False)

        self.big = parameter(3, size)
        self.tied = self.big
        self.norm = parameter(1000, dtype=torch.float32)
        self.small = parameter(77, 3, dtype=torch.float16)
        self.scales = parameter(5, dtype=torch.float8_e4m3fn)
        self.register_buffer("count", torch.tensor([seed]))


def train(model: Model, share: float, seed: int) -> None:
    """Change a ``share`` of all elements a little."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.state_dict().values():
        raw = tensor.view(-1).view(torch.uint8)
        chosen = torch.rand(raw.shape, generator=generator) < share
        raw[chosen] += 1


def weights(model: Model) -> dict[str, Any]:
    """Return a copy of the weights."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def follow(subscriber: holdfast.Subscriber, engine: Model, model: Model) -> holdfast.Update:
    """Update, and compare the engine with the trainer."""
    update = subscriber.update()
    assert update is not None
    assert difference(weights(engine), weights(model)) is None
    return update


@pytest.mark.parametrize("in_place", [False, True])
def test_every_version_arrives_bit_for_bit(in_place: bool) -> None:
    """A subscriber has exactly the newest version after each update, with little read for it."""
    uri = fresh_uri()
    model, engine = Model(1, SIZE), Model(2, SIZE)
    held = engine.norm.data.data_ptr()
    with (
        holdfast.publish(uri, anchor=6) as publisher,
        holdfast.subscribe(uri, {"model": engine}, in_place=in_place) as subscriber,
    ):
        assert subscriber.update() is None
        for version in range(0, 24, 3):
            publisher.push(version, {"model": model}).wait()
            update = follow(subscriber, engine, model)
            assert update.version == subscriber.version == subscriber.newest() == version
            assert (update.anchored_chunks > 0) == (version == 0), "anchors are not read again"
            assert subscriber.update() is None
            if version == 0:
                assert (held == engine.norm.data_ptr()) == in_place
            train(model, 0.01, version)
    assert engine.big.data_ptr() == engine.tied.data_ptr()


@pytest.mark.parametrize("behind", [1, 2, 3, 5, 11, 25])
def test_a_subscriber_that_lags_arrives_at_the_newest_version(behind: int) -> None:
    """One update brings a subscriber to the newest version, however many versions it has missed."""
    uri = fresh_uri()
    model, engine = Model(1), Model(2)
    with (
        holdfast.publish(uri, keep=4, anchor=9) as publisher,
        holdfast.subscribe(uri, {"model": engine}) as subscriber,
    ):
        publisher.push(0, {"model": model}).wait()
        follow(subscriber, engine, model)
        for version in range(1, behind + 1):
            train(model, 0.002, version)
            publisher.push(version, {"model": model}).wait()
        follow(subscriber, engine, model)


@pytest.mark.parametrize("share", [0.0, 0.003, 0.2, 1.0])
def test_any_share_of_changes_arrives(share: float) -> None:
    """Patches of few, many or all bytes give the published weights; unchanged ones take nothing."""
    uri = fresh_uri()
    model, engine = Model(1), Model(2)
    with (
        holdfast.publish(uri) as publisher,
        holdfast.subscribe(uri, {"model": engine}) as subscriber,
    ):
        for version in range(3):
            report = publisher.push(version, {"model": model}).wait()
            assert report is not None
            follow(subscriber, engine, model)
            if version and not share:
                assert report.stored_nbytes < 32 << 10
            assert report.stored_nbytes <= report.nbytes + 4096
            train(model, share, version)


def test_versions_are_never_used_twice() -> None:
    """A trainer that restarts from an older checkpoint continues above the newest version."""
    uri = fresh_uri()
    with holdfast.publish(uri) as publisher:
        publisher.push(40, {"w": torch.ones(10)}).wait()
    with holdfast.publish(uri) as publisher:
        assert publisher.newest == 40
        with pytest.raises(holdfast.UsageError, match="not newer than 40"):
            publisher.push(31, {"w": torch.zeros(10)})
        publisher.push(41, {"w": torch.zeros(10)}).wait()
        subscriber = holdfast.subscribe(uri)
        subscriber.update()
        assert subscriber.state == {"w": pytest.approx(torch.zeros(10))}


def test_of_two_publishers_one_is_told() -> None:
    """A second publisher takes over. The first gets an error at its next push, which publishes
    nothing."""
    uri = fresh_uri()
    first = holdfast.publish(uri)
    first.push(1, {"w": torch.ones(10)}).wait()
    second = holdfast.publish(uri)
    second.push(2, {"w": torch.full((10,), 2.0)}).wait()
    with pytest.raises(holdfast.SupersededError, match="another publisher"):
        first.push(3, {"w": torch.full((10,), 3.0)}).wait()
    with pytest.raises(holdfast.SupersededError, match="another publisher"):
        first.push(4, {"w": torch.full((10,), 3.0)})
    second.push(3, {"w": torch.full((10,), 4.0)}).wait()
    with holdfast.subscribe(uri) as subscriber:
        assert subscriber.update() is not None
        assert dict(subscriber.weights())["w"].tolist() == [4.0] * 10


def test_a_publisher_that_slept_uses_no_deleted_version_again() -> None:
    """Another publisher may have published its next version, and deleted it since."""
    uri = fresh_uri()
    store = STORES.setdefault(uri.removeprefix("memory://"), {})
    first = holdfast.publish(uri)
    first.push(1, {"w": torch.ones(10)}).wait()
    with holdfast.publish(uri, keep=4, anchor=1) as second:
        for version in range(2, 12):
            second.push(version, {"w": torch.full((10,), float(version))}).wait()
    assert "00000002/manifest.safetensors" not in store
    with pytest.raises(holdfast.SupersededError, match="another publisher"):
        first.push(20, {"w": torch.zeros(10)}).wait()


def test_an_anchor_is_a_checkpoint_of_safetensors(tmp_path: Path) -> None:
    """Anyone can load an anchor; a version of patches is refused with the way to read it."""
    model = Model(1)
    with holdfast.publish(tmp_path) as publisher:
        publisher.push(7, {"model": model}).wait()
        train(model, 0.01, 1)
        publisher.push(8, {"model": model}).wait()
    loaded = holdfast.load(tmp_path / "00000001")
    assert difference(loaded["model"], weights(Model(1))) is None
    with pytest.raises(holdfast.UsageError, match="version of a weight channel"):
        holdfast.load(tmp_path / "00000002")


def test_old_versions_are_deleted_unless_they_are_read() -> None:
    """Versions that no offered one needs are deleted one push later, unless they are leased."""
    uri = fresh_uri()
    store = STORES.setdefault(uri.removeprefix("memory://"), {})

    def kept() -> set[int]:
        return {int(key.split("/")[0]) for key in store if key[0] == "0"}

    with holdfast.publish(uri, keep=4, anchor=8) as publisher:
        for version in range(1, 25):
            publisher.push(version, {"w": torch.full((10,), float(version))}).wait()
            if version == 12:
                store["leases/reader.json"] = (b'{"sequence": 10}', store["newest.json"][1])
            if version > 12:
                assert {9, 10} <= kept(), "version 10 and its anchor are being read"
        publisher.push(25, {"w": torch.zeros(10)}).wait()
    head = Head.decode(store["newest.json"][0])
    assert head.sequence == 25
    assert kept() - {9, 10} == set(range(17, 26))


def test_a_lease_is_not_old_because_a_listing_is() -> None:
    """A listing may show a renewed lease with its old time. The lease still counts, and stays."""

    class StaleListing(MemoryDriver):
        async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
            async for info in super().list(prefix):
                yield replace(info, modified_s=info.modified_s - 3 * LEASE_S)

    async def look() -> list[int]:
        driver = StaleListing()
        await driver.put("leases/reader.json", encoded_lease(10))
        now_s = (await driver.stat("leases/reader.json")).modified_s
        found = await leased(driver, now_s, tidy=True)
        return found + await leased(driver, now_s + 3 * LEASE_S, tidy=True)

    assert asyncio.run(look()) == [10]


def test_a_withdrawn_version_is_not_offered_again() -> None:
    """A publisher that keeps more versions than the previous one offers no deletable version."""
    head = Head()
    for _ in range(10):
        head = head.with_next(anchor=True, keep=4)
    assert [head.with_next(anchor=False, keep=keep).offered for keep in (4, 8, 11)] == [8, 7, 7]


@pytest.mark.parametrize("place", ["index", "patch", "missing"])
def test_damage_leaves_the_old_version_in_use(place: str) -> None:
    """An engine never gets a version whose bytes are damaged; the next version repairs it."""
    uri = fresh_uri()
    store = STORES.setdefault(uri.removeprefix("memory://"), {})
    model, engine = Model(1), Model(2)
    with (
        holdfast.publish(uri) as publisher,
        holdfast.subscribe(uri, {"model": engine}) as subscriber,
    ):
        publisher.push(1, {"model": model}).wait()
        follow(subscriber, engine, model)
        before = weights(engine)
        train(model, 0.01, 1)
        publisher.push(2, {"model": model}).wait()
        (key,) = [key for key in store if key.endswith(".patch")]
        data = bytearray(store[key][0])
        if place == "missing":
            del store[key]
        else:
            data[-20 if place == "index" else 100] ^= 1
            store[key] = (bytes(data), store[key][1])
        with pytest.raises((holdfast.DamagedError, holdfast.NotFoundError)):
            subscriber.update()
        assert subscriber.version == 1
        assert difference(weights(engine), before) is None
    with holdfast.publish(uri) as publisher:
        publisher.push(3, {"model": model}).wait()
        subscriber = holdfast.subscribe(uri, {"model": engine})
        follow(subscriber, engine, model)


def test_whole_tensors_are_read_from_memory_one_by_one() -> None:
    """Engines may select, rename or omit tensors, but not after another version replaces them."""
    uri = fresh_uri()
    state = {"model": {"up": torch.ones(9), "down": torch.ones(5)}, "step": torch.tensor(1)}
    with holdfast.publish(uri) as publisher, holdfast.subscribe(uri) as subscriber:
        with pytest.raises(holdfast.UsageError, match="no version is in use"):
            subscriber.weights()
        publisher.push(1, state).wait()
        subscriber.update()
        assert [name for name, _ in subscriber.weights()] == ["up", "down", "step"]
        assert [name for name, _ in subscriber.weights("model", skip="up".__eq__)] == ["down"]
        named = subscriber.weights(rename={"model.up": "up.weight", "*": "other.*"})
        assert [name for name, _ in named] == ["up.weight", "other.model.down", "other.step"]
        early = subscriber.weights()
        state["model"]["up"] += 1
        publisher.push(2, state).wait()
        assert subscriber.prepare() is not None
        assert subscriber.version == 1
        with pytest.raises(holdfast.UsageError, match="before the next update"):
            list(early)
        assert dict(subscriber.weights())["up"].tolist() == [1.0] * 9
        subscriber.update()
        assert dict(subscriber.weights())["up"].tolist() == [2.0] * 9
        assert difference(state, subscriber.state) is None


def test_a_prepared_version_whose_memory_was_used_again_cannot_be_committed() -> None:
    """A failed update has filled part of it, so a commit would give a mixture."""
    uri = fresh_uri()
    store = STORES.setdefault(uri.removeprefix("memory://"), {})
    model, engine = Model(1), Model(2)
    with (
        holdfast.publish(uri) as publisher,
        holdfast.subscribe(uri, {"model": engine}) as subscriber,
    ):
        publisher.push(1, {"model": model}).wait()
        prepared = subscriber.prepare()
        assert prepared is not None
        before = weights(engine)
        train(model, 0.01, 1)
        publisher.push(2, {"model": model}).wait()
        for key in [key for key in store if key.endswith(".patch")]:
            del store[key]
        with pytest.raises(holdfast.DamagedError):
            subscriber.update()
        with pytest.raises(holdfast.UsageError, match="prepared last"):
            prepared.commit()
        assert difference(weights(engine), before) is None
        assert subscriber.version is None


def test_weights_that_were_changed_locally_are_replaced() -> None:
    """The update names them, and the engine has the published weights after it."""
    uri = fresh_uri()
    model, engine = Model(1), Model(2)
    with (
        holdfast.publish(uri) as publisher,
        holdfast.subscribe(uri, {"model": engine}) as subscriber,
    ):
        for version in range(4):
            publisher.push(version, {"model": model}).wait()
            follow(subscriber, engine, model)
            assert subscriber.modified() == []
            engine.big.data[0, 5] = 3
            assert subscriber.modified() == ["model.big", "model.tied"]
            engine.norm.data = torch.zeros(1000)
            assert subscriber.modified() == ["model.big", "model.tied", "model.norm"]
            train(model, 0.01, version)


def test_a_failed_push_publishes_nothing_and_the_next_is_an_anchor() -> None:
    """After a failure the sender's copy is worthless, so a receiver cannot drift."""
    uri = fresh_uri()
    model, engine = Model(1), Model(2)
    with (
        holdfast.publish(uri) as publisher,
        holdfast.subscribe(uri, {"model": engine}) as subscriber,
    ):
        publisher.push(1, {"model": model}).wait()
        follow(subscriber, engine, model)
        train(model, 0.01, 1)
        with pytest.raises(holdfast.StateError):
            publisher.push(2, {"model": model, "what": object()})
        publisher.push(2, {"model": model}).wait()
        assert follow(subscriber, engine, model).anchored_chunks > 0


def test_the_newest_version_is_found_without_its_head() -> None:
    """A publisher that died before it announced a version has still published it."""
    uri = fresh_uri()
    store = STORES.setdefault(uri.removeprefix("memory://"), {})
    for version in (1, 2, 3):
        with holdfast.publish(uri) as publisher:
            publisher.push(version, {"w": torch.full((4,), float(version))}).wait()
        if version == 1:
            head = store["newest.json"]
    store["newest.json"] = head
    subscriber = holdfast.subscribe(uri)
    assert subscriber.newest() == 3
    subscriber.update()
    assert dict(subscriber.weights())["w"].tolist() == [3.0] * 4
    with holdfast.publish(uri) as publisher:
        assert publisher.newest == 3
        publisher.push(9, {"w": torch.zeros(4)}).wait()
    assert json.loads(store["newest.json"][0])["kept"] == [1, 2, 3, 4]


def test_weights_in_use_are_read_after_their_version_was_deleted() -> None:
    """An engine reads the tensors of the version in use from memory alone."""
    uri = fresh_uri()
    store = STORES.setdefault(uri.removeprefix("memory://"), {})
    model = Model(1, SIZE)
    with holdfast.publish(uri) as publisher, holdfast.subscribe(uri) as subscriber:
        publisher.push(1, {"model": model}).wait()
        subscriber.update()
        store.clear()
        assert difference(dict(subscriber.weights()), weights(model)) is None
        (norm,) = (tensor for _, tensor in subscriber.weights(only="model.norm"))
        assert torch.equal(norm, model.norm)


def test_weights_may_change_once_an_eager_push_has_returned() -> None:
    """With ``lazy=False`` push returns after the copy, so any code may write to the weights."""
    uri = fresh_uri()
    weights = torch.ones(2 * SIZE)
    with (
        holdfast.publish(uri, lazy=False) as publisher,
        holdfast.subscribe(uri) as subscriber,
    ):
        for version in range(3):
            weights.fill_(version)
            handle = publisher.push(version, {"w": weights})
            weights.fill_(-1)
            handle.wait()
            subscriber.update()
            assert dict(subscriber.weights())["w"].unique().tolist() == [version]


def test_a_cast_publishes_the_chosen_dtype() -> None:
    """fp32 weights are published as bf16; integers and their own dtypes stay."""
    uri = fresh_uri()
    given = {"w": torch.randn(100), "n": torch.arange(5)}
    with holdfast.publish(uri, dtype="bf16") as publisher:
        publisher.push(1, given).wait()
    with holdfast.subscribe(uri) as subscriber:
        subscriber.update()
        found = dict(subscriber.weights())
    assert torch.equal(found["w"], given["w"].bfloat16())
    assert torch.equal(found["n"], given["n"])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"keep": 3}, "keep=3"), ({"anchor": 0}, "anchor=0"), ({"dtype": "int8"}, "dtype='int8'")],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    """Bad options are errors before any I/O."""
    with pytest.raises(holdfast.UsageError, match=message):
        holdfast.publish("memory://never", **options)


def test_a_subscriber_waits_for_the_next_version() -> None:
    """An update with a timeout returns soon after the next version is published, or None."""
    uri = fresh_uri()
    with holdfast.publish(uri) as publisher, holdfast.subscribe(uri) as subscriber:
        publisher.push(1, {"w": torch.ones(4)}).wait()
        assert subscriber.update(timeout_s=30) is not None
        assert subscriber.update(timeout_s=0.2) is None
        later = threading.Timer(0.3, lambda: publisher.push(2, {"w": torch.zeros(4)}))
        later.start()
        update = subscriber.update(timeout_s=30)
        later.join()
        assert update is not None
        assert update.version == 2


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a token for channels in memory."""
    monkeypatch.setenv("HOLDFAST_PEER_TOKEN", "b1946ac92492d2347c6235b4d2611184")


@pytest.mark.usefixtures("token")
def test_a_channel_in_memory_needs_no_disk() -> None:
    """Subscribers read versions from the trainer's memory, also after it has restarted."""
    model, engine = Model(1), Model(2)
    with holdfast.publish("peer://127.0.0.1:0/policy") as publisher:
        uri = publisher.uri
        with holdfast.subscribe(uri, {"model": engine}) as subscriber:
            for version in range(6):
                publisher.push(version, {"model": model}).wait()
                follow(subscriber, engine, model)
                train(model, 0.01, version)
    address = uri.removeprefix("peer://").partition("/")[0]
    with (
        holdfast.publish(f"peer://{address}/policy") as publisher,
        holdfast.subscribe(uri, {"model": engine}) as subscriber,
    ):
        publisher.push(3, {"model": model}).wait()
        follow(subscriber, engine, model)
        publisher.push(9, {"model": model}).wait()
        follow(subscriber, engine, model)


@pytest.mark.usefixtures("token")
def test_versions_of_a_channel_that_begins_anew_are_not_older() -> None:
    """A subscriber never goes back: it waits for a version above the one in use."""
    first = {"w": torch.full((9,), 7.0)}
    with holdfast.publish("peer://127.0.0.1:0/policy") as publisher:
        uri = publisher.uri
        subscriber = holdfast.subscribe(uri)
        publisher.push(7, first).wait()
        subscriber.update()
    address = uri.removeprefix("peer://").partition("/")[0]
    with holdfast.publish(f"peer://{address}/policy") as publisher, subscriber:
        publisher.push(5, {"w": torch.full((9,), 5.0)}).wait()
        assert subscriber.update() is None
        assert subscriber.version == 7
        publisher.push(8, {"w": torch.full((9,), 8.0)}).wait()
        update = subscriber.update()
        assert update is not None
        assert update.version == 8
        assert dict(subscriber.weights())["w"].tolist() == [8.0] * 9


def test_a_channel_in_memory_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody serves weights to everyone by accident."""
    monkeypatch.delenv("HOLDFAST_PEER_TOKEN", raising=False)
    with pytest.raises(holdfast.UsageError, match="needs a token"):
        holdfast.publish("peer://127.0.0.1:0/policy")


@pytest.mark.usefixtures("token")
def test_subscribers_of_a_host_read_each_file_once() -> None:
    """One of eight subscribers on a host reads from the trainer; the others share its files."""
    model = Model(1, 200_000)
    engines = [Model(n) for n in range(8)]
    for engine in engines:
        engine.big = engine.tied = torch.nn.Parameter(torch.zeros_like(model.big))
    with holdfast.publish("peer://127.0.0.1:0/policy") as publisher:
        subscribers = [holdfast.subscribe(publisher.uri, {"model": each}) for each in engines]
        for version in range(3):
            report = publisher.push(version, {"model": model}).wait()
            assert report is not None
            assert publisher.sent_nbytes is not None
            before = publisher.sent_nbytes
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda each: each.update(), subscribers))
            assert publisher.sent_nbytes - before < 1.2 * report.stored_nbytes + 400_000
            for engine in engines:
                assert difference(weights(engine), weights(model)) is None
            train(model, 0.01, version)
        for subscriber in subscribers:
            subscriber.close()
