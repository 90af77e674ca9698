"""Storing and removing profiles in ``tuned.toml`` (:mod:`.tuned`).

The file is replaced as a whole, atomically and durably. Everything else a user configures is in
another file, which this module never touches.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ...errors import UsageError
from .file import CONFIG_VARIABLE
from .trust import check_trusted
from .tuned import VERSION, Place, TunedProfile, read_profiles, tuned_file

__all__ = ["check_keeping", "forget_profiles", "keep_profile", "text_of_profiles"]

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

    def changed(profiles: Sequence[TunedProfile]) -> list[TunedProfile]:
        return [*(p for p in profiles if not profile.replaces(p)), profile]

    _change(file, changed)


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
    lines = [
        "",
        "[[profile]]",
        f"uri = {_quoted(profile.place.uri)}",
        f"machine = {_quoted(profile.machine)}",
        f"tuned_s = {float(profile.tuned_s)!r}",
        f"gain = {profile.gain:.4f}",
        f"gain_low = {profile.gain_low:.4f}",
        f"gain_high = {profile.gain_high:.4f}",
        f"where = {_inline(profile.place.where)}",
        f"options = {_inline(profile.options)}",
        "",
    ]
    return "\n".join(lines)


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
