"""Drivers made by a test, registered under a URI like third-party drivers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from holdfast.drivers.contract import Driver
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.options import Option
from holdfast.drivers.uri import Uri

Make = Callable[[str], Driver]
Serve = Callable[[Make], str]
"""Function that takes a factory of drivers and returns a new URI. The factory makes every driver
below it."""

_numbers = itertools.count()


class GivenDriver(MemoryDriver):
    """The driver class of ``given://``, which opens the driver that the test makes."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {}
    makers: ClassVar[dict[str, Make]] = {}

    @classmethod
    def open(cls, uri: Uri) -> Driver:  # type: ignore[override]
        """Return the test's driver for ``uri``."""
        return cls.makers[uri.location.partition("/")[0]](uri.location)


def install(folder: Path, *lines: str) -> Path:
    """Register drivers in a folder of packages as a third party would; return the folder."""
    package = folder / "given-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: given\nVersion: 1\n")
    (package / "entry_points.txt").write_text("\n".join(["[holdfast.drivers]", *lines]))
    return folder


@pytest.fixture
def serve(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Serve drivers of the test's own under ``given://``."""
    folder = tmp_path_factory.mktemp("packages")
    install(folder, f"given = {__name__}:{GivenDriver.__name__}")
    monkeypatch.syspath_prepend(folder)

    def served(make: Make) -> str:
        name = f"given-{next(_numbers)}"
        GivenDriver.makers[name] = make
        return f"given://{name}"

    return served
