"""``holdfast prune``: deletes old checkpoints and the leftovers of dead saves."""

from __future__ import annotations

import sys
from dataclasses import asdict

from ..core.units import size_text
from ..errors import UsageError
from ..storage.operations.maintenance.prune import PruneReport, prune
from .commands import complain, print_json
from .text import one_of, paint, printable, some


def run(
    uri: str,
    *,
    keep_last: int | None,
    keep_every: int | None,
    abandoned: bool,
    verify: bool,
    idle_hours: float,
    dry_run: bool,
    yes: bool,
    json_output: bool,
) -> int:
    """Print what would be deleted, ask, and delete it. Return 1 if the user declines, or if
    anything could not be read or deleted, else 0."""
    refused = False

    def confirm(plan: PruneReport) -> bool:
        nonlocal refused
        if not json_output:
            _print_plan(plan)
        refused = not (yes or _is_nothing(plan) or _ask(plan))
        return not refused

    report = prune(
        uri,
        keep_last=keep_last,
        keep_every=keep_every,
        abandoned=abandoned,
        verify=verify,
        idle_s=idle_hours * 3600,
        dry_run=dry_run,
        confirm=confirm,
    )
    if json_output:
        print_json({**asdict(report), "nbytes": report.nbytes})
    elif dry_run:
        _print_plan(report)
        if not _is_nothing(report):
            print(f"all: {_sum(report)}")
        print("dry run: nothing was deleted")
    elif refused:
        print("nothing was deleted")
    elif not _is_nothing(report):
        print(f"{paint('deleted', 'green')}: {_sum(report)}")
    return int(refused or bool(report.failed))


def _ask(plan: PruneReport) -> bool:
    """Ask the user for consent. Raises UsageError if there is no terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            "nothing was deleted: there is no terminal to ask",
            advice="Give --yes or --dry-run.",
        )
    print(f"Delete {_sum(plan)}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _is_nothing(report: PruneReport) -> bool:
    return not (report.checkpoints or report.leftovers)


def _print_plan(plan: PruneReport) -> None:
    for c in plan.checkpoints:
        notes = []
        if c.abandoned:
            notes.append("abandoned")
        if c.damage is not None:
            notes.append(f"damaged: {printable(c.damage)}")
        print("  ".join([f"step {c.step}  {size_text(c.nbytes)}  {printable(c.path)}", *notes]))
    for x in plan.leftovers:
        print(f"unfinished  {size_text(x.nbytes)}  {printable(x.path) or '.'}  attempt {x.attempt}")
    for path, damage in sorted(plan.damaged.items()):
        complain(f"damaged, and kept: {printable(path) or '.'}: {printable(damage)}")
    for path in plan.channels:
        complain(f"{printable(path) or '.'} is a weight channel, whose publisher deletes versions")
    if _is_nothing(plan):
        complain(f"nothing to delete; {one_of(len(plan.kept), 'checkpoint')} kept")


def _sum(report: PruneReport) -> str:
    parts = [(len(report.checkpoints), "checkpoint"), (len(report.leftovers), "unfinished attempt")]
    text = " and ".join(one_of(n, noun) for n, noun in parts if n)
    text += f", {size_text(report.nbytes)}"
    if report.shared.nbytes:
        paths = some([printable(path or ".") for path in report.shared.paths])
        text += f" become free; {size_text(report.shared.nbytes)} stay, shared with {paths}"
    return text
