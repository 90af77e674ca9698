"""``holdfast.toml``: options per scheme and per URI, optionally in profiles.

::

    [common]                      # options that every scheme has
    op_timeout_s = 60

    [s3]                          # every s3:// URI
    endpoint = "http://store:9000"

    ["s3://bucket/run"]           # this URI and everything below it
    max_bytes_per_s = "500MB"

    [profile.cluster.s3]          # the same tables; they win if the profile is chosen
    endpoint = "http://other:9000"

A profile is chosen with ``?config_profile=cluster``, the keyword of that name, or
HOLDFAST_CONFIG_PROFILE. The most specific table wins: the longest URI, then the scheme, then
``common``.

One file is read: the one named by HOLDFAST_CONFIG (empty: none), else ``holdfast/holdfast.toml`` in
the user's configuration folder, XDG_CONFIG_HOME or ``~/.config``. The file decides where
credentials and checkpoints go. So that one is trusted only if nobody except the user and root can
have written the file, its folder, or the folder above. A file in the working directory is never
read: it could be anyone's.
"""

from __future__ import annotations

import grp
import logging
import os
import pwd
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import UriError, UsageError
from ..uri import Uri, parse, redact

CONFIG_VARIABLE = "HOLDFAST_CONFIG"
FILE_NAME = "holdfast.toml"
_FILE_NBYTES_MAX = 1 << 20
PROFILE_OPTION = "config_profile"
_COMMON = "common"
_PROFILE = "profile"

Tables = Mapping[str, Any]

_log = logging.getLogger(__name__)
_hinted: set[Path] = set()
"""Files already mentioned in a warning."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Text given for one option and its source: "the URI", a variable, or a file and table. The
    text may be a secret, so ``repr()`` hides it."""

    text: str = field(repr=False)
    source: str


def config_file(environment: Mapping[str, str]) -> Path | None:
    """Return the configuration file to read, if any. Raises UsageError if HOLDFAST_CONFIG names a
    missing file or a relative path."""
    named = environment.get(CONFIG_VARIABLE)
    if named is None:
        file = file_of_user()
        if file is not None and os.path.isfile(file):
            return file
        return None
    if not named:
        return None
    if named.startswith("~/"):
        named = os.path.expanduser(named)
    if not os.path.isabs(named):
        # A relative path in an exported variable would depend on the current directory.
        raise UsageError(
            f"{CONFIG_VARIABLE} names {named!r}, which is a relative path",
            advice="Give the whole path of the file.",
        )
    if not os.path.isfile(named):
        raise UsageError(f"{CONFIG_VARIABLE} names {named!r}, but there is no such file")
    return Path(named)


def ignored_config_file(environment: Mapping[str, str]) -> Path | None:
    """Return the file in the working directory that is ignored because HOLDFAST_CONFIG is not set,
    if any."""
    if CONFIG_VARIABLE in environment or not os.path.isfile(FILE_NAME):
        return None
    try:
        here = Path(FILE_NAME).absolute()
        applies = config_file(environment)
        if applies is not None and os.path.samefile(here, applies):
            return None
        return here
    except OSError:  # the working directory or the file is gone
        return None


def _hint(ignored: Path) -> str:
    return (
        f"{str(ignored)!r} is not read, because a working directory may belong to anyone. "
        f"If you trust it, set {CONFIG_VARIABLE} to this path, or move it to {_place_of_user()}."
    )


def _place_of_user() -> str:
    return str(file_of_user() or f"~/.config/holdfast/{FILE_NAME}")


def file_settings(
    uri: Uri,
    profile: Setting | None,
    environment: Mapping[str, str],
    common: Collection[str],
    schemes: Callable[[], Collection[str]],
) -> dict[str, Setting]:
    """Return the file's settings for ``uri``, by option. Validates option names only in ``common``.

    Raises UsageError for a file that cannot be read or that others may write to, and for an unknown
    table or profile.
    """
    ignored = ignored_config_file(environment)
    if ignored is not None and ignored not in _hinted:
        _hinted.add(ignored)
        _log.warning("%s", _hint(ignored))
    file = config_file(environment)
    if file is None:
        if profile is not None:
            raise UsageError(
                f"{profile.source} chooses the profile {profile.text!r}, but there is no "
                f"{FILE_NAME}",
                advice=f"Looked at {CONFIG_VARIABLE} and {_place_of_user()}."
                + (f" {_hint(ignored)}" if ignored is not None else ""),
            )
        return {}
    try:
        # A file that HOLDFAST_CONFIG names is trusted without a check.
        tables = tables_of(file, check=CONFIG_VARIABLE not in environment)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} cannot be used: {error}") from error
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
    return found | dict(
        _applying(
            file, label, _table(file, label[:-1], profiles[profile.text]), uri, common, schemes
        )
    )


def text_of(value: object, name: str) -> str:
    """Return a value as the text it would have in a URI. Raises UsageError for other types."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str | int | float):
        return str(value)
    raise UsageError(f"option {name!r} is text, a number or a bool, not {type(value).__name__}")


def _applying(
    file: Path,
    label: str,
    tables: Tables,
    uri: Uri,
    common: Collection[str],
    schemes: Callable[[], Collection[str]],
) -> Iterator[tuple[str, Setting]]:
    """Yield the settings of all tables that apply to ``uri``, most specific last."""
    applying: list[tuple[tuple[int, int], str]] = []
    for name in tables:
        if "://" in name:
            prefix = _prefix(file, label + redact(name), name)
            within = prefix.location.rstrip("/") + "/"
            if uri.scheme == prefix.scheme and f"{uri.location}/".startswith(within):
                applying.append(((2, len(prefix.location)), name))
        elif name in (_COMMON, uri.scheme):
            applying.append(((int(name != _COMMON), 0), name))
        elif name not in schemes() and not name.startswith("fsspec+"):
            raise UsageError(
                f"{file} has a table [{label}{name}], which is not a scheme",
                advice=f"Tables are {_COMMON}, {_PROFILE}.<name>.<table>, a URI in quotes, "
                f"or a scheme: {', '.join(sorted(schemes()))}.",
            )
    for _, name in sorted(applying):
        shown = label + redact(name)
        source = f"{file} [{shown}]"
        for option, value in _table(file, shown, tables[name]).items():
            if name == _COMMON and option not in common:
                known = ", ".join(sorted(common))
                raise UriError(
                    f"no option {option!r} is common to all schemes ({source})",
                    advice=f"Known: {known}.",
                )
            yield option, Setting(text_of(value, f"{option} in {source}"), source)


def _table(file: Path, name: str, value: object) -> Tables:
    if not isinstance(value, dict):
        raise UsageError(
            f"{file}: {name!r} is outside any table",
            advice=f"Put it below [{_COMMON}], for example.",
        )
    return value


def _prefix(file: Path, label: str, text: str) -> Uri:
    try:
        prefix = parse(text)
    except UriError as error:
        raise UsageError(
            f"{file} has a table [{label}], which is not a URI: {error.message}"
        ) from error
    if prefix.options:
        raise UsageError(
            f"{file} has a table [{label}] with options in its URI", advice="Write them below it."
        )
    return prefix


def file_of_user() -> Path | None:
    """Return the path of the user's file: ``holdfast/holdfast.toml`` in XDG_CONFIG_HOME, else in
    ``~/.config``; None for a user without a home. Ignores relative paths in the environment, which
    would point into the working directory."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(folder):
        home = _home()
        if home is None:
            return None
        folder = os.path.join(home, ".config")
    return Path(folder, "holdfast", FILE_NAME)


def _home() -> str | None:
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        try:
            home = pwd.getpwuid(os.geteuid()).pw_dir
        except KeyError:  # containers may run as a UID without an account
            return None
    if os.path.isabs(home):
        return home
    return None


def tables_of(file: Path, *, check: bool) -> dict[str, Any]:
    """Return the tables of a TOML file, checked by :func:`check_trusted` if ``check``. Raises
    UsageError for an untrusted file, OSError, ValueError, and RecursionError."""
    import tomllib  # imported here because most users have no such file

    with file.open("rb") as opened:
        if check:
            check_trusted(file, os.fstat(opened.fileno()))
        data = opened.read(_FILE_NBYTES_MAX + 1)
    if len(data) > _FILE_NBYTES_MAX:
        raise ValueError(f"it has more than {_FILE_NBYTES_MAX:,} bytes")
    return tomllib.loads(data.decode())


def check_trusted(file: Path, status: os.stat_result) -> None:
    """Raise UsageError unless only this user and root can have written ``file``. ``status`` is that
    of the opened file. Raises OSError if a folder cannot be inspected."""
    folder = file.parent
    _check(file, status, "file")
    for above in dict.fromkeys((folder, folder.parent, Path(os.path.realpath(file)).parent)):
        _check(above, os.stat(above), "folder")


def _check(path: Path, status: os.stat_result, kind: str) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise UsageError(
            f"the configuration {kind} {path} belongs to user {status.st_uid}, "
            f"but this process runs as user {os.geteuid()}",
            advice="Its owner decides where credentials and checkpoints go. "
            "If you trust it, set HOLDFAST_CONFIG to the file. To read none, set it to nothing.",
        )
    by_group = status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid)
    if status.st_mode & stat.S_IWOTH or by_group:
        raise UsageError(
            f"others may write to the configuration {kind} {path}",
            advice=(
                f"They could redirect credentials and checkpoints. To prevent that: chmod go-w "
                f"'{path}'."
            ),
        )


def _is_private_group(gid: int) -> bool:
    """Return whether the group is root's or this user's alone, by the convention that such a group
    has the user's name. Many systems create files that this group may write to."""
    if gid == 0:
        return True
    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return (
        user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    )
