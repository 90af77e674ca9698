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
    """What a program was asked for."""

    tiny: bool
    """Seconds, not minutes: a small state and one run; says whether results are right, not how fast
    they come."""
    folder: Path
    """Where to write; everything that is written is removed."""
    runs: int
    gib: float
    alone: bool
    """Without the peers."""
    json: Path | None
    svg: Path | None

    @property
    def settle_s(self) -> float:
        """How long to let the storage rest between two runs, in seconds."""
        if self.tiny:
            return 0.0
        return 1.0

    def arguments(self, folder: Path) -> list[str]:
        """The same options for a worker that writes to ``folder``."""
        if self.tiny:
            size = ["--tiny"]
        else:
            size = ["--gib", str(self.gib), "--runs", str(self.runs)]
        out = ["--dir", str(folder), *size]
        if self.alone:
            out.append("--alone")
        return out


def bare_parser(prog: str, doc: str | None, *, tiny: str) -> argparse.ArgumentParser:
    """The options that do not ask what is measured; ``tiny`` is the help for that one."""
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
    """The options of every contest; the default for ``--gib`` and ``--runs`` is the program's
    own."""
    out = bare_parser(prog, doc, tiny="a run of seconds that checks results, not speed")
    out.add_argument(
        "--runs", type=int, default=runs, help=f"rounds; medians are reported (default: {runs})"
    )
    out.add_argument("--gib", type=float, default=gib, help=f"size of the state (default: {gib:g})")
    out.add_argument("--alone", action="store_true", help="without the peers")
    return out


def options(given: argparse.Namespace) -> Options:
    """The shared options, out of what :func:`parser` has parsed."""
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
    """The options of a program that has none of its own."""
    return options(parser(prog, doc, gib=gib, runs=runs).parse_args(argv))


@contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    """A new folder in ``parent``, removed at the end with all that is in it."""
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=parent) as folder:
        yield Path(folder).resolve()
