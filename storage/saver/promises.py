"""Memory that the processes of a host are about to take.

Fresh memory counts as available until it is written to. Ranks that all look at the same moment
would all find enough. So each notes its intention in a file, which it locks for a moment, and heeds
the notes of others.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO, TypeAlias

from ...errors import UsageError
from ..arenas.folder import base_folder, check_own

Note: TypeAlias = tuple[int, int, int]
"""Process, its start in clock ticks, and bytes."""


def promise(nbytes: int, available: Callable[[], int]) -> None:
    """Note that this process takes ``nbytes``. Raises MemoryError if ``available()`` is less than
    that and all promises together. Without a private folder, others are not heeded."""
    with _notes() as notes:
        promised_nbytes = sum(note[2] for note in notes)
        left_nbytes = available() - promised_nbytes
        if nbytes > left_nbytes:
            others = f", since others take {promised_nbytes:,}" if promised_nbytes else ""
            raise MemoryError(f"{max(left_nbytes, 0):,} bytes are available{others}")
        notes.append((os.getpid(), _start_of(os.getpid()), nbytes))


def keep_promise() -> None:
    """Remove the notes of this process: its memory is taken, or no longer wanted."""
    with _notes() as notes:
        notes[:] = [note for note in notes if note[0] != os.getpid()]


@contextlib.contextmanager
def _notes() -> Iterator[list[Note]]:
    """Yield the notes of living processes, which the body may change, while nobody else can."""
    try:
        file = _opened()
    except (OSError, UsageError):
        yield []
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # held for microseconds, and released with its process
        notes = [note for note in _decoded(file.read()) if _start_of(note[0]) == note[1]]
        yield notes
        file.seek(0)
        file.truncate()
        json.dump(notes, file)


def _opened() -> TextIO:
    folder = base_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    check_own(folder)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(folder / "promises.json", flags, 0o600), "r+")


def _decoded(text: str) -> list[Note]:
    try:
        return [(int(pid), int(start), int(n)) for pid, start, n in json.loads(text or "[]")]
    except (ValueError, TypeError):
        return []


def _start_of(pid: int) -> int:
    """Return when a process began; -1 without one. Ids are used again."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return -1
