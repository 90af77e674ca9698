"""Trials of keys: unsafe ones are rejected everywhere, unusual ones are stored faithfully or
rejected."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable

import pytest

from holdfast.drivers.conformance.place import Place
from holdfast.drivers.conformance.trials import PROBE, begun, bytes_of, refused, store, trial
from holdfast.drivers.contract import Driver
from holdfast.errors import HoldfastError, StorageError, UriError

UNSAFE = [
    "", "/", "/etc/passwd", "..", "../x", "a/../../x", "a/..", ".", "a/./b", "a//b", "a/", "a\0b", "\0",
]  # fmt: skip
PLAIN = [
    "a", "a/b", "..a", "a..", "...", ".hidden", "0-9_A.z", "20310203T040506-8e8a630f/0.safetensors",
]  # fmt: skip
STRANGE = [
    "a b", " a", "a ", "a%20b", "a%2Fb", "a%", "a+b", "a?b", "a?b=c", "a#b", "a&b=c", "a;b", "a:b", "a@b", "a\\b", "a*b",
    "[a]", "{a}", "~", "~a", "a|b", "a\"b'c", "<a>", "a`b", "a^b", "$a", "a\nb", "a\tb", "\x7f", "-a", "%2e%2e/a", "%00",
    "ü", "u\u0308", "日本語/テスト", "\U0001f98a", "a.tmp", ".a.tmp", "a~", "x" * 255, "x" * 256, "/".join(["y" * 100] * 8),
    "a/.b.0123456789abcdef.tmp", "_temporary/0", "a/._COPYING_", "CON", "Ab", "aB", "\ud800",
]  # fmt: skip


@trial()
async def test_an_unsafe_key_is_refused_everywhere(place: Place, driver: Driver) -> None:
    """No method accepts a key that could leave the root or is not a plain path; the storage stays
    untouched."""
    for key in UNSAFE:
        calls: list[Awaitable[object]] = [
            driver.read(key, 0, memoryview(bytearray(1))),
            driver.create(key, 1),
            driver.get(key),
            driver.stat(key),
            driver.put(key, b""),
            driver.put(key, b"", exclusive=True),
            driver.delete(key),
            driver.delete_all(key),
            driver.sweep(key),
        ]
        if key:  # the empty prefix lists everything
            calls.append(place.keys(key))
        await refused(UriError, *calls, where=(driver.uri, key))
    await place.holds()


@pytest.mark.parametrize("way", ["put", "upload"])
@trial()
async def test_strange_keys_are_stored_faithfully_or_refused(
    place: Place, driver: Driver, way: str
) -> None:
    """Each key comes back under exactly its own name, next to all the others, or is rejected with
    an error, and leaves nothing visible. An upload accepts the same keys as put.

    Letters, digits, dots, dashes and underscores, and hidden names, can always be stored: Holdfast
    itself uses them.
    """
    stored = []
    plain = [f"{n}/{key}" for n, key in enumerate(PLAIN)]
    strange = STRANGE if way == "upload" else [f"d/{key}" for key in STRANGE]
    for n, key in enumerate((*plain, *strange)):
        try:
            await (store(driver, key, b"%d" % n) if way == "upload" else driver.put(key, b"%d" % n))
        # At create, or at commit if only the server knows which keys it accepts.
        except (UriError, StorageError):
            assert key not in plain
            await refused(HoldfastError, driver.put(key, b"put"), driver.get(key))
            continue
        stored.append((key, b"%d" % n))
    for key, content in stored:
        assert await driver.get(key) == content, key
        assert (await driver.stat(key)).key == key
        assert [info.key async for info in driver.list(key)] == [key]
    assert await place.keys() == sorted(key for key, _ in stored)
    for key, _ in stored:
        await (driver.delete_all(key) if way == "upload" else driver.delete(key))
    assert await place.keys() == []


@trial(PROBE)
async def test_names_of_unfinished_uploads_lead_nowhere(place: Place, driver: Driver) -> None:
    """Files that an upload keeps in the storage can neither be read by name nor be replaced."""
    assert place.probe is not None
    content = bytes_of(100_000)
    upload = await begun(driver, "a/x", content)
    for name in place.probe.list():
        await refused(HoldfastError, driver.get(name), driver.stat(name))
        # The key may be rejected, or an unrelated object may have that name.
        with contextlib.suppress(HoldfastError):
            await driver.put(name, b"in its place")
            await driver.delete(name)
    await upload.commit()
    assert await driver.get("a/x") == content
    await place.holds("a/x")
