"""Access to the job's key-value store: values of any size, and reads that never block on a key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

PART_NBYTES = 4 << 20  # torch's TCPStore refuses values of 8 MiB and more
_NOTHING = b"\x00holdfast: no such key\x00"
_WHOLE = b"="
_PARTS = b"#"


class StoreLike(Protocol):
    """The methods used of a torch.distributed Store."""

    def set(self, key: str, value: bytes | str, /) -> None: ...
    def compare_set(self, key: str, expected: bytes, desired: bytes, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def delete_key(self, key: str, /) -> bool: ...


class Keys:
    """The keys below ``prefix``. Every method blocks, and passes on errors of the store."""

    def __init__(self, store: StoreLike, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def below(self, name: str) -> Keys:
        """Return the keys below ``name``."""
        return Keys(self._store, f"{self._prefix}/{name}")

    def value(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None if it is missing.

        A plain ``get`` blocks on a missing key, and another rank may delete a key between ``check``
        and ``get``. A ``compare_set`` that expects a value no key holds changes nothing, and
        returns the current value.
        """
        found = self._store.compare_set(f"{self._prefix}/{key}", _NOTHING, _NOTHING)
        return None if found == _NOTHING else found

    def set(self, key: str, value: bytes | str) -> None:
        """Set the value of ``key``."""
        self._store.set(f"{self._prefix}/{key}", value)

    def swap(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        """Set ``key`` if its value is ``expected`` (None: missing); return its value after."""
        found = self._store.compare_set(f"{self._prefix}/{key}", expected or b"", desired)
        if expected is not None and found == expected:
            return None  # the store returns the expected value if the key is missing
        return found

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return its new value."""
        return self._store.add(f"{self._prefix}/{key}", amount)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys, ignoring missing ones."""
        for key in keys:
            self._store.delete_key(f"{self._prefix}/{key}")

    def put(self, key: str, value: bytes) -> list[str]:
        """Store a value of any size; return the keys used. The key itself is written last."""
        if len(value) <= PART_NBYTES:
            self.set(key, _WHOLE + value)
            return [key]
        parts = [value[i : i + PART_NBYTES] for i in range(0, len(value), PART_NBYTES)]
        for i, part in enumerate(parts):
            self.set(f"{key}/{i}", part)
        self.set(key, _PARTS + str(len(parts)).encode())
        return [key, *(f"{key}/{i}" for i in range(len(parts)))]

    def get(self, key: str) -> bytes | None:
        """Return the value that was :meth:`put` under ``key``; None if missing or incomplete."""
        value = self.value(key)
        if value is None or value[:1] == _WHOLE:
            return value and value[1:]
        parts = [self.value(f"{key}/{i}") for i in range(int(value[1:]))]
        if None not in parts:
            return b"".join(part for part in parts if part is not None)
        return None

    def keys_of(self, key: str) -> list[str]:
        """Return the keys used by a :meth:`put` under ``key``."""
        value = self.value(key)
        parts = int(value[1:]) if value is not None and value[:1] == _PARTS else 0
        return [key, *(f"{key}/{i}" for i in range(parts))]
