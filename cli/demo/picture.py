"""One picture: the loss curve across the kill, with an uninterrupted run underneath."""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .record import Record

__all__ = ["draw"]

_BEFORE, _AFTER, _REFERENCE, _KILL, _INK = "#1f6f8b", "#e07a1f", "#c9d3d8", "#c1121f", "#33414a"
_STYLE = {
    "svg.hashsalt": "holdfast",  # the same picture is the same file
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


def draw(before: Record, after: Record, reference: Record, *, killed_at: int, victim: int, path: Path) -> list[Path]:
    """Draw it as SVG and as PNG; return both paths. ``path`` has no suffix."""
    with rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(8.4, 5.4), layout="constrained")
        curve, difference = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1.2))
        _draw_curves(curve, before, after, reference)
        _draw_kill(curve, before.losses[killed_at], killed_at, victim)
        _draw_checkpoints(curve, before, after, killed_at)
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
        marker = "o" if record is after else ""
        axes.plot(
            *zip(*sorted(record.losses.items()), strict=True), color=colour, linewidth=width, label=label,
            marker=marker, markersize=3, solid_capstyle="round",
        )  # fmt: skip
    axes.set_ylabel("loss per byte (nats)")
    axes.set_title("A rank is killed while it saves; the job goes on with fewer", loc="left", fontweight="bold")
    axes.margins(x=0.02)


def _draw_kill(axes: Axes, loss: float, step: int, victim: int) -> None:
    axes.plot(step, loss, "X", color=_KILL, markersize=11, markeredgecolor="white", zorder=5)
    axes.annotate(
        f"rank {victim}: SIGKILL\nwhile saving step {step}", (step, loss), (14, 38), textcoords="offset points",
        color=_KILL, arrowprops={"arrowstyle": "-", "color": _KILL, "shrinkB": 7},
    )  # fmt: skip


def _draw_checkpoints(axes: Axes, before: Record, after: Record, killed_at: int) -> None:
    """Along the lower edge: filled where one was committed, a cross where the kill left a torn one."""
    edge = axes.get_xaxis_transform()
    for record, colour in ((before, _BEFORE), (after, _AFTER)):
        steps = [saved.step for saved in record.saves]
        axes.plot(steps, [0.05] * len(steps), "o", color=colour, transform=edge, markersize=6, clip_on=False)
    axes.plot(killed_at, 0.11, "x", color=_KILL, transform=edge, markersize=7, markeredgewidth=2)
    axes.text(0.005, 0.05, "checkpoints", transform=axes.transAxes, va="center", fontsize=8.5)


def _draw_difference(axes: Axes, after: Record, reference: Record) -> None:
    steps = sorted(after.losses)
    axes.bar(steps, [abs(after.losses[s] - reference.losses[s]) for s in steps], color=_AFTER, width=0.6)
    axes.set_ylabel("|Δ loss|")
    axes.set_xlabel("step")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axes.set_ylim(bottom=0)
