"""The picture of the demo: the loss curve across the kill, over that of an uninterrupted run."""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from .journal import Record

_KILL = "#c1121f"
_STYLE = {
    "svg.hashsalt": "holdfast",  # the same picture gives the same file
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(
    before: Record, after: Record, reference: Record, *, killed_at: int, victim: int, file: Path
) -> None:
    """Draw the picture as an SVG file. Dots are committed checkpoints, the cross is the torn
    one."""
    with rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(8.4, 5), layout="constrained")
        axes = figure.subplots()
        for record, colour, width, label in (
            (reference, "#c9d3d8", 7.0, f"{reference.ranks} ranks, never interrupted"),
            (before, "#1f6f8b", 2.2, f"{before.ranks} ranks, until one was killed"),
            (after, "#e07a1f", 1.6, f"{after.ranks} ranks, resumed from step {after.first - 1}"),
        ):
            steps = sorted(record.losses)
            axes.plot(
                steps,
                [record.losses[step] for step in steps],
                color=colour,
                linewidth=width,
                label=label,
                marker="o",
                markevery=[steps.index(saved.step) for saved in record.saves],
            )
        loss = before.losses[killed_at]
        axes.plot(killed_at, loss, "X", color=_KILL, markersize=11, zorder=5)
        axes.annotate(
            f"rank {victim}: SIGKILL\nwhile saving step {killed_at}",
            (killed_at, loss),
            (14, 38),
            textcoords="offset points",
            color=_KILL,
            arrowprops={"arrowstyle": "-", "color": _KILL, "shrinkB": 7},
        )
        axes.set_title("A rank is killed during a save; the job resumes with fewer", loc="left")
        axes.set_xlabel("step")
        axes.set_ylabel("loss per byte (nats)")
        axes.legend(loc="upper right", frameon=False)
        figure.savefig(file, metadata={"Date": None})
