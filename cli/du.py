"""``holdfast du``: shows the space of checkpoints that share files."""

from __future__ import annotations

from dataclasses import asdict

from ..core.units import size_text
from ..storage.operations.maintenance.space import FileGroup, space
from .commands import complain, print_json
from .tables import NONE, columns
from .text import printable, some

_TITLES = ("written by", "files", "space", "live", "held by")


def run(uri: str, *, json_output: bool) -> int:
    """Print the space of each group of files. Return 0 if there are any, else 1."""
    report = space(uri)
    if json_output:
        print_json({**asdict(report), "nbytes": report.nbytes})
    elif report.groups:
        rows = [*map(_cells, report.groups)]
        rows.append(("other files", NONE, size_text(report.other_nbytes), NONE, ""))
        rows.append(("all", NONE, size_text(report.nbytes), NONE, ""))
        print("\n".join(columns(_TITLES, rows, ("written by", "held by"))))
    if not report.groups:
        complain(f"no checkpoint at or below {report.uri}")
    return int(not report.groups)


def _cells(group: FileGroup) -> tuple[str, ...]:
    live = group.live_nbytes / max(1, group.nbytes)
    return (
        printable(group.path or ".") if group.path is not None else group.attempt,
        f"{group.files:,}",
        size_text(group.nbytes),
        f"{live:.0%}",
        some([printable(path or ".") for path in group.held_by]),
    )
