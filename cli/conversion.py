"""``holdfast export`` and ``holdfast import``: files of other programs."""

from __future__ import annotations

from dataclasses import asdict

from ..core.units import size_text
from ..storage.operations.conversion.export import ExportReport, Format, export
from ..storage.operations.conversion.importing import ImportReport, import_
from ..storage.operations.reading.selection import rules_of
from .commands import print_json
from .progress import progress_bar
from .text import one_of, paint, printable


def run_export(
    uri: str,
    dest: str,
    *,
    format: Format,
    dtype: str | None,
    only: list[str],
    rename: list[str],
    shard: int,
    overwrite: bool,
    json_output: bool,
) -> int:
    """Export, print a summary, and return 0."""
    rules = rules_of(rename)
    with progress_bar("export", lines=True) as progress:
        report = export(
            uri,
            dest,
            format=format,
            only=only,
            rename=rules,
            dtype=dtype,
            file_nbytes=shard,
            overwrite=overwrite,
            progress=progress,
        )
    if json_output:
        print_json(asdict(report))
    else:
        print("\n".join(_exported(report)))
    return 0


def _exported(report: ExportReport) -> list[str]:
    tied = [
        f"{printable(name)} is tied to {printable(first)}, whose bytes are written once"
        for name, first in report.tied.items()
    ]
    return [*tied, f"{paint('exported', 'green')}: {_figures(report, 'in')}"]


def _figures(report: ExportReport | ImportReport, of: str) -> str:
    rate = report.nbytes / report.seconds / 1e9
    counts = f"{one_of(report.tensors, 'tensor')} {of} {one_of(len(report.files), 'file')}"
    return f"{printable(report.uri)}: {counts}, {size_text(report.nbytes)}, {rate:.2f} GB/s"


def run_import(
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
        print(_imported(report))
    return 0


def _imported(report: ImportReport) -> str:
    """Return a line; bytes that an earlier import had stored are mentioned."""
    line = f"{paint('imported', 'green')}: {_figures(report, 'of')}"
    if report.reused_nbytes:
        line += f", {size_text(report.reused_nbytes)} of it were there"
    return line
