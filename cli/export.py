"""``holdfast export``: writes the tensors of a checkpoint for other programs."""

from __future__ import annotations

from dataclasses import asdict

from ..core.units import size_text
from ..storage.operations.conversion.export import ExportReport, Format, export
from ..storage.operations.reading.selection import rules_of
from .commands import print_json
from .progress import progress_bar
from .text import one_of, paint, printable

__all__ = ["run"]


def run(
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
        print("\n".join(_lines(report)))
    return 0


def _lines(report: ExportReport) -> list[str]:
    tied = [
        f"{printable(name)} is tied to {printable(first)}, whose bytes are written once"
        for name, first in report.tied.items()
    ]
    rate = report.nbytes / report.seconds / 1e9
    figures = f"{size_text(report.nbytes)}, {rate:.2f} GB/s"
    counts = f"{one_of(report.tensors, 'tensor')} in {one_of(len(report.files), 'file')}"
    return [*tied, f"{paint('exported', 'green')}: {printable(report.uri)}: {counts}, {figures}"]
