"""Change the engine in one small way at a time, and check that its tests notice.

make mutants                     the whole list, on all cores; an hour
make mutants ONLY=claim          mutants whose description or file contains a text
make mutants SAMPLE=1            the first mutant of each table, as CI does

A mutant that no test notices survives. The run ends with 1 if one survives, if the text that a
mutant changes is gone, or if the tests fail without any change. Everything happens in copies of the
repository.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder of the tests' shared helpers

from support.mutants import TABLES, Mutant

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 180.0
"""A mutant whose tests hang also counts as noticed."""
PASSED = 0
"""The exit status of pytest."""


class Copy:
    """A copy of the repository that is changed and restored, by one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "repository"
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self._folder / name)
        self._path = folder / "path"
        self._path.mkdir()
        (self._path / "holdfast").symlink_to(self._folder)
        self._changes = 0

    def notices(self, mutant: Mutant) -> bool:
        """Return whether the tests of ``mutant`` fail with it. Raises ValueError if unclear."""
        if self.test(mutant.noticed_by) != PASSED:
            raise ValueError(f"without any change these tests do not pass: {mutant.noticed_by}")
        with self._changed(mutant):
            status = self.test(f"--once {mutant.noticed_by}")
        return status != PASSED

    def test(self, tests: str) -> int | None:
        """Return the exit status of pytest, or None if it had to be killed."""
        command = [
            str(Path(sys.executable).with_name("pytest")),
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *tests.split(),
        ]
        environment = os.environ | {"PYTHONPATH": str(self._path)}
        process = subprocess.Popen(
            command,
            cwd=self._folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    @contextmanager
    def _changed(self, mutant: Mutant) -> Iterator[None]:
        before = {c.file: (self._folder / c.file).read_text() for c in mutant.changes}
        try:
            for change in mutant.changes:
                self._write(change.file, change.applied(before[change.file]))
            yield
        finally:
            for name, source in before.items():
                self._write(name, source)

    def _write(self, name: str, source: str) -> None:
        file = self._folder / name
        file.write_text(source)
        # Python recognises stale compiled modules by whole seconds and the size of their source.
        self._changes += 1
        time_s = time.time() + 2 * self._changes
        os.utime(file, (time_s, time_s))


def main() -> int:
    """Return the exit status: 1 if a mutant survived."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="those whose description or file contains this text"
    )
    parser.add_argument("--sample", action="store_true", help="the first of each table")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="tests that run at a time"
    )
    given = parser.parse_args()
    tables = [table[:1] if given.sample else table for table in TABLES]
    chosen = [m for table in tables for m in table if given.only in _said(m)]
    if not chosen:
        print(f"no mutant has {given.only!r} in its description or file")
        return 1
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="holdfast-mutants-") as folder:
        problems = tried(chosen, Path(folder), given.jobs)
    print(f"{len(chosen)} mutants, {len(problems)} problems, {time.perf_counter() - began_s:.0f} s")
    for problem in problems:
        print(f"  {problem}")
    return 1 if problems else 0


def _said(mutant: Mutant) -> str:
    """Return the names of the changed files, and the description."""
    return f"{' '.join(change.file for change in mutant.changes)}: {mutant.says}"


def tried(mutants: Sequence[Mutant], folder: Path, jobs: int) -> list[str]:
    """Return the problems: mutants that survive, and outdated ones."""
    copies: SimpleQueue[Copy] = SimpleQueue()
    for number in range(jobs):
        copies.put(Copy(folder / str(number)))
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = pool.map(lambda mutant: _tried(mutant, copies), mutants)
        return [problem for problem in outcomes if problem is not None]


def _tried(mutant: Mutant, copies: SimpleQueue[Copy]) -> str | None:
    copy = copies.get()
    began_s = time.perf_counter()
    try:
        problem = (
            None if copy.notices(mutant) else f"survived: {_said(mutant)} ({mutant.noticed_by})"
        )
    except ValueError as error:
        problem = str(error)
    finally:
        copies.put(copy)
    print(
        f"{time.perf_counter() - began_s:5.1f} s  {'PROBLEM ' if problem else 'noticed '} {mutant.says}",
        flush=True,
    )
    return problem


if __name__ == "__main__":
    sys.exit(main())
