"""The local driver against the reference: the same calls give the same results, in any order."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from holdfast.drivers.contract import Driver, Upload
from holdfast.drivers.local import LocalDriver
from holdfast.drivers.memory import MemoryDriver
from holdfast.errors import HoldfastError

# No key is a folder of another one: that is where a file system differs from the reference.
KEYS = st.sampled_from(["a", "b/c", "b/d", "b/e/f", "g/h/i/j", ".k"])
PREFIXES = st.sampled_from(["a", "b", "b/e", "b/c", "g/h", "nowhere"])
CONTENTS = st.integers(0, 5).map(lambda n: bytes([n]) * (1, 0, 5000, 70_000, 65_536, 140_001)[n])


@dataclass(frozen=True)
class Pair:
    """One upload on each driver; what lies before ``cut`` is not written yet."""

    both: tuple[Upload, ...]
    key: str
    content: bytes
    cut: int


class SameAsMemory(RuleBasedStateMachine):
    """Each rule is done to both drivers; results, or kinds of error, must be equal, and so must the listings."""

    uploads: Bundle[Pair] = Bundle("uploads")

    @initialize(direct=st.sampled_from(["auto", "off"]))
    def open(self, direct: str) -> None:
        """Begin with two empty roots."""
        self.runner = asyncio.Runner()
        self.live: Counter[str] = Counter()
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-model-"))
        self.drivers: tuple[Driver, ...] = (MemoryDriver(), LocalDriver(self.folder / "root", direct=direct, threads=2))

    def both(self, call: Callable[[Driver], Awaitable[Any]]) -> list[Any]:
        """The outcomes of one call on both."""
        return [self.outcome(call(driver)) for driver in self.drivers]

    def outcome(self, call: Awaitable[Any]) -> Any:
        """What was returned, or the kind of error."""

        async def settled() -> Any:
            try:
                return await call
            except HoldfastError as error:
                return type(error)

        return self.runner.run(settled())

    def same(self, call: Callable[[Driver], Awaitable[Any]]) -> None:
        """The outcomes are equal."""
        expected, actual = self.both(call)
        assert expected == actual

    @rule(key=KEYS, content=CONTENTS, exclusive=st.booleans())
    def put(self, key: str, content: bytes, exclusive: bool) -> None:
        """Put, exclusively or not."""
        self.same(lambda driver: driver.put(key, content, exclusive=exclusive))

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        """Get what may not be there."""
        self.same(lambda driver: driver.get(key))

    @rule(key=KEYS, start=st.integers(0, 150_000), nbytes=st.sampled_from([0, 1, 4096, 66_000]))
    def read(self, key: str, start: int, nbytes: int) -> None:
        """Read a range that may not be there."""

        async def read(driver: Driver) -> bytes:
            into = bytearray(nbytes)
            await driver.read(key, start, memoryview(into))
            return bytes(into)

        self.same(read)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        """Delete what may not be there."""
        self.same(lambda driver: driver.delete(key))

    @rule(prefix=PREFIXES)
    def delete_all(self, prefix: str) -> None:
        """Delete a subtree, unless an upload is going on there: that may die by it, or not."""
        if not any(key == prefix or key.startswith(prefix + "/") for key in +self.live):
            self.same(lambda driver: driver.delete_all(prefix))

    @rule(target=uploads, key=KEYS, content=CONTENTS, cut=st.integers(0, 140_001))
    def create(self, key: str, content: bytes, cut: int) -> Pair:
        """Begin an upload, and write its second part first."""
        pair = Pair(tuple(self.both(lambda driver: driver.create(key, len(content)))), key, content, cut)
        self.live[key] += 1
        for upload in pair.both:
            assert self.outcome(upload.write(min(cut, len(content)), memoryview(content)[cut:])) is None
        return pair

    @rule(pair=consumes(uploads), whole=st.booleans())
    def commit(self, pair: Pair, whole: bool) -> None:
        """Write the first part, or forget it, and commit."""
        self.live[pair.key] -= 1
        if whole:
            for upload in pair.both:
                assert self.outcome(upload.write(0, memoryview(pair.content)[: pair.cut])) is None
        expected, actual = [self.outcome(upload.commit()) for upload in pair.both]
        assert expected == actual

    @rule(pair=consumes(uploads))
    def abort(self, pair: Pair) -> None:
        """Give an upload up."""
        self.live[pair.key] -= 1
        for upload in pair.both:
            assert self.outcome(upload.abort()) is None

    @invariant()
    def listings_are_equal(self) -> None:
        """The same keys with the same sizes, whole and below a prefix."""

        async def listed(driver: Driver) -> list[tuple[str, int]]:
            return sorted([(info.key, info.nbytes) for prefix in ("", "b") async for info in driver.list(prefix)])

        if hasattr(self, "drivers"):
            self.same(listed)

    def teardown(self) -> None:
        """Close, and see that nothing unfinished stays."""
        if hasattr(self, "drivers"):
            visible = len(self.runner.run(_count(self.drivers[0])))
            for driver in self.drivers:
                self.runner.run(driver.close())
            files = [path for path in self.folder.rglob("*") if not path.is_dir()]
            self.runner.close()
            shutil.rmtree(self.folder)
            assert len(files) == visible


async def _count(driver: Driver) -> list[str]:
    return [info.key async for info in driver.list()]


TestSameAsMemory = SameAsMemory.TestCase
TestSameAsMemory.settings = settings(
    max_examples=25, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow]
)
