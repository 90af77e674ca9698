"""Trials of errors, of use after close, and of URIs and options: all drivers of one root agree on
its URI and traits."""

from __future__ import annotations

import pytest

from holdfast.drivers.conformance.place import Place
from holdfast.drivers.conformance.trials import begun, bytes_of, refused, trial
from holdfast.drivers.contract import Driver
from holdfast.drivers.registry import driver_class, open_driver, serving
from holdfast.drivers.uri import Uri, is_secret, parse, redact
from holdfast.errors import (
    DamagedError,
    ExistsError,
    HoldfastError,
    NotFoundError,
    StorageError,
    UriError,
)


@trial()
async def test_errors_say_where(place: Place, driver: Driver) -> None:
    """Every error has the URI and the key, and shows both."""
    into = memoryview(bytearray(1))
    errors: list[HoldfastError] = []
    errors += await refused(
        NotFoundError, driver.read("a/x", 0, into), driver.get("a/x"), driver.stat("a/x")
    )
    await driver.put("a/x", b"")
    errors += await refused(ExistsError, driver.put("a/x", b"", exclusive=True))
    errors += await refused(DamagedError, driver.read("a/x", 0, into))
    for error in errors:
        assert (error.uri, error.key) == (driver.uri, "a/x")
        assert "a/x" in str(error)
        assert driver.uri in str(error)
    await refused(UriError, driver.get("../x"), where=(driver.uri, "../x"))


@trial()
async def test_a_key_below_an_object_is_not_found(place: Place, driver: Driver) -> None:
    """``x/y`` is not found where ``x`` is an object, nor is ``a`` where ``a/b`` is one; deleting
    them removes nothing."""
    await driver.put("x", b"object")
    await driver.put("a/b", b"object")
    for key in ("x/y", "x/y/z", "a"):
        into = memoryview(bytearray(1))
        await refused(NotFoundError, driver.get(key), driver.stat(key), driver.read(key, 0, into))
        await driver.delete(key)
    await driver.delete_all("x/y")
    await place.holds("a/b", "x")


@trial()
async def test_a_closed_driver_says_so(place: Place, driver: Driver) -> None:
    """Closing twice is allowed. After close(), every operation raises StorageError and changes
    nothing."""
    await driver.put("x", b"kept")
    upload = await begun(driver, "y", bytes(10))
    await driver.close()
    await driver.close()
    await refused(
        StorageError,
        driver.get("x"),
        driver.put("x", b""),
        driver.stat("x"),
        driver.delete("x"),
        driver.read("x", 0, memoryview(bytearray(1))),
        driver.create("z", 1),
        driver.delete_all("x"),
        driver.fetch("x", 0, 1),
        driver.read_pieces("x", 0, 1, lambda piece: None),
        driver.sweep("x"),
        anext(aiter(driver.list())),
        upload.commit(),
    )
    await upload.abort()
    assert await place.open().get("x") == b"kept"
    await place.holds("x")


@trial()
async def test_calls_that_make_no_sense_are_refused(place: Place, driver: Driver) -> None:
    """Ranges before the start or far beyond any object, and negative sizes, raise an error of
    Holdfast's and no other."""
    into = memoryview(bytearray(10))
    await driver.put("x", bytes_of(100))
    starts = (-1, -10, -50, 1 << 40, 1 << 70)
    await refused(
        HoldfastError, *(driver.read("x", start, into) for start in starts), driver.create("z", -1)
    )
    assert into == bytes(10)
    assert await driver.get("x") == bytes_of(100)


@trial()
async def test_the_uri_is_without_options(place: Place) -> None:
    """Whatever the options, ``uri`` is only the root: ranks compare where they save to, and options
    may come from each rank's environment."""
    expected = place.open().uri
    assert "?" not in expected, "set Driver.uri to uri.root"
    assert redact(expected) == expected
    for uri in (place.uri, *with_each_option(place.uri)):
        driver = place.open(uri)
        assert driver.uri == expected
        (error,) = await refused(NotFoundError, driver.get("missing"))
        assert error.uri == expected


@trial()
async def test_every_option_takes_its_default(place: Place, driver: Driver) -> None:
    """``?name=value`` with an option's default value opens the same root with the same traits."""
    await driver.put("x", b"content")
    for uri in with_each_option(place.uri):
        other = place.open(uri)
        assert other.traits == driver.traits, str(uri)
        assert await other.get("x") == b"content"


@trial()
async def test_an_option_that_is_not_known_is_refused(place: Place) -> None:
    """Any ``?option`` that the driver does not declare, even a near miss, is a UriError that lists
    the known options."""
    # A name that looks like a secret is rejected as a secret, whether it is known or not.
    nearly = [f"{name}x" for name in options_of(place.uri) if not is_secret(name)]
    for name in ("no_such_option", *nearly):
        uri = Uri(place.uri.scheme, place.uri.location, {**place.uri.options, name: "1"})
        with pytest.raises(UriError, match=name) as caught:
            open_driver(uri)
        assert all(known in str(caught.value) for known in options_of(place.uri))


def options_of(uri: Uri) -> dict[str, str]:
    """Return the options of the driver that serves ``uri``, with their defaults as text."""
    options = driver_class(serving(uri)).OPTIONS
    return {
        name: option.text(option.default)
        for name, option in options.items()
        if option.default is not None
    }


def with_each_option(uri: Uri) -> list[Uri]:
    """Return copies of ``uri``, each with one more option set to its default.

    Options that ``uri`` already has stay unchanged. Options whose default has no text are skipped:
    a URI cannot express them.
    """
    found = []
    for name, text in options_of(uri).items():
        if text and name not in uri.options and not is_secret(name):
            found.append(parse(str(Uri(uri.scheme, uri.location, {**uri.options, name: text}))))
    return found
