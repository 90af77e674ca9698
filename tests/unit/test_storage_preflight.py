"""Test the checks that a save makes of its storage before it can do harm."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import pytest
from support.bits import difference
from support.broken import IgnoresStart
from support.copies import NEW, OLD, checkpoint, copied, images, loaded, run, save
from support.drivers import HookedDriver, contents, retried
from support.liars import IgnoresExclusive, RefusesWholeRanges

import holdfast
from holdfast.drivers.contract import Buffer, Driver
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.options import Option, switch
from holdfast.storage.format.manifest import MANIFEST_KEY
from holdfast.storage.protocol import commit
from holdfast.storage.protocol.attempt import check_marker
from holdfast.storage.protocol.collect import collect


class IgnoringStore(IgnoresExclusive):
    """Likewise, with the option that object stores have."""

    OPTIONS: ClassVar = {
        "conditional": Option(switch, True, "whether the store supports conditional puts")
    }


class RefusesRanges(MemoryDriver):
    """Refuses every range that is not the whole object, as of a server that ignores ranges."""

    async def read(self, key: str, start: int, into: Buffer) -> None:
        if (start, len(into)) != (0, len(await self.get(key))):
            raise holdfast.StorageError("received non-partial response", uri=self.uri, key=key)
        await super().read(key, start, into)


@pytest.mark.parametrize("layer", [lambda driver: driver, retried], ids=["bare", "retried"])
def test_a_storage_that_ignores_exclusive_puts_is_refused_before_anything_is_written(
    layer: Callable[[Driver], Driver],
) -> None:
    """The save leaves nothing; the message names the problem and the remedy."""
    storage = IgnoresExclusive()
    with pytest.raises(holdfast.StorageError, match="although its key is taken") as caught:
        run(save(layer(storage), OLD))
    assert "drivers --check" in str(caught.value)
    assert caught.value.temporary is False
    assert run(contents(storage)) == {}


def test_the_option_for_stores_without_conditional_puts_is_named() -> None:
    """The message names the option if the driver has it, and the option makes the save work."""
    with pytest.raises(holdfast.StorageError, match=r"\?conditional=off"):
        run(save(retried(IgnoringStore()), OLD))
    with pytest.raises(holdfast.StorageError) as caught:
        run(save(IgnoresExclusive(), OLD))
    assert "conditional=off" not in str(caught.value)


def test_on_such_a_storage_no_other_attempt_is_aborted() -> None:
    """A save in flight with its commit record is neither aborted nor deleted."""
    good, careless = MemoryDriver("fitness-others"), IgnoresExclusive("fitness-others")
    other = run(commit.begin(good))
    run(good.put(other.record_key, b"claim 0123456789abcdef", exclusive=True))
    undecided = run(commit.begin(good))
    before = run(contents(good))
    with pytest.raises(holdfast.StorageError, match="although its key is taken"):
        run(save(careless, OLD))
    assert run(contents(good)) == before
    assert undecided.marker_key in before


def test_a_copy_and_a_pruning_ask_the_storage_likewise() -> None:
    """Both collect leftovers, so both check the storage."""
    ours = IgnoresExclusive("fitness-copies")
    with pytest.raises(holdfast.StorageError, match="although its key is taken"):
        copied(checkpoint(), ours)
    assert run(contents(ours)) == {}
    with pytest.raises(holdfast.StorageError, match="although its key is taken"):
        run(collect(ours, 0.0))


def test_what_does_not_promise_exclusive_puts_is_not_asked() -> None:
    """Commits use another protocol there."""
    storage = IgnoresExclusive()
    storage.traits = replace(storage.traits, exclusive_is_atomic=False)
    run(save(storage, OLD))
    assert difference(OLD, loaded(storage)) is None


def test_a_marker_that_is_deleted_meanwhile_is_no_fault_of_the_storage() -> None:
    """Another save's abort raises SupersededError."""
    storage = MemoryDriver()
    begun = itertools.count()

    async def deleted(operation: str, key: str) -> None:
        if operation == "put" and key.endswith("attempt.json") and next(begun) == 1:
            await storage.delete(key)

    with pytest.raises(holdfast.SupersededError):
        run(save(HookedDriver(storage, before=deleted), OLD))


def test_a_trial_that_comes_late_is_taken_for_no_marker() -> None:
    """A late trial put does not make an aborted attempt look alive."""
    storage = MemoryDriver()
    attempt = run(commit.begin(storage))
    run(storage.delete(attempt.marker_key))
    run(storage.put(attempt.marker_key, b"0", exclusive=True))
    with pytest.raises(holdfast.SupersededError):
        run(check_marker(storage, attempt))


def test_one_false_answer_that_the_marker_is_missing_does_not_fail_a_save() -> None:
    """This holds for each look at the marker."""
    looks: list[str] = []

    def failing(number: int) -> HookedDriver:
        looks.clear()
        storage = MemoryDriver()

        async def missing(operation: str, key: str) -> None:
            if operation == "stat" and key.endswith("attempt.json"):
                looks.append(key)
                if len(looks) == number:
                    raise holdfast.NotFoundError("no such object", uri=storage.uri, key=key)

        return HookedDriver(storage, before=missing)

    run(save(failing(0), OLD))
    count = len(looks)
    assert count
    for number in range(1, count + 1):
        run(save(failing(number), OLD))
        assert len(looks) == count + 1


@pytest.mark.parametrize("kind", [RefusesWholeRanges, RefusesRanges, IgnoresStart])
def test_a_storage_that_cannot_answer_ranges_fails_the_save_and_not_the_load(
    kind: type[MemoryDriver],
) -> None:
    """The old checkpoint stays, and nothing of the save is left."""
    name = f"fitness-{kind.__name__}"
    run(save(MemoryDriver(name), OLD))
    before = run(contents(MemoryDriver(name)))
    with pytest.raises(holdfast.StorageError, match="cannot be read back as bytes"):
        run(save(kind(name), NEW))
    assert run(contents(MemoryDriver(name))) == before
    assert difference(OLD, loaded(MemoryDriver(name))) is None


class Forgetful(MemoryDriver):
    """Acknowledges ``times`` puts to keys that end with ``suffix``, but stores ``keeps(data)``."""

    def __init__(
        self, suffix: str, times: int, keeps: Callable[[bytes], bytes | None] = lambda data: None
    ) -> None:
        super().__init__()
        self.suffix, self.times, self.keeps = suffix, times, keeps

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        if key.endswith(self.suffix) and self.times:
            self.times -= 1
            kept = self.keeps(data)
            if kept is None:
                return
            data = kept
        await super().put(key, data, exclusive=exclusive)


DAMAGED = {
    "nothing": lambda data: None,
    "half": lambda data: data[: len(data) // 2],
    "a web page": lambda data: b"<!doctype html><title>hello</title>",
}


@pytest.mark.parametrize("kept", DAMAGED)
@pytest.mark.parametrize("before", [False, True], ids=["the first save", "a later save"])
def test_a_manifest_that_is_not_kept_is_put_again(before: bool, kept: str) -> None:
    """The storage acknowledged it; the save looks, also where another manifest is still there."""
    storage = Forgetful(MANIFEST_KEY, 0, DAMAGED[kept])
    if before:
        run(save(storage, OLD))
    storage.times = 1
    run(save(storage, NEW))
    assert difference(loaded(storage), NEW) is None


@pytest.mark.parametrize("kept", DAMAGED)
@pytest.mark.parametrize("before", [False, True], ids=["the first save", "a later save"])
def test_a_storage_that_never_keeps_the_manifest_fails_the_save(before: bool, kept: str) -> None:
    """The error says so, and a later save succeeds once the storage keeps its objects."""
    storage = Forgetful(MANIFEST_KEY, 0, DAMAGED[kept])
    if before:
        run(save(storage, OLD))
    storage.times = 1000
    with pytest.raises(holdfast.StorageError, match="acknowledged the manifest") as caught:
        run(save(storage, NEW))
    assert caught.value.key == MANIFEST_KEY
    if before and kept == "nothing":
        assert difference(loaded(storage), OLD) is None
    storage.times = 0
    run(save(storage, NEW))
    assert difference(loaded(storage), NEW) is None


def test_a_manifest_that_another_save_has_replaced_was_kept() -> None:
    """One that committed later, before the first one looked: neither puts its manifest again."""
    storage = MemoryDriver()
    later: list[bytes] = []

    async def after(operation: str, key: str) -> None:
        if operation == "put" and key == MANIFEST_KEY and not later:
            later.append(b"")
            await save(storage, NEW)
            later[0] = await storage.get(MANIFEST_KEY)

    run(save(HookedDriver(storage, after=after), OLD))
    assert run(storage.get(MANIFEST_KEY)) == later[0]


def test_a_commit_record_that_is_not_kept_fails_the_save() -> None:
    """Without one, a later save could delete this one's data while it commits."""
    storage = Forgetful("/fate", 1)
    with pytest.raises(holdfast.StorageError, match="acknowledged the commit record"):
        run(save(storage, OLD))
    assert MANIFEST_KEY not in run(contents(storage))


@pytest.mark.parametrize("spare_nbytes", [-1, 0])
def test_an_image_that_is_larger_than_an_object_may_be_fails_before_anything_is_put(
    spare_nbytes: int,
) -> None:
    """The limit is exact, and the error states both sizes."""
    sizes = MemoryDriver()
    run(save(sizes, OLD))
    (image,) = images(sizes)
    storage = MemoryDriver()
    limit_nbytes = run(sizes.stat(image)).nbytes + spare_nbytes
    storage.traits = replace(storage.traits, object_max_nbytes=limit_nbytes)
    if spare_nbytes < 0:
        requests: list[str] = []

        async def recorded(operation: str, key: str) -> None:
            requests.append(f"{operation} {key}")

        with pytest.raises(holdfast.StorageError, match="would have"):
            run(save(HookedDriver(storage, before=recorded), OLD))
        assert requests == []
    else:
        run(save(storage, OLD))
