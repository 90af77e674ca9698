"""The driver against the model ``memory://``: the same calls give the same results, in any
order."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from holdfast.drivers.conformance.place import Place
from holdfast.drivers.contract import Driver, Upload
from holdfast.drivers.memory import MemoryDriver
from holdfast.errors import (
    DamagedError,
    ExistsError,
    HoldfastError,
    NotFoundError,
    StorageError,
    UriError,
)

# No key is a folder of another key: there file systems differ from the model.
KEYS = st.sampled_from(["a", "b/c", "b/d", "b/e/f", "g/h/i/j", ".k"])
PREFIXES = st.sampled_from(["a", "b", "b/e", "b/c", "g/h", "nowhere"])
CONTENTS = st.integers(0, 5).map(lambda n: bytes([n]) * (1, 0, 5000, 70_000, 65_536, 140_001)[n])
KINDS = (NotFoundError, ExistsError, DamagedError, UriError, StorageError)

STEPS = 25
EXAMPLES_MAX = 20
EXAMPLES_MIN = 4
SECONDS = 4.0
"""Approximate time budget of the exploration in seconds; slow storage gets fewer examples."""


@dataclass(frozen=True)
class Pair:
    """One upload on each driver. The first part of ``content`` is written, ``rest`` is not yet. The
    commit passes ``end``; None means the declared size."""

    both: tuple[Upload, ...]
    key: str
    content: bytes
    rest: tuple[int, int]
    end: int | None


class SameAsMemory(RuleBasedStateMachine):
    """Applies each rule to both drivers. Results or error types must be equal, and so must
    listings."""

    uploads: Bundle[Pair] = Bundle("uploads")

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place.below()
        self.live: Counter[str] = Counter()
        self.drivers: tuple[Driver, ...] = (MemoryDriver(), self.place.open())

    def both(self, call: Callable[[Driver], Awaitable[Any]]) -> list[Any]:
        """Return the outcomes of a call on both drivers."""
        return [self.outcome(call(driver)) for driver in self.drivers]

    def outcome(self, call: Awaitable[Any]) -> Any:
        """Return the result of a call, or its error type."""

        async def settled() -> Any:
            try:
                return await call
            except HoldfastError as error:
                return next(kind for kind in KINDS if isinstance(error, kind))

        return self.place.run(settled())

    def same(self, call: Callable[[Driver], Awaitable[Any]]) -> None:
        """Assert that the outcomes are equal."""
        expected, actual = self.both(call)
        assert expected == actual

    @rule(key=KEYS, content=CONTENTS, exclusive=st.booleans())
    def put(self, key: str, content: bytes, exclusive: bool) -> None:
        """Put, exclusively or not."""
        self.same(lambda driver: driver.put(key, content, exclusive=exclusive))

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        """Get an object that may not exist."""
        self.same(lambda driver: driver.get(key))

    @rule(key=KEYS)
    def stat(self, key: str) -> None:
        """Get the size of an object that may not exist."""

        async def size(driver: Driver) -> int:
            return (await driver.stat(key)).nbytes

        self.same(size)

    @rule(key=KEYS, start=st.integers(0, 150_000), nbytes=st.sampled_from([0, 1, 4096, 66_000]))
    def read(self, key: str, start: int, nbytes: int) -> None:
        """Read, fetch, and read in pieces, a range that may not exist."""

        async def read(driver: Driver) -> bytes:
            into = bytearray(nbytes)
            await driver.read(key, start, memoryview(into))
            return bytes(into)

        async def fetch(driver: Driver) -> bytes:
            return bytes(await driver.fetch(key, start, nbytes))

        async def read_pieces(driver: Driver) -> bytes:
            taken = bytearray()
            await driver.read_pieces(key, start, nbytes, taken.extend)
            return bytes(taken)

        self.same(read)
        self.same(fetch)
        self.same(read_pieces)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        """Delete an object that may not exist."""
        self.same(lambda driver: driver.delete(key))

    @rule(prefix=PREFIXES)
    def delete_all(self, prefix: str) -> None:
        """Delete a subtree, unless it contains a live upload, which may or may not survive that."""
        if not any(key == prefix or key.startswith(prefix + "/") for key in +self.live):
            self.same(lambda driver: driver.delete_all(prefix))

    @rule(prefix=PREFIXES)
    def sweep(self, prefix: str) -> None:
        """Sweep; all objects and live uploads stay."""
        self.same(lambda driver: driver.sweep(prefix))

    @rule(target=uploads, key=KEYS, content=CONTENTS, cut=st.integers(0, 140_001))
    def create(self, key: str, content: bytes, cut: int) -> Pair:
        """Start an upload and write one of its two parts: the second one if any order is allowed.
        If ``cut`` exceeds the content, it is the declared size."""
        first, rest = self.halves(len(content), cut)
        both = self.both(lambda driver: driver.create(key, max(cut, len(content))))
        pair = Pair(tuple(both), key, content, rest, len(content) if cut > len(content) else None)
        self.live[key] += 1
        self.write(pair, first)
        return pair

    def halves(self, nbytes: int, cut: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the part to write first and the rest, as the traits allow."""
        traits = self.place.traits
        if traits.part_min_nbytes <= min(cut, nbytes):
            cut = min(cut, nbytes)
        else:
            cut = nbytes
        halves = ((0, cut), (cut, nbytes))
        if traits.part_order == "any" and traits.part_min_nbytes == 1:
            return (halves[1], halves[0])
        return halves

    def write(self, pair: Pair, part: tuple[int, int]) -> None:
        """Write one part unless it is empty."""
        start, stop = part
        for upload in pair.both if stop > start else ():
            assert self.outcome(upload.write(start, memoryview(pair.content)[start:stop])) is None

    @rule(pair=consumes(uploads), whole=st.booleans())
    def commit(self, pair: Pair, whole: bool) -> None:
        """Commit, after writing the rest or without it."""
        self.live[pair.key] -= 1
        if whole:
            self.write(pair, pair.rest)
        expected, actual = [self.outcome(upload.commit(pair.end)) for upload in pair.both]
        assert expected == actual
        for upload in pair.both:
            assert self.outcome(upload.abort()) is None

    @rule(pair=consumes(uploads))
    def abort(self, pair: Pair) -> None:
        """Abort an upload."""
        self.live[pair.key] -= 1
        for upload in pair.both:
            assert self.outcome(upload.abort()) is None

    @invariant()
    def listings_are_equal(self) -> None:
        """Both list the same keys with the same sizes, at the root and below a prefix."""
        for prefix in ("", "b"):
            self.same(partial(listed, prefix=prefix))

    def teardown(self) -> None:
        """Close both, and check that nothing unfinished remains."""
        visible = [key for key, _ in self.place.run(listed(self.drivers[0], ""))]
        for driver in self.drivers:
            self.place.run(driver.close())
        self.place.run(self.place.holds(*visible))


async def listed(driver: Driver, prefix: str) -> list[tuple[str, int]]:
    """Return the keys and sizes that a driver lists below ``prefix``, in order."""
    return sorted([(info.key, info.nbytes) async for info in driver.list(prefix)])


async def _put_s(place: Place) -> float:
    driver = place.open()
    begin = time.perf_counter()
    for _ in range(5):
        await driver.put("probe/x", b"x")
    return (time.perf_counter() - begin) / 5


def test_the_same_calls_give_the_same_results_as_memory(place: Place) -> None:
    """Puts, uploads, reads, listings and deletions explored by hypothesis give the same results on
    the driver and the model."""
    example_s = STEPS * 4 * place.run(_put_s(place))
    examples = max(EXAMPLES_MIN, min(EXAMPLES_MAX, int(SECONDS / example_s)))
    explored = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=True,
        database=None,
        # No shrinking: it takes hundreds of examples, and 25 steps are readable as they are.
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(lambda: SameAsMemory(place), settings=explored)  # type: ignore[arg-type]  # any factory will do
