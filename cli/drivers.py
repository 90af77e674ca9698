"""``holdfast drivers``: lists the schemes, their drivers and traits, and the sources of options."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..drivers.configuration.file import config_file, ignored_config_file
from ..drivers.configuration.tuned import profile_for, read_profiles, tuned_file
from ..drivers.contract import Driver
from ..drivers.layers.layer import Layer
from ..drivers.layers.stack import common_options
from ..drivers.options import Option
from ..drivers.registry import (
    driver_class,
    open_driver,
    packages,
    resolved_options,
    schemes,
    serving,
    tuned_place,
)
from ..drivers.schemes import scheme_of
from ..drivers.uri import Uri, is_secret, parse, redact
from ..errors import UsageError
from .commands import print_json
from .tables import columns
from .text import paint, printable, time_text


@dataclass
class _Found:
    """Findings about one scheme. Fields keep their defaults from the first problem on."""

    scheme: str
    driver: str
    package: str
    problem: str | None = None
    advice: str | None = None
    uri: str | None = None
    remote: bool | None = None
    layers: list[str] = field(default_factory=list)
    traits: Mapping[str, Any] | None = None
    options: list[dict[str, Any]] = field(default_factory=list)
    config_file: str | None = None
    config_ignored: str | None = None
    """A configuration file in the working directory, which is not read."""
    tuned: str | None = None
    """The profiles for this place, in words."""


def run(scheme: str | None, *, check: bool, json_output: bool) -> int:
    """Print all schemes, or the details of one scheme or URI; or check it. Return 1 if the
    requested one cannot be used, else 0."""
    if check:
        from .check import run as run_check

        return run_check(scheme, json_output=json_output)
    known = schemes()
    served = packages()
    if scheme is None:
        found = [_look(name, _example(name), known, served) for name in sorted(known)]
        if json_output:
            print_json({"drivers": [asdict(one) for one in found]})
        else:
            rows = [_line(one) for one in found]
            print("\n".join(columns(("scheme", "package", "driver", "state"), rows)))
        return 0
    is_uri = "://" in scheme or os.sep in scheme
    uri = parse(scheme) if is_uri else _example(scheme)
    entry = serving(uri)
    if uri.scheme.startswith("fsspec+"):
        entry = "fsspec"
    if entry not in known:
        driver_class(entry)  # raises, and names the known schemes
    one = _look(entry, uri, known, served)
    if json_output:
        print_json(asdict(one))
    else:
        print("\n".join(_details(one)))
    return int(one.problem is not None)


def _example(scheme: str) -> Uri:
    row = scheme_of(scheme)
    if row is not None and row.example:
        return parse(row.example)
    return parse(f"{scheme}://example")


def _look(scheme: str, uri: Uri, known: Mapping[str, str], served: Mapping[str, str]) -> _Found:
    found = _Found(scheme, known[scheme], served.get(scheme, ""))
    try:
        found.config_file = _text_of_path(config_file(os.environ))
        found.config_ignored = _text_of_path(ignored_config_file(os.environ))
        cls = driver_class(uri.scheme if scheme == "fsspec" else scheme)
        found.remote = cls.remote
        common = common_options(remote=cls.remote)
        known_options = {**cls.OPTIONS, **common}
        for name, resolved in resolved_options(uri).items():
            option = known_options[name]
            if resolved.text is None:
                value = _text(name, option, resolved.value)
            else:
                value = _safe(name, resolved.text)
            found.options.append(
                {
                    "name": name,
                    "help": option.help,
                    "default": _text(name, option, option.default),
                    "value": value,
                    "source": resolved.source,
                    "common": name in common,
                }
            )
        found.tuned = _tuned(uri)
        driver = open_driver(uri)
    except UsageError as error:
        found.problem = error.message
        found.advice = error.advice
        return found
    found.uri = driver.uri
    found.layers = _layers(driver)
    found.traits = asdict(driver.traits)
    asyncio.run(driver.close())
    return found


def _tuned(uri: Uri) -> str | None:
    """Return in words which profile applies to ``uri``, or which do not because other machines
    measured them; None if its place has none."""
    file = tuned_file(os.environ)
    if file is None:
        return None
    place = tuned_place(uri)
    here = [profile for profile in read_profiles(file) if profile.place == place]
    applying = profile_for(here, place)
    if applying is not None:
        return (
            f"{file} [{place.uri}], of {time_text(applying.tuned_s)}: "
            f"{applying.gain:.2f} × as fast as the defaults"
        )
    if here:
        machines = ", ".join(profile.machine for profile in here)
        return f"{file} [{place.uri}] is of other machines, and not used: {machines}"
    return None


def _text_of_path(path: Path | None) -> str | None:
    if path is None:
        return None
    return str(path)


def _layers(driver: Driver) -> list[str]:
    """Return the names of the layers, from the caller to the storage."""
    names = []
    while isinstance(driver, Layer):
        names.append(type(driver).__name__.removesuffix("Layer").lower())
        driver = driver.inner
    return names


def _text(name: str, option: Option, value: object) -> str | None:
    """Return a value as a user would write it; None for no value."""
    if value is None or value == "":
        return None
    return _safe(name, option.text(value))


def _safe(name: str, text: str) -> str:
    """Return the text of an option, with secrets hidden."""
    if is_secret(name):
        return "***"
    return redact(text)


def _line(found: _Found) -> tuple[str, ...]:
    scheme = f"{found.scheme}://"
    if found.scheme == "fsspec":
        scheme = "fsspec+X://"
    state = "ready"
    if found.problem is not None:
        state = _problem_text(found)
    return scheme, printable(found.package) or "?", printable(found.driver), state


def _problem_text(found: _Found) -> str:
    return paint(printable(f"{found.problem}. {found.advice or ''}".strip()), "red")


def _details(found: _Found) -> list[str]:
    lines = [
        ("scheme", found.scheme),
        ("driver", printable(found.driver)),
        ("package", printable(found.package) or "?"),
        (
            "remote",
            {None: "?", True: "yes: retries and a deadline by default", False: "no"}[found.remote],
        ),
        ("file", printable(found.config_file or "none")),
    ]
    if found.config_ignored is not None:
        lines.append(("not read", printable(found.config_ignored)))
    if found.tuned is not None:
        lines.append(("tuned", printable(found.tuned)))
    if found.problem is not None:
        lines.append(("problem", _problem_text(found)))
    if found.uri is not None:
        traits = (f"{name}={value}" for name, value in (found.traits or {}).items())
        lines += [
            ("uri", printable(found.uri)),
            ("layers", ", ".join(found.layers) or "none"),
            ("traits", ", ".join(traits)),
        ]
    width = max(len(name) for name, _ in lines)
    printed = [f"{paint(name.ljust(width), 'dim')}  {value}" for name, value in lines]
    for title, common in (("options", False), ("options of every scheme", True)):
        rows = [
            [printable(o[name] or "-") for name in ("name", "value", "source", "default", "help")]
            for o in found.options
            if o["common"] == common
        ]
        if rows:
            printed += [
                "",
                paint(title, "bold"),
                *columns(("name", "value", "from", "default", "what"), rows),
            ]
    return printed
