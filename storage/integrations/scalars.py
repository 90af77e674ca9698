"""Figures of saves as scalars, for TensorBoard, Weights & Biases and others.

from holdfast.storage.integrations.scalars import log_scalars

log_scalars(writer.add_scalar)  # of a TensorBoard SummaryWriter
log_scalars(lambda name, value, step: run.log({name: value}, step=step))  # of a W&B run
"""

from __future__ import annotations

from collections.abc import Callable

from ..operations.report import SaveReport
from ..operations.telemetry import Outcome, listen

__all__ = ["log_scalars"]


def log_scalars(log: Callable[[str, float, int], object]) -> Callable[[], None]:
    """Call ``log(name, value, step)`` for each figure of each committed save that has a step.

    Returns a function that stops this. Names begin with ``holdfast/``. ``log`` is called on the
    engine's thread, concurrently with training, and must be safe for that.
    """

    def listener(outcome: Outcome) -> None:
        report = outcome.report
        if outcome.step is None or not isinstance(report, SaveReport):
            return
        if outcome.operation != "save":  # versions of weights are numbered on their own
            return
        for name, value in _figures(report).items():
            log(f"holdfast/{name}", value, outcome.step)

    return listen(listener)


def _figures(report: SaveReport) -> dict[str, float]:
    figures = {
        "save_seconds": report.durable_s,
        "captured_seconds": report.captured_s,
        "fenced_seconds": report.fenced_s,
        "gigabytes": report.stored_nbytes / 1e9,
        "borrowed_gigabytes": report.borrowed_nbytes / 1e9,
        "retries": float(sum(s.retries + s.hedges for s in report.stages.values())),
    }
    for name, stage in report.stages.items():
        figures[f"stage_seconds/{name}"] = stage.busy_s
    return figures
