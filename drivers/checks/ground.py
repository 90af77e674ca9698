"""The scratch folder of a check: two drivers, key names, and assertions about stored objects."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from ...errors import HoldfastError, NotFoundError
from ..contract import Driver, Traits
from ..layers.layer import Layer, Operation
from .findings import Effect, Kept, UnkeptError

__all__ = ["Counted", "Ground", "Probe", "outcome_of"]

T = TypeVar("T")


class Counted(Layer):
    """Counts operations, and records whether anything may need removing."""

    count = 0
    may_have_stored = False

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        """See :meth:`Layer.around`."""
        self.count += 1
        stores = operation.name in ("put", "create", "write", "commit")
        try:
            result = await call()
        except HoldfastError as error:
            self.may_have_stored |= stores and error.temporary
            raise
        except BaseException:
            self.may_have_stored |= stores
            raise
        self.may_have_stored |= stores
        return result


@dataclass(frozen=True, slots=True)
class Ground:
    """Scratch folder in which the probes run. The second driver stands for another host: it must
    see what the first one stores."""

    driver: Counted
    other: Counted
    scratch: str
    """Key of the scratch folder."""
    part_nbytes: int
    """Part size of large objects."""
    private: bool = False
    """Objects are visible only to the driver that stored them, by design; ``other`` is the same
    driver."""

    @property
    def traits(self) -> Traits:
        """Traits of the drivers."""
        return self.driver.traits

    def key(self, name: str) -> str:
        """Return the key of ``name`` in the scratch folder."""
        return f"{self.scratch}/{name}"

    async def expect(self, key: str, content: bytes, when: str) -> None:
        """Raise UnkeptError unless both drivers return ``content``, with its size."""
        for driver, who in self._drivers():
            try:
                found = await driver.get(key)
            except NotFoundError as error:
                raise UnkeptError(f"{when}, {who} does not find the object") from error
            if found != content:
                raise UnkeptError(f"{when}, {who} reads different bytes")
            nbytes = (await driver.stat(key)).nbytes
            if nbytes != len(content):
                raise UnkeptError(
                    f"{when}, {who} sees a size of {nbytes:,} bytes, not {len(content):,}"
                )

    async def expect_gone(self, key: str, when: str) -> None:
        """Raise UnkeptError if either driver still finds or lists the object."""
        for driver, who in self._drivers():
            for look in (driver.get, driver.stat):
                try:
                    await look(key)
                except NotFoundError:
                    continue
                raise UnkeptError(f"{when}, {who} still finds the object")
            if await self.listed(driver, key):
                raise UnkeptError(f"{when}, {who} still lists the object")

    async def listed(self, driver: Driver, prefix: str) -> list[str]:
        """Return the sorted keys at and below ``prefix``."""
        return sorted([info.key async for info in driver.list(prefix)])

    async def expect_listed(self, prefix: str, keys: list[str], when: str) -> None:
        """Raise UnkeptError unless both drivers list exactly these keys."""
        for driver, who in self._drivers():
            found = await self.listed(driver, prefix)
            if found != sorted(keys):
                missing = sorted(set(keys) - set(found))
                extra = sorted(set(found) - set(keys))
                twice = len(found) - len(set(found))
                difference = (
                    f"lacks {len(missing)} keys, has {len(extra)} extra ones, and repeats {twice}"
                )
                raise UnkeptError(
                    f"{when}, the list of {who} {difference}: {[*missing, *extra][:3]}"
                )

    def _drivers(self) -> list[tuple[Driver, str]]:
        if self.private:
            return [(self.driver, "the writer")]
        return [(self.driver, "the writer"), (self.other, "a reader")]


@dataclass(frozen=True, slots=True)
class Probe:
    """One property to try, and the consequence if the storage lacks it."""

    name: str
    title: str
    effect: Effect
    follows: str
    advice: str
    run: Callable[[Ground], Awaitable[Kept]]
    """Coroutine function that raises UnkeptError or a HoldfastError if the storage lacks the
    property."""


async def outcome_of(call: Awaitable[object]) -> HoldfastError | None:
    """Return the error of a call, or None if it succeeded."""
    try:
        await call
    except HoldfastError as error:
        return error
    return None
