"""``tuned.toml``: profiles that ``holdfast bench URI --tune`` has measured, by scheme and place.

::

    version = 1

    [[profile]]
    uri = "s3://bucket"               # the place: a mount point, a bucket, a name node
    machine = "64 × AMD EPYC 7763"    # the kind of machine that it was measured on
    tuned_s = 1.9e9                   # when, in seconds since the epoch
    gain = 1.31                       # how many times as fast as the defaults, and its
    gain_low = 1.22                   # confidence interval of 95 %
    gain_high = 1.40
    where = { endpoint = "http://store:9000" }
    options = { part_size = "32MiB", concurrency = "32" }

The file lies beside the user's ``holdfast.toml``, which wins over it, and passes the same checks
(:mod:`.trust`). It is not read where HOLDFAST_CONFIG is set, which names all that is read. A
profile can set no option but those of :data:`TUNABLE`: none of them says where anything goes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from ...errors import UsageError
from ..schemes import scheme_of
from ..uri import Uri
from .file import CONFIG_VARIABLE, Setting
from .trust import check_trusted, file_of_user

__all__ = [
    "TUNABLE",
    "TUNED_FILE_NAME",
    "MountLike",
    "MountOf",
    "Place",
    "TunedProfile",
    "machine_kind",
    "place_of",
    "profile_for",
    "read_profiles",
    "tuned_file",
    "tuned_settings",
]

TUNED_FILE_NAME = "tuned.toml"
TUNABLE = ("part_size", "concurrency", "threads", "streams", "direct", "max_concurrency")
"""Options that change how fast a storage is used, and nothing else."""
VERSION = 1
_FILE_NBYTES_MAX = 1 << 20
_ADVICE = "Delete the file, and tune again: holdfast bench URI --tune."

_NAMES_PLACE: Mapping[str, tuple[str, ...]] = {
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "account": ("AZURE_STORAGE_ACCOUNT_NAME",),
    "namenodes": (),
}
"""Options that say which storage a URI means, and the variables that say it where they do not."""


class MountLike(Protocol):
    """What is known of the mount that holds a path."""

    @property
    def fs_type(self) -> str:
        """The type of the file system."""

    @property
    def point(self) -> str:
        """Where it is mounted; "" if unknown."""


MountOf = Callable[[str], MountLike]


@dataclass(frozen=True)
class Place:
    """A storage, as a profile names it. ``uri``: that of its mount point, bucket or name node;
    ``where``: what else tells it from others of the same URI."""

    uri: str
    where: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TunedProfile:
    """One profile: ``options``, as text, for ``place`` on machines of the kind ``machine``.

    ``tuned_s``: when it was measured, in seconds since the epoch. ``gain``: how many times as fast
    as the defaults, and its confidence interval of 95 %."""

    place: Place
    machine: str
    options: Mapping[str, str]
    tuned_s: float
    gain: float
    gain_low: float
    gain_high: float

    def replaces(self, other: TunedProfile) -> bool:
        """Whether both are for the same place and kind of machine."""
        return self.place == other.place and self.machine == other.machine


def tuned_file(environment: Mapping[str, str]) -> Path | None:
    """Where profiles are kept, whether or not there are any; None where none is read: with
    HOLDFAST_CONFIG, and for a user without a home."""
    if CONFIG_VARIABLE in environment:
        return None
    beside = file_of_user()
    if beside is None:
        return None
    return beside.with_name(TUNED_FILE_NAME)


def place_of(
    uri: Uri,
    settings: Mapping[str, str],
    environment: Mapping[str, str],
    known: Sequence[str],
    mount_of: MountOf,
) -> Place:
    """The place that ``uri`` is in. ``settings``: the options that are set, as text; ``known``: the
    names of those that the scheme has."""
    scheme = scheme_of(uri.scheme)
    if scheme is not None and scheme.is_path:
        mount = mount_of(uri.location)
        root = Uri(uri.scheme, mount.point or "/")
        return Place(root.root, {"file system": mount.fs_type or "unknown"})
    first = uri.location.partition("/")[0]
    where = {
        name: _first_set(settings.get(name), *map(environment.get, variables))
        for name, variables in _NAMES_PLACE.items()
        if name in known
    }
    return Place(
        Uri(uri.scheme, first).root,
        {name: text.rstrip("/") for name, text in where.items() if text},
    )


def _first_set(*texts: str | None) -> str:
    return next((text for text in texts if text), "")


@lru_cache(maxsize=1)
def machine_kind() -> str:
    """The number and the model of the processors. Machines that are bought together have the same;
    host names and serial numbers would keep a cluster from sharing what one of its nodes found."""
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
    mount_of: MountOf,
) -> dict[str, Setting]:
    """What a profile says about ``uri``, by option; nothing where there is none for its place and
    this kind of machine. ``settings``: what was set elsewhere, which tells the place.

    Raises UsageError for a file that cannot be used, or that others may write to."""
    file = tuned_file(environment)
    if file is None or not os.path.isfile(file):
        return {}
    texts = {name: setting.text for name, setting in settings.items()}
    found = profile_for(read_profiles(file), place_of(uri, texts, environment, known, mount_of))
    if found is None:
        return {}
    source = f"{file} [{found.place.uri}]"
    return {name: Setting(text, source) for name, text in found.options.items()}


def profile_for(profiles: Sequence[TunedProfile], place: Place) -> TunedProfile | None:
    """The one for ``place`` and machines of this kind."""
    machine = machine_kind()
    return next((p for p in profiles if p.place == place and p.machine == machine), None)


def read_profiles(file: Path) -> list[TunedProfile]:
    """All profiles of a file; none where there is no file. Raises UsageError for one that cannot
    be used, or that others may write to."""
    import tomllib  # only here: most have no file

    try:
        with file.open("rb") as opened:
            check_trusted(file, os.fstat(opened.fileno()))
            data = opened.read(_FILE_NBYTES_MAX + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error}", advice=_ADVICE) from error
    try:
        if len(data) > _FILE_NBYTES_MAX:
            raise ValueError(f"it has more than {_FILE_NBYTES_MAX:,} bytes")
        tables = tomllib.loads(data.decode())
        if tables["version"] != VERSION:
            raise ValueError(f"its version is {tables['version']!r}")
        return [_profile(table) for table in tables.get("profile", [])]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{file} cannot be used: {error!r}", advice=_ADVICE) from error


def _profile(table: Mapping[str, Any]) -> TunedProfile:
    options = _texts(table["options"])
    if unknown := sorted(options.keys() - set(TUNABLE)):
        raise ValueError(f"a profile cannot set {', '.join(unknown)}")
    return TunedProfile(
        place=Place(_text(table["uri"]), _texts(table["where"])),
        machine=_text(table["machine"]),
        options=options,
        tuned_s=float(table["tuned_s"]),
        gain=float(table["gain"]),
        gain_low=float(table["gain_low"]),
        gain_high=float(table["gain_high"]),
    )


def _texts(table: Mapping[str, Any]) -> dict[str, str]:
    return {name: _text(value) for name, value in table.items()}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
