"""``holdfast import``: makes a checkpoint from files of other programs."""

from __future__ import annotations

from dataclasses import asdict

from ..core.units import size_text
from ..storage.operations.conversion.importing import ImportReport, import_
from ..storage.operations.reading.selection import rules_of
from .commands import print_json
from .progress import progress_bar
from .text import one_of, paint, printable

__all__ = ["run"]


def run(
    source: str,
    uri: str,
    *,
    only: list[str],
    skip: list[str],
    rename: list[str],
    step: int | None,
    overwrite: bool,
    json_output: bool,
) -> int:
    """Import, print a summary, and return 0."""
    rules = rules_of(rename)
    with progress_bar("import", lines=True) as progress:
        report = import_(
            source,
            uri,
            only=only,
            skip=skip,
            rename=rules,
            step=step,
            overwrite=overwrite,
            progress=progress,
        )
    if json_output:
        print_json(asdict(report))
    else:
        print(_line(report))
    return 0


def _line(report: ImportReport) -> str:
    rate = report.nbytes / report.seconds / 1e9
    counts = f"{one_of(report.tensors, 'tensor')} of {one_of(len(report.files), 'file')}"
    figures = f"{size_text(report.nbytes)}, {rate:.2f} GB/s"
    figures += _rest(report)
    return f"{paint('imported', 'green')}: {printable(report.uri)}: {counts}, {figures}"


def _rest(report: ImportReport) -> str:
    """Return a note on the bytes that an earlier import had already stored."""
    if not report.reused_nbytes:
        return ""
    return f", {size_text(report.reused_nbytes)} of it were there"
