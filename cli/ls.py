"""``holdfast ls``: lists the checkpoints at and below a URI."""

from __future__ import annotations

import time
from typing import Any

from ..core.units import size_text
from ..drivers.uri import Uri, join, parse
from ..storage.operations.foreign_formats import found_at
from ..storage.operations.location import Place
from ..storage.operations.maintenance.listing import ListedCheckpoint, list_checkpoints
from ..storage.runtime import engine
from .commands import complain, print_json
from .tables import columns
from .text import age_text, paint, printable, time_text

_TITLES = ("step", "saved", "age", "ranks", "tensors", "own", "total", "path")


def run(uri: str, *, last: int | None, json_output: bool) -> int:
    """Print the checkpoints, or the ``last`` of them. Return 0 if there are any, else 1."""
    root = parse(uri)
    found = list_checkpoints(uri, last=last)
    if json_output:
        print_json({"uri": root.redacted, "checkpoints": [_entry(c, root) for c in found]})
    elif found:
        rows = [_cells(c, time.time()) for c in found]
        print("\n".join(columns(_TITLES, rows, ("saved", "path"))))
    if not found:
        complain(f"no checkpoint at or below {root.redacted}{_instead(uri)}")
    return int(not found)


def _instead(uri: str) -> str:
    """Return a note on the other contents of the place, if they are known."""
    finding = engine.run(found_at(Place.of(uri, None)))
    if finding is None:
        return ""
    return f": {finding.what}. {finding.advice}"


def _entry(c: ListedCheckpoint, root: Uri) -> dict[str, Any]:
    uri = root
    if c.path:
        uri = join(root, *c.path.split("/"))
    figures = {
        "created_s": c.created_s,
        "saved": time_text(c.created_s),
        "world": c.world,
        "tensors": c.tensors,
        "nbytes": c.nbytes,
        "own_nbytes": c.own_nbytes,
        "stored_nbytes": c.stored_nbytes,
    }
    if c.problem is not None:  # unreadable: none of these are known
        figures = dict.fromkeys(figures)
    return {
        "path": c.path,
        "uri": uri.redacted,
        "step": c.step,
        **figures,
        "problem": c.problem,
        "abandoned": c.abandoned,
        "damage": c.damage,
        "is_version": c.is_version,
    }


def _cells(c: ListedCheckpoint, now_s: float) -> tuple[str, ...]:
    path = printable(c.path) or "."
    if c.problem is not None:
        return (*["-"] * 7, f"{path}  {paint(printable(c.problem), 'red')}")
    if c.is_version:
        path = f"{path}  {paint('version of weights', 'dim')}"
    if c.abandoned:
        path = f"{path}  {paint('abandoned', 'dim')}"
    if c.damage is not None:
        path = f"{path}  {paint(printable(c.damage), 'red')}"
    step = "-" if c.step is None else str(c.step)
    age = age_text(now_s - c.created_s)
    return (
        step,
        time_text(c.created_s),
        age,
        str(c.world),
        f"{c.tensors:,}",
        size_text(c.own_nbytes),
        size_text(c.stored_nbytes),
        path,
    )
