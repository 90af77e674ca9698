"""Draws the chart of the README: how long a durable save, a cold load and the stall of an
asynchronous save take, next to other libraries. Measures by ``holdfast bench``. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from .measured.plan import Plan
from .measured.result import READ_LIMIT, WRITE_LIMIT, Phase
from .measured.run import measured
from .program import GIB, TINY_GIB
from .report import LIMIT, OURS

PANELS = {
    "save": ("durable save", WRITE_LIMIT),
    "load": ("cold, verified load", READ_LIMIT),
    "async save": ("stall of an asynchronous save", ""),
}
"""Title of each panel, and the phase of its limit, by phase of ``holdfast bench``."""


def bars_of(verb: str, limit: str, phases: Sequence[Phase]) -> dict[str, float]:
    """Return the median seconds of a phase for each library, by name, from the limit to the last
    peer."""
    found: dict[str, float] = {}
    for phase in phases:
        own_verb, _, peer = phase.name.partition(": ")
        if phase.name == limit:
            found[LIMIT] = phase.median_s
        elif own_verb == verb:
            found[peer or OURS] = median(phase.stall_s) if phase.stall_s else phase.median_s
    return found


def draw(panels: Mapping[str, Mapping[str, float]], file: Path) -> None:
    """Draw bars next to each other to an SVG file."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    colours = {LIMIT: "tab:grey", OURS: "tab:green"}
    size = (2 + 5 * len(panels), 0.6 + 0.4 * max(map(len, panels.values())))
    # Keep text as text, and write the same file for the same figures.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "holdfast"}):
        figure, all_axes = plt.subplots(1, len(panels), figsize=size, layout="constrained")
        for axes, (title, bars) in zip(all_axes, panels.items(), strict=True):
            names = list(bars)[::-1]
            drawn = axes.barh(
                names,
                [bars[name] for name in names],
                color=[colours.get(name, "tab:blue") for name in names],
            )
            axes.bar_label(drawn, fmt="%.2f s", padding=3)
            axes.margins(x=0.15)
            axes.set_title(title, fontsize="medium")
            axes.set_xlabel("seconds, median; less is better")
        figure.savefig(file, metadata={"Date": None})
        plt.close(figure)


def main(arguments: Sequence[str]) -> int:
    """Measure, and draw. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m holdfast.bench.chart", description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state (default: 2)")
    parser.add_argument("--runs", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to write (default: here)")
    parser.add_argument("--out", type=Path, default=Path("peers.svg"), help="file to draw to")
    parser.add_argument("--tiny", action="store_true", help="a run of seconds, drawn to no file")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=given.dir) as folder:
        gib, runs = (TINY_GIB, 1) if given.tiny else (given.gib, given.runs)
        plan = Plan(Path(folder).resolve().as_uri(), int(gib * GIB), runs, peers="all")
        phases = measured(plan, print).phases
        panels = {title: bars_of(verb, limit, phases) for verb, (title, limit) in PANELS.items()}
        draw(panels, Path(folder) / "tiny.svg" if given.tiny else given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
