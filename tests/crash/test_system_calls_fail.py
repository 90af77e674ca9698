"""The kernel's own answers, as strace makes them up."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.aftermath import check, check_next_save, some
from support.bits import difference
from support.injected import injected
from support.victims import load_here, save_here, state_of_step

import holdfast

POINTS = 6
ERRORS = {
    "EIO": holdfast.StorageDownError, "ENOSPC": holdfast.FullError, "EDQUOT": holdfast.FullError, "EMFILE": holdfast.StorageError,
    "EROFS": holdfast.AccessError,
}  # fmt: skip
CHANGING = {
    "fsync": ("EIO", "EDQUOT", "ENOSPC"), "pwrite64": ("EIO", "ENOSPC", "EDQUOT"), "rename,renameat,renameat2": ("EIO", "ENOSPC"),
    "link,linkat": ("EIO", "ENOSPC"), "mkdir,mkdirat": ("EDQUOT", "EROFS"), "ftruncate": ("EIO", "ENOSPC"), "openat": ("EMFILE", "EIO"),
    "unlink,unlinkat": ("EIO", "EROFS"),
}  # fmt: skip
MOST = 80
"""More calls of one kind than a save makes."""


@pytest.fixture
def uri(tmp_path: Path) -> Path:
    """A checkpoint of step 1."""
    holdfast.save(tmp_path / "c", state_of_step(1))
    return tmp_path / "c"


def one_thread(uri: Path) -> str:
    """strace counts calls by thread; so there is one."""
    return f"file://{uri}?threads=1"


def counted(uri: Path, calls: str) -> int:
    """How many system calls of this kind a save makes."""
    outcome = injected(save_here, one_thread(uri), 1, inject=f"{calls}:delay_enter=1")
    assert outcome.error is None
    return min(outcome.hits, MOST)


def cases(uri: Path, seed: int) -> list[tuple[str, str, int]]:
    """Kind of call, error, and which of them fails: so many of all."""
    every = [
        (c, code, n)
        for c, codes in CHANGING.items()
        for n in range(1, counted(uri, c) + 1)
        for code in codes
    ]
    return some(every, POINTS, seed)


@pytest.mark.nightly(8)
@pytest.mark.timeout(3600)
def test_a_system_call_that_fails_is_an_error_or_does_no_harm(uri: Path, seed: int) -> None:
    """It raises the error of its kind and the old checkpoint is there, or the new one, whole."""
    raised, step = 0, 1
    for calls, code, n in cases(uri, seed):
        step += 2
        outcome = injected(
            save_here, one_thread(uri), step, inject=f"{calls}:error={code}:when={n}"
        )
        told = f"{code} at {n} of {calls}: {outcome.error!r}"
        assert not outcome.killed, told
        if outcome.error is None:
            check(uri, {step})
        else:
            raised += 1
            assert isinstance(outcome.error, ERRORS[code]), told
            assert code in str(outcome.error), told
            check(uri, {1, step - 1, step})
        check_next_save(uri, step + 1)
    assert raised > 0


@pytest.mark.timeout(3600)
def test_a_save_killed_inside_a_system_call_leaves_a_whole_checkpoint(uri: Path, seed: int) -> None:
    """By SIGKILL at the entry of any of them, also of those that read, seek, lock or close."""
    calls = "fsync,pwrite64,rename,renameat,link,linkat,mkdir,mkdirat,ftruncate,openat,unlink,unlinkat,close,flock,fstat,newfstatat"
    step, found = 1, []
    for n in some(range(1, MOST), POINTS, seed):
        step += 2
        outcome = injected(save_here, one_thread(uri), step, inject=f"{calls}:signal=KILL:when={n}")
        found.append(check(uri, {step} if not outcome.killed else {1, step - 1, step}))
        assert outcome.killed or outcome.error is None
        check_next_save(uri, step + 1)
    assert found[0] == 1


@pytest.mark.nightly(4)
def test_a_write_that_lies_is_found_out(uri: Path) -> None:
    """The kernel says that it has written, and has not. Whichever write that is."""
    told = []
    for n in range(1, MOST):
        holdfast.save(uri, state_of_step(1))
        outcome = injected(save_here, one_thread(uri), 2, inject=f"pwrite64:retval=4096:when={n}")
        if not outcome.hits:
            break
        try:
            found = holdfast.load(uri)
            with holdfast.open(uri) as c:
                told.append("whole" if c.verify().ok else "reported")
            assert difference(state_of_step(found["step"]), found) is None
        except holdfast.DamagedError:
            told.append("damaged")
    assert "damaged" in told


READS: list[tuple[str, type[BaseException] | None]] = [
    ("preadv,preadv2:error=EIO", holdfast.StorageDownError),
    ("preadv,preadv2:error=EINTR:when=1..2", None),
    ("preadv,preadv2:retval=0", holdfast.DamagedError),
    ("preadv,preadv2:retval=4096", holdfast.DamagedError),
    ("openat:error=EACCES", holdfast.AccessError),
    ("openat:error=EMFILE", holdfast.StorageError),
]


@pytest.mark.nightly(4)
@pytest.mark.parametrize(("inject", "kind"), READS, ids=[inject for inject, _ in READS])
def test_a_read_that_fails_is_an_error_and_never_a_value(
    uri: Path, inject: str, kind: type[BaseException] | None
) -> None:
    """EIO, files that end too early, reads that say they have filled what they have not."""
    outcome = injected(load_here, one_thread(uri), inject=inject)
    if kind is None:
        assert outcome.error is None
        assert outcome.value == "as saved"
    else:
        assert outcome.hits > 0
        assert isinstance(outcome.error, kind)
