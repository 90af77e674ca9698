"""A report as an HTML page.

Scope: the content and its order. :mod:`..page` defines the look.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...core.units import size_text
from ...storage.format.save_telemetry import SaveTelemetry
from ...storage.operations.reporting.findings import Straggler, retries_of, stragglers
from ...storage.operations.reporting.report_saves import RecordedSave
from ..page.charts import curve, legend
from ..page.elements import Element, element, facts, listed, page, section, shown_table
from .pictures import COLOURS, bytes_by_rank, heat, ranks_over_time, write_latencies
from .rows import history_table, operations_table, ranks_table, stages_table
from .words import Against, all_facts, nbytes_of, recurring, words

_DETAILED = 10
"""Number of saves of a run to show in detail: the newest."""
_OF_BARS = (
    "A bar is pale where a stage was idle between its operations, and where a rank waited in a "
    "round."
)


def report_page(
    redacted: str, saves: Sequence[RecordedSave], against: Against | None = None
) -> str:
    """Return the page of one save, or of a run. At least one save has telemetry. ``against`` is the
    baseline of the rates."""
    known = [save.telemetry for save in saves if save.telemetry is not None]
    if len(saves) == 1:
        content = list(_of_save(known[0], against))
    else:
        content = [*_of_run(saves, against), *_one_by_one(known, against)]
    return page(
        f"Saves of {redacted}",
        element("h1", redacted),
        element("p", "Where its saves spent their time, from recorded telemetry.", class_="soft"),
        *content,
    )


def _of_run(saves: Sequence[RecordedSave], against: Against | None) -> Iterator[Element]:
    found = [stragglers(save.telemetry) if save.telemetry else [] for save in saves]
    known = [save.telemetry for save in saves if save.telemetry is not None]
    yield from _said(recurring(found, len(known)), nobody="No rank stands out in any save.")
    if len(known) > 1:
        yield from section("Over time", element("div", *_curves(known), class_="charts"))
    yield from shown_table(history_table(saves, found, against))


def _curves(known: Sequence[SaveTelemetry]) -> Iterator[Element]:
    """Draw figures of each save over its step, or over its number if steps are unknown. Omit
    figures that are always zero."""
    by_step = all(save.step is not None for save in known)
    figures = {
        "Duration of a save": ([save.seconds for save in known], "s"),
        "Bytes of all images": ([nbytes_of(save) / 1e9 for save in known], "GB"),
        "Wait of training for a lazy save, on the slowest rank": (
            [max((r.fenced_s for r in save.ranks.values()), default=0.0) for save in known],
            "s",
        ),
        "Retried requests": (
            [float(sum(map(retries_of, save.ranks.values()))) for save in known],
            "",
        ),
    }
    for title, (values, unit) in figures.items():
        if not any(values):
            continue
        points = [
            (
                float(save.step) if by_step and save.step is not None else float(number),
                value,
                f"step {save.step}: {value:.3g} {unit}",
            )
            for number, (save, value) in enumerate(zip(known, values, strict=True), 1)
        ]
        axis = "by step" if by_step else "by save"
        caption = element("figcaption", f"{title}, {axis}")
        yield element("figure", caption, curve(sorted(points), unit))


def _one_by_one(known: Sequence[SaveTelemetry], against: Against | None) -> Iterator[Element]:
    newest = sorted(known, key=lambda save: -save.created_s)[:_DETAILED]
    title = "Save by save"
    if len(newest) < len(known):
        title += f": the newest {len(newest)} of {len(known)}"
    yield element("h2", title)
    for number, save in enumerate(newest):
        said = all_facts(save, None)
        summary = element("summary", f"step {said['step']}, {said['saved']}: {said['took']}")
        details = element("details", summary, *_of_save(save, against))
        if number == 0:
            details.set("open", "open")
        yield details


def _of_save(save: SaveTelemetry, against: Against | None) -> Iterator[Element]:
    found = stragglers(save)
    yield facts(all_facts(save, against))
    if len(save.ranks) > 1:
        yield from _said([words(slow) for slow in found], nobody="No rank stands out.")
    yield from _pictures(save, found)
    for each in (stages_table(save), ranks_table(save), operations_table(save)):
        yield from shown_table(each)


def _pictures(save: SaveTelemetry, found: Sequence[Straggler]) -> Iterator[Element]:
    over_time, left_out = ranks_over_time(save, found)
    note = _OF_BARS
    if left_out:
        note += f" {left_out} ranks are not shown: only outliers and a sample of the others are."
    yield from section("Ranks over time", legend(COLOURS), over_time, note=note)
    yield from section(
        "Busy time of each rank in each stage",
        heat(save, found),
        note="Darker is longer; waiting has no colour. Outliers are framed.",
    )
    images = [record.nbytes for record in save.ranks.values()]
    if len(images) > 1 and any(images):
        balance = f"From {size_text(min(images))} to {size_text(max(images))}."
        yield from section("Bytes by rank", bytes_by_rank(save), note=balance)
    latencies = write_latencies(save)
    if latencies is not None:
        note = "Writes of all ranks, by the upper bound of their latency."
        yield from section("Latency of writes", latencies, note=note)


def _said(lines: Sequence[str], *, nobody: str) -> Iterator[Element]:
    """Yield the warnings as a list, or the text ``nobody`` if it is empty."""
    if not lines:
        yield element("p", nobody)
    yield from listed(lines)
