"""Test saves and loads whose system calls fail, or read too little."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.aftermath import check, check_next_save, some
from support.victims import save_here, state_of_step, tapped

import holdfast

POINTS = 24
ERRORS = {
    "EIO": holdfast.StorageDownError, "ENOSPC": holdfast.FullError, "EDQUOT": holdfast.FullError,
    "EMFILE": holdfast.StorageError, "EROFS": holdfast.AccessError,
}  # fmt: skip
CHANGING = {
    "fsync": ("EIO", "EDQUOT", "ENOSPC"), "pwrite": ("EIO", "ENOSPC", "EDQUOT"),
    "rename": ("EIO", "ENOSPC"), "link": ("EIO", "ENOSPC"), "mkdir": ("EDQUOT", "EROFS"),
    "open": ("EMFILE", "EIO"), "unlink": ("EIO", "EROFS"),
}  # fmt: skip


@pytest.fixture
def uri(tmp_path: Path) -> Path:
    """Return the folder of a checkpoint of step 1."""
    holdfast.save(tmp_path / "c", state_of_step(1))
    return tmp_path / "c"


def cases(uri: Path, seed: int) -> list[tuple[str, int, str]]:
    """Return system calls of a save to fail: the kind, which one of it, and the error."""
    labels: list[str] = []
    with tapped(lambda number, label: labels.append(label)):
        save_here(str(uri), 1)
    counts = {kind: sum(label.startswith(f"{kind} ") for label in labels) for kind in CHANGING}
    assert all(counts.values())
    every = [
        (kind, n, code)
        for kind, codes in CHANGING.items()
        for n in range(1, counts[kind] + 1)
        for code in codes
    ]
    return some(every, POINTS, seed)


def failing(kind: str, n: int, code: str) -> Callable[[int, str], None]:
    """Return a function for :func:`tapped` that fails the n-th call of a kind."""
    left = n

    def before(number: int, label: str) -> None:
        nonlocal left
        left -= label.startswith(f"{kind} ")
        if not left:
            left = -1
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    return before


@pytest.mark.timeout(600)
def test_a_system_call_that_fails_is_an_error_or_does_no_harm(uri: Path, seed: int) -> None:
    """A save with a failing call raises the error of its kind, or the new checkpoint is whole.

    If it raises, the old or the new checkpoint is there, whole, and the next save cleans up.
    """
    raised, step = 0, 1
    for case in cases(uri, seed):
        step += 2
        try:
            with tapped(failing(*case)):
                save_here(str(uri), step)
        except ERRORS[case[2]] as error:
            raised += 1
            assert case[2] in str(error), case
            check(uri, {1, step - 1, step})
        else:
            check(uri, {step})
        check_next_save(uri, step + 1)
    assert raised > 0


def fail(code: int) -> Callable[..., Any]:
    """Return a system call that fails."""

    def call(*args: Any, **kwargs: Any) -> None:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize(
    ("call", "instead", "error"),
    [
        ("preadv", fail(errno.EIO), holdfast.StorageDownError),
        ("preadv", lambda *args: 0, holdfast.DamagedError),
        ("preadv", lambda *args: 4096, holdfast.DamagedError),
        ("open", fail(errno.EACCES), holdfast.AccessError),
        ("open", fail(errno.EMFILE), holdfast.StorageError),
    ],
    ids=["EIO", "end of file", "nothing is filled", "EACCES", "EMFILE"],
)
def test_a_read_that_fails_is_an_error_and_never_a_value(
    uri: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    instead: Callable[..., Any],
    error: type[holdfast.HoldfastError],
) -> None:
    """A load raises an error if a read fails, ends early, or fills nothing."""
    monkeypatch.setattr(os, call, instead)
    with pytest.raises(error):
        holdfast.load(uri)
