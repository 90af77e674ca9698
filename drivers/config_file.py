"""``holdfast.toml``: options by scheme and by URI, in profiles or for all.

::

    [common]                      # options that every scheme has
    op_timeout_s = 60

    [s3]                          # every s3:// URI
    endpoint = "http://store:9000"

    ["s3://bucket/run"]           # that URI, and what lies below it
    max_bytes_per_s = "500MB"

    [profile.cluster.s3]          # the same tables again; they win where the profile is chosen
    endpoint = "http://other:9000"

A profile is chosen by ``?config_profile=cluster``, the keyword of that name, or HOLDFAST_CONFIG_PROFILE. Of the tables that
apply, the more special wins: the longest URI, then the scheme, then ``common``.

One file is read, the first that is there: the one that HOLDFAST_CONFIG names (empty: none at all), ``holdfast.toml`` in the
working directory, ``~/.config/holdfast/holdfast.toml``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UriError, UsageError
from .uri import Uri, parse, redact

__all__ = ["CONFIG_VARIABLE", "PROFILE_OPTION", "Setting", "config_file", "file_settings", "text_of"]

CONFIG_VARIABLE = "HOLDFAST_CONFIG"
PROFILE_OPTION = "config_profile"
_FILE_NBYTES_MAX = 1 << 20
_COMMON = "common"
_PROFILE = "profile"

Tables = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """What somebody said about one option, and who: "the URI", a variable, a file and its table. The text may be a secret:
    ``repr()`` does not show it."""

    text: str = field(repr=False)
    source: str


def config_file(environment: Mapping[str, str]) -> Path | None:
    """The file that applies. Raises UsageError where HOLDFAST_CONFIG names one that is not there."""
    named = environment.get(CONFIG_VARIABLE)
    if named is not None:
        if named and not Path(named).is_file():
            raise UsageError(f"{CONFIG_VARIABLE} names {named!r}, and no such file is there")
        return Path(named) if named else None
    # Plain text until one is there: every save looks, while training waits for it to begin.
    places = (os.path.abspath("holdfast.toml"), os.path.expanduser("~/.config/holdfast/holdfast.toml"))
    return next((Path(place) for place in places if os.path.isfile(place)), None)


def file_settings(
    uri: Uri,
    profile: Setting | None,
    environment: Mapping[str, str],
    common: Collection[str],
    schemes: Callable[[], Collection[str]],
) -> dict[str, Setting]:
    """What the file says about ``uri``, by option. Whether ``uri`` has such options is not looked at, except in ``common``.

    Raises UsageError for a file that cannot be read, and for a table or a profile that means nothing.
    """
    file = config_file(environment)
    if file is None:
        if profile is not None:
            raise UsageError(
                f"{profile.source} chooses the profile {profile.text!r}, and there is no holdfast.toml",
                advice=f"Looked at {CONFIG_VARIABLE}, ./holdfast.toml and ~/.config/holdfast/holdfast.toml.",
            )
        return {}
    tables = dict(_read(file))
    profiles = _table(file, _PROFILE, tables.pop(_PROFILE, {}))
    found = dict(_applying(file, "", tables, uri, common, schemes))
    if profile is None:
        return found
    if profile.text not in profiles:
        names = ", ".join(sorted(profiles)) or "none"
        raise UsageError(
            f"{profile.source} chooses the profile {profile.text!r}, which {file} does not have",
            advice=f"Its profiles: {names}.",
        )
    label = f"{_PROFILE}.{profile.text}."
    return found | dict(_applying(file, label, _table(file, label[:-1], profiles[profile.text]), uri, common, schemes))


def text_of(value: object, name: str) -> str:
    """A value as it would stand in a URI. Raises UsageError for what could not."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str | int | float):
        return str(value)
    raise UsageError(f"option {name!r} is text, a number or a bool, not {type(value).__name__}")


def _read(file: Path) -> Tables:
    import tomllib  # only here: most have no file

    try:
        with file.open("rb") as opened:
            data = opened.read(_FILE_NBYTES_MAX + 1)
        if len(data) > _FILE_NBYTES_MAX:
            raise ValueError(f"it has more than {_FILE_NBYTES_MAX:,} bytes")
        return tomllib.loads(data.decode())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} cannot be used: {error}") from error


def _applying(
    file: Path, label: str, tables: Tables, uri: Uri, common: Collection[str], schemes: Callable[[], Collection[str]]
) -> Iterator[tuple[str, Setting]]:
    """The settings of all tables that apply to ``uri``, the most special last."""
    applying: list[tuple[tuple[int, int], str]] = []
    for name in tables:
        if "://" in name:
            prefix = _prefix(file, label + redact(name), name)
            if _is_below(uri, prefix):
                applying.append(((2, len(prefix.location)), name))
        elif name in (_COMMON, uri.scheme):
            applying.append(((int(name != _COMMON), 0), name))
        elif name not in schemes() and not name.startswith("fsspec+"):
            raise UsageError(
                f"{file} has a table [{label}{name}], which is no scheme",
                advice=f"Tables are {_COMMON}, {_PROFILE}.<name>.<table>, a URI in quotes, "
                f"or a scheme: {', '.join(sorted(schemes()))}.",
            )
    for _, name in sorted(applying):
        shown = label + redact(name)
        source = f"{file} [{shown}]"
        for option, value in _table(file, shown, tables[name]).items():
            if name == _COMMON and option not in common:
                known = ", ".join(sorted(common))
                raise UriError(f"no option {option!r} is common to all schemes ({source})", advice=f"Known: {known}.")
            yield option, Setting(text_of(value, f"{option} in {source}"), source)


def _table(file: Path, name: str, value: object) -> Tables:
    if not isinstance(value, dict):
        raise UsageError(f"{file}: {name!r} stands outside of a table", advice=f"Write it below [{_COMMON}], say.")
    return value


def _prefix(file: Path, label: str, text: str) -> Uri:
    try:
        prefix = parse(text)
    except UriError as error:
        raise UsageError(f"{file} has a table [{label}], which is no URI: {error.message}") from error
    if prefix.options:
        raise UsageError(f"{file} has a table [{label}] with options in its URI", advice="Write them below it.")
    return prefix


def _is_below(uri: Uri, prefix: Uri) -> bool:
    within = prefix.location.rstrip("/")
    return uri.scheme == prefix.scheme and (uri.location == within or uri.location.startswith(within + "/"))
