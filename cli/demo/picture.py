"""The picture of the demo: the loss curve across the kill, over that of an uninterrupted run."""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .record import Record

__all__ = ["draw"]

_BEFORE = "#1f6f8b"
_AFTER = "#e07a1f"
_REFERENCE = "#c9d3d8"
_KILL = "#c1121f"
_INK = "#33414a"
_STYLE = {
    "svg.hashsalt": "holdfast",  # the same picture gives the same file
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(
    before: Record, after: Record, reference: Record, *, killed_at: int, victim: int, path: Path
) -> list[Path]:
    """Draw the picture as SVG and PNG, and return both paths. ``path`` has no suffix."""
    with rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(8.4, 6.2), layout="constrained")
        curve, checkpoints, difference = figure.subplots(
            3, 1, sharex=True, height_ratios=(6, 0.9, 1.2)
        )
        _draw_curves(curve, before, after, reference)
        _draw_kill(curve, before.losses[killed_at], killed_at, victim)
        _draw_checkpoints(checkpoints, before, after, killed_at)
        _draw_difference(difference, after, reference)
        curve.legend(loc="upper right", frameon=False)
        written = [path.with_suffix(suffix) for suffix in (".svg", ".png")]
        figure.savefig(written[0], metadata={"Date": None})
        figure.savefig(written[1], dpi=160)
    return written


def _draw_curves(axes: Axes, before: Record, after: Record, reference: Record) -> None:
    for record, colour, width, label in (
        (reference, _REFERENCE, 7.0, f"{reference.ranks} ranks, never interrupted"),
        (before, _BEFORE, 2.2, f"{before.ranks} ranks, until one was killed"),
        (after, _AFTER, 1.6, f"{after.ranks} ranks, resumed from step {min(after.losses) - 1}"),
    ):
        marker = ""
        if record is after:
            marker = "o"
        axes.plot(
            *zip(*sorted(record.losses.items()), strict=True),
            color=colour,
            linewidth=width,
            label=label,
            marker=marker,
            markersize=3,
            solid_capstyle="round",
        )
    axes.set_ylabel("loss per byte (nats)")
    axes.set_title(
        "A rank is killed during a save; the job resumes with fewer", loc="left", fontweight="bold"
    )
    axes.margins(x=0.02)


def _draw_kill(axes: Axes, loss: float, step: int, victim: int) -> None:
    axes.plot(step, loss, "X", color=_KILL, markersize=11, markeredgecolor="white", zorder=5)
    axes.annotate(
        f"rank {victim}: SIGKILL\nwhile saving step {step}",
        (step, loss),
        (14, 38),
        textcoords="offset points",
        color=_KILL,
        arrowprops={"arrowstyle": "-", "color": _KILL, "shrinkB": 7},
    )


def _draw_checkpoints(axes: Axes, before: Record, after: Record, killed_at: int) -> None:
    """Draw a row of checkpoints: a dot for each commit, a cross for the torn one."""
    for height, record, colour in ((1, before, _BEFORE), (0, after, _AFTER)):
        axes.plot(
            [saved.step for saved in record.saves],
            [height] * len(record.saves),
            "o",
            color=colour,
            markersize=7,
        )
    axes.plot(killed_at, 1, "x", color=_KILL, markersize=8, markeredgewidth=2.2)
    axes.set_ylim(-0.7, 1.7)
    axes.set_yticks([1, 0], [f"{r.ranks} ranks" for r in (before, after)], fontsize=8.5)
    axes.set_title("checkpoints: committed ●   torn ×", loc="left", fontsize=9.5)
    axes.grid(axis="y", color=_REFERENCE, linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_difference(axes: Axes, after: Record, reference: Record) -> None:
    steps = sorted(after.losses)
    axes.bar(
        steps, [abs(after.losses[s] - reference.losses[s]) for s in steps], color=_AFTER, width=0.6
    )
    axes.set_title(
        "difference in loss from the run that was never interrupted", loc="left", fontsize=9.5
    )
    axes.set_xlabel("step")
    axes.yaxis.set_major_formatter(lambda x, _: f"{x:.0e}" if x else "0")
    axes.yaxis.set_major_locator(MaxNLocator(2))
    axes.set_ylim(bottom=0)
