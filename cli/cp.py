"""``holdfast cp``: copies a checkpoint, or a folder of them, to another storage.

``holdfast compact`` rewrites one in place.
"""

from __future__ import annotations

from dataclasses import asdict

from ..core.units import size_text
from ..storage.operations.maintenance.copy import CopiedCheckpoint, CopyReport, compact, copy
from .commands import complain, print_json
from .progress import progress_bar
from .text import one_of, paint, printable


def run(
    src: str,
    dst: str,
    *,
    recursive: bool,
    overwrite: bool,
    layout: int | None,
    base: str | None,
    json_output: bool,
) -> int:
    """Copy, and print the result. Return 0 if everything was copied, 1 if something is
    damaged."""
    try:
        with progress_bar("cp", lines=True) as progress:
            report = copy(
                src,
                dst,
                recursive=recursive,
                overwrite=overwrite,
                image_nbytes=layout,
                base=base,
                progress=progress,
            )
    except KeyboardInterrupt:
        complain(
            "the checkpoint being copied is not visible at the destination; the same command "
            "continues where it stopped"
        )
        raise
    return _print(report, json_output=json_output)


def run_compact(uri: str, *, json_output: bool) -> int:
    """Rewrite a checkpoint as a whole one, and print the result. Return 0."""
    with progress_bar("compact", lines=True) as progress:
        report = compact(uri, progress=progress)
    return _print(report, "compacted", json_output=json_output)


def _print(report: CopyReport, done: str = "copied", *, json_output: bool) -> int:
    if json_output:
        print_json(_document(report))
    else:
        print("\n".join(_line(c, report.uri, done) for c in report.checkpoints))
        if len(report.checkpoints) > 1:
            print(_summary(report))
    return int(not report.ok)


def _document(report: CopyReport) -> dict[str, object]:
    return {
        "source": report.source,
        "uri": report.uri,
        "ok": report.ok,
        "nbytes": report.nbytes,
        "sent_nbytes": report.sent_nbytes,
        "borrowed_nbytes": report.borrowed_nbytes,
        "seconds": report.seconds,
        "checkpoints": [asdict(c) for c in report.checkpoints],
    }


def _line(c: CopiedCheckpoint, uri: str, done: str) -> str:
    name = printable(c.path or uri)
    if c.problem is not None:
        return f"{paint('not copied', 'red')}: {name}: {printable(c.problem)}"
    if not c.sent_nbytes and not c.borrowed_nbytes and c.nbytes:
        return (
            f"{paint('there', 'green')}: {name}: {one_of(c.files, 'file')}, "
            f"{size_text(c.nbytes)}, nothing to send"
        )
    line = f"{paint(done, 'green')}: {name}: {one_of(c.files, 'file')}, {_figures(c)}"
    if c.why_whole:
        line += f"; more was sent than differs from the base: {printable(c.why_whole)}"
    return line


def _summary(report: CopyReport) -> str:
    count = len(report.checkpoints)
    copied = len(report.copied)
    if not copied:
        return f"none of {one_of(count, 'checkpoint')}"
    checkpoints = one_of(count, "checkpoint")
    if copied < count:
        checkpoints = f"{copied:,} of {checkpoints}"
    return f"{checkpoints}, {_figures(report)}"


def _figures(what: CopiedCheckpoint | CopyReport) -> str:
    """Return the size and the rate. The rate counts only the bytes that were sent."""
    before = what.nbytes - what.sent_nbytes - what.borrowed_nbytes
    size = size_text(what.nbytes)
    if before:
        size += f", {size_text(before)} of it were there"
    if what.borrowed_nbytes:
        size += f", {size_text(what.borrowed_nbytes)} of it borrowed there"
    return f"{size}, {what.sent_nbytes / what.seconds / 1e9:.2f} GB/s"
