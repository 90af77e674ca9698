"""Trials of URIs and options: all drivers of one root agree on its URI and traits."""

from __future__ import annotations

import pytest

from holdfast.drivers.conformance.place import Place
from holdfast.drivers.conformance.trials import refused, trial
from holdfast.drivers.registry import driver_class, open_driver, serving
from holdfast.drivers.uri import Uri, is_secret, parse, redact
from holdfast.errors import NotFoundError, UriError


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
async def test_every_option_takes_its_default(place: Place) -> None:
    """``?name=value`` with an option's default value opens the same root with the same traits."""
    driver = place.open()
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
