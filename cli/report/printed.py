"""A report on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from ...storage.format.save_telemetry import SaveTelemetry
from ...storage.operations.reporting.findings import stragglers
from ...storage.operations.reporting.report_saves import RecordedSave
from ..tables import print_table
from ..text import paint, printable
from .against import Against, all_facts
from .rows import Table, history_table, operations_table, ranks_table, stages_table
from .words import recurring, words

__all__ = ["print_history", "print_save"]


def print_save(save: SaveTelemetry, against: Against | None) -> None:
    """Print one save: facts, stragglers, stages, ranks and operations."""
    said = all_facts(save, against)
    lines = [f"{paint(f'{name:<9}', 'dim')}{fact}" for name, fact in said.items()]
    print("\n".join(lines) + "\n")
    _print_stragglers(save)
    for table in (stages_table(save), ranks_table(save), operations_table(save)):
        _print(table)


def _print_stragglers(save: SaveTelemetry) -> None:
    found = stragglers(save)
    for slow in found:
        print(paint(printable(words(slow)), "red"))
    if not found and len(save.ranks) > 1:
        print("no rank stands out")
    if found or len(save.ranks) > 1:
        print()


def _print(table: Table) -> None:
    print_table(table.title, table.titles, table.rows, table.left)


def print_history(saves: Sequence[RecordedSave], against: Against | None) -> None:
    """Print a line for each save, and the ranks that cost the run the most time."""
    found = [stragglers(save.telemetry) if save.telemetry else [] for save in saves]
    _print(history_table(saves, found, against))
    recorded = sum(save.telemetry is not None for save in saves)
    for line in recurring(found, recorded):
        print(paint(line, "red"))
