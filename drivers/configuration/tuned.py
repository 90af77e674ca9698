"""``tuned.toml``: profiles measured by ``holdfast bench URI --tune``, by scheme and place.

::

    version = 1

    [[profile]]
    uri = "s3://bucket"               # the place: a mount point, a bucket, a name node
    machine = "64 × AMD EPYC 7763"    # the kind of machine it was measured on
    tuned_s = 1.9e9                   # time of measurement, in seconds since the epoch
    gain = 1.31                       # speed relative to the defaults, and its
    gain_low = 1.22                   # 95 % confidence interval
    gain_high = 1.40
    where = { endpoint = "http://store:9000" }
    options = { part_size = "32MiB", concurrency = "32" }

The file is next to the user's ``holdfast.toml``, which takes precedence, and passes the same checks
(:mod:`.file`). It is replaced as a whole, atomically and durably. It is not read if
HOLDFAST_CONFIG is set, because that variable names the only file to read. A profile can only set
the options in :data:`TUNABLE`, none of which affects where data goes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ..mounts import Mount, mount_of
from ..schemes import scheme_of
from ..uri import Uri
from .file import CONFIG_VARIABLE, Setting, check_trusted, file_of_user, tables_of

TUNED_FILE_NAME = "tuned.toml"
TUNABLE = ("part_size", "concurrency", "threads", "streams", "direct", "max_concurrency")
"""Options that affect only the speed of a storage."""
VERSION = 1
_ADVICE = "Delete the file, and tune again: holdfast bench URI --tune."

_NAMES_PLACE: Mapping[str, tuple[str, ...]] = {
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "account": ("AZURE_STORAGE_ACCOUNT_NAME",),
    "namenodes": (),
}
"""Options that determine which storage a URI refers to, each with the variables that set it
otherwise."""


@dataclass(frozen=True)
class Place:
    """A storage, as identified by a profile. ``uri`` is its mount point, bucket or name node;
    ``where`` distinguishes storages with the same URI."""

    uri: str
    where: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TunedProfile:
    """Tuned ``options``, as text, for ``place`` on machines of the kind ``machine``.

    ``tuned_s`` is the time of measurement, in seconds since the epoch. ``gain`` is the speed
    relative to the defaults, followed by its 95 % confidence interval.
    """

    place: Place
    machine: str
    options: Mapping[str, str]
    tuned_s: float
    gain: float
    gain_low: float
    gain_high: float


def tuned_file(environment: Mapping[str, str]) -> Path | None:
    """Return the path of the profiles, whether or not it exists. None if profiles are not read:
    with HOLDFAST_CONFIG set, and for a user without a home."""
    beside = file_of_user()
    if CONFIG_VARIABLE in environment or beside is None:
        return None
    return beside.with_name(TUNED_FILE_NAME)


def place_of(
    uri: Uri,
    settings: Mapping[str, str],
    environment: Mapping[str, str],
    known: Sequence[str],
    mount_of: Callable[[str], Mount] = mount_of,
) -> Place:
    """Return the place of ``uri``. ``settings`` are the options that are set, as text; ``known``
    are the option names of the scheme; ``mount_of`` returns the mount that holds a path."""
    scheme = scheme_of(uri.scheme)
    if scheme is not None and scheme.is_path:
        mount = mount_of(uri.location)
        root = Uri(uri.scheme, mount.point or "/")
        return Place(root.root, {"file system": mount.fs_type or "unknown"})
    first = uri.location.partition("/")[0]
    where = {}
    for name, variables in _NAMES_PLACE.items():
        texts = [settings.get(name), *map(environment.get, variables)]
        text = next(filter(None, texts), None)
        if name in known and text:
            where[name] = text.rstrip("/")
    return Place(Uri(uri.scheme, first).root, where)


@lru_cache(maxsize=1)
def machine_kind() -> str:
    """Return the number and model of the processors. Nodes of a cluster that were bought together
    share this, unlike host names or serial numbers, so they share profiles."""
    return f"{os.cpu_count()} × {_processor()}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("model name", "Model"):
                    return " ".join(value.split())
    except OSError:  # no /proc here
        pass
    return os.uname().machine


def tuned_settings(
    uri: Uri,
    settings: Mapping[str, Setting],
    environment: Mapping[str, str],
    known: Sequence[str],
) -> dict[str, Setting]:
    """Return the settings of the profile for ``uri``, by option; empty if there is none for its
    place and this kind of machine. ``settings`` from other sources help to identify the place.

    Raises UsageError for a file that is unusable, or that others may write to.
    """
    file = tuned_file(environment)
    if file is None or not os.path.isfile(file):
        return {}
    texts = {name: setting.text for name, setting in settings.items()}
    found = profile_for(read_profiles(file), place_of(uri, texts, environment, known))
    if found is None:
        return {}
    source = f"{file} [{found.place.uri}]"
    return {name: Setting(text, source) for name, text in found.options.items()}


def profile_for(profiles: Sequence[TunedProfile], place: Place) -> TunedProfile | None:
    """Return the profile for ``place`` and this kind of machine, if any."""
    machine = machine_kind()
    return next((p for p in profiles if p.place == place and p.machine == machine), None)


def read_profiles(file: Path) -> list[TunedProfile]:
    """Return all profiles of a file; empty if it does not exist. Raises UsageError if it is
    unusable, or if others may write to it."""
    try:
        tables = tables_of(file, check=True)
        if tables["version"] != VERSION:
            raise ValueError(f"its version is {tables['version']!r}")
        return [_profile(table) for table in tables.get("profile", [])]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{file} cannot be used: {error!r}", advice=_ADVICE) from error


def _profile(table: Mapping[str, Any]) -> TunedProfile:
    options = _texts(table["options"])
    if unknown := sorted(options.keys() - set(TUNABLE)):
        raise ValueError(f"a profile cannot set {', '.join(unknown)}")
    place = Place(_text(table["uri"]), _texts(table["where"]))
    numbers = [float(table[name]) for name in ("tuned_s", "gain", "gain_low", "gain_high")]
    return TunedProfile(place, _text(table["machine"]), options, *numbers)


def _texts(table: Mapping[str, Any]) -> dict[str, str]:
    return {name: _text(value) for name, value in table.items()}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


_HEAD = """\
# Written by `holdfast bench URI --tune`, which replaces this file as a whole: put what you want to
# set yourself into holdfast.toml, which wins. `holdfast bench URI --forget` removes a profile.
"""
_NEW = ".new"


def check_keeping(environment: Mapping[str, str]) -> Path:
    """Return the file for profiles, creating its folder if needed. Raises UsageError if profiles
    cannot be stored, or would not be read."""
    file = tuned_file(environment)
    if file is None:
        raise UsageError(
            f"{CONFIG_VARIABLE} is set, or you have no home: a profile would not be read",
            advice=f"Unset {CONFIG_VARIABLE}, or add --only-show, and put the result into the "
            "file that it names.",
        )
    try:
        file.parent.parent.mkdir(parents=True, exist_ok=True)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        if not os.access(file.parent, os.W_OK):
            raise PermissionError(f"no permission to write to {file.parent}")
        check_trusted(file, os.stat(file if file.exists() else file.parent))
    except OSError as error:
        raise UsageError(
            f"{file} cannot be written: {error}", advice="Add --only-show to keep nothing."
        ) from error
    read_profiles(file)
    return file


def keep_profile(file: Path, profile: TunedProfile) -> None:
    """Store a profile, replacing any for the same place and kind of machine. On failure, raises
    UsageError and leaves the file unchanged."""

    key = (profile.place, profile.machine)
    _change(file, lambda found: [*(p for p in found if (p.place, p.machine) != key), profile])


def forget_profiles(file: Path, place: Place) -> int:
    """Remove a place's profiles for all kinds of machines and return how many there were. Raises
    UsageError on failure."""
    count = sum(profile.place == place for profile in read_profiles(file))
    if count:
        _change(file, lambda profiles: [p for p in profiles if p.place != place])
    return count


def text_of_profiles(profiles: Sequence[TunedProfile]) -> str:
    """Return the content of a file with these profiles."""
    return "\n".join([_HEAD, f"version = {VERSION}", *map(_text_of, profiles)])


def _text_of(profile: TunedProfile) -> str:
    return f"""
[[profile]]
uri = {_quoted(profile.place.uri)}
machine = {_quoted(profile.machine)}
tuned_s = {float(profile.tuned_s)!r}
gain = {profile.gain:.4f}
gain_low = {profile.gain_low:.4f}
gain_high = {profile.gain_high:.4f}
where = {_inline(profile.place.where)}
options = {_inline(profile.options)}
"""


def _inline(table: Mapping[str, str]) -> str:
    pairs = ", ".join(f"{_quoted(name)} = {_quoted(text)}" for name, text in table.items())
    return f"{{ {pairs} }}"


def _quoted(text: str) -> str:
    """Return a TOML basic string. JSON has the same syntax, except that it does not escape DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _change(
    file: Path, changed: Callable[[Sequence[TunedProfile]], Sequence[TunedProfile]]
) -> None:
    """Replace the file with a modified copy. The fixed name of the new file serves as a lock: of
    two concurrent changes, one is rejected and none is lost."""
    new = file.with_name(file.name + _NEW)
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError as error:
        raise UsageError(
            f"{new} exists: another process is changing {file.name}, or died doing so",
            advice="Delete it if no other tuning runs.",
        ) from error
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error}") from error
    try:
        with open(fd, "w", encoding="utf-8") as opened:
            opened.write(text_of_profiles(changed(read_profiles(file))))
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(new, file)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        if isinstance(error, OSError | UnicodeEncodeError):
            raise UsageError(f"{file} cannot be written: {error}") from error
        raise
    _sync_folder(file.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
