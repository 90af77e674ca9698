"""The command line that all benchmark programs share."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GIB", "TINY_GIB", "Options", "bare_parser", "options", "parse", "parser", "work_folder"]

GIB = 1 << 30
TINY_GIB = 1 / 64


@dataclass(frozen=True)
class Options:
    """Settings of a program."""

    tiny: bool
    """Run for seconds, not minutes, with a small state and one run: checks results, not speed."""
    folder: Path
    """Folder to write to. Everything written is removed."""
    runs: int
    gib: float
    alone: bool
    """True to omit the peers."""
    json: Path | None
    svg: Path | None

    @property
    def settle_s(self) -> float:
        """Rest of the storage between two runs, in seconds."""
        if self.tiny:
            return 0.0
        return 1.0

    def arguments(self, folder: Path) -> list[str]:
        """Return the same options for a worker that writes to ``folder``."""
        if self.tiny:
            size = ["--tiny"]
        else:
            size = ["--gib", str(self.gib), "--runs", str(self.runs)]
        out = ["--dir", str(folder), *size]
        if self.alone:
            out.append("--alone")
        return out


def bare_parser(prog: str, doc: str | None, *, tiny: str) -> argparse.ArgumentParser:
    """Return a parser of the options that fit any program. ``tiny`` is the help of that option."""
    out = argparse.ArgumentParser(
        prog=f"python -m holdfast.bench.{prog}", description=(doc or "").split("\n\n")[0]
    )
    out.add_argument("--tiny", action="store_true", help=tiny)
    out.add_argument(
        "--dir",
        type=Path,
        default=Path(),
        help="where to write; removed afterwards (default: here)",
    )
    out.add_argument("--json", type=Path, help="also write all figures to this file")
    out.add_argument("--svg", type=Path, help="also draw them (needs matplotlib)")
    return out


def parser(
    prog: str, doc: str | None, *, gib: float = 5.0, runs: int = 5
) -> argparse.ArgumentParser:
    """Return a parser of the options of every contest, with the program's defaults for ``--gib``
    and ``--runs``."""
    out = bare_parser(prog, doc, tiny="a run of seconds that checks results, not speed")
    out.add_argument(
        "--runs", type=int, default=runs, help=f"rounds; medians are reported (default: {runs})"
    )
    out.add_argument("--gib", type=float, default=gib, help=f"size of the state (default: {gib:g})")
    out.add_argument("--alone", action="store_true", help="without the peers")
    return out


def options(given: argparse.Namespace) -> Options:
    """Return the shared options from the result of :func:`parser`."""
    tiny: bool = given.tiny
    if tiny:
        runs = 1
        gib = TINY_GIB
    else:
        runs = given.runs
        gib = given.gib
    return Options(
        tiny,
        given.dir,
        runs,
        gib,
        given.alone,
        given.json,
        given.svg,
    )


def parse(
    prog: str, doc: str | None, argv: Sequence[str] | None, *, gib: float = 5.0, runs: int = 5
) -> Options:
    """Return the options of a program that has none of its own."""
    return options(parser(prog, doc, gib=gib, runs=runs).parse_args(argv))


@contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    """Make a new folder in ``parent``, and remove it with its contents at the end."""
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=parent) as folder:
        yield Path(folder).resolve()
