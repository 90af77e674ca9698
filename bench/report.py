"""Results of a benchmark: series of times as text or JSON, and their ratios."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

LIMIT = "limit"
OURS = "holdfast"
RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass
class Series:
    """Figures of one contestant, per round: seconds and, where known, extra peak memory in bytes
    and processor time in seconds."""

    name: str
    seconds: list[float] = field(default_factory=list)
    peak_nbytes: list[int] = field(default_factory=list)
    own_processor_s: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def peak(self) -> int | None:
        """Highest peak. Memory that the first run keeps for later ones must count once."""
        return max(self.peak_nbytes, default=None)


@dataclass
class Report:
    """Result of one program. ``rows`` are its table, and ``series`` the figures behind them."""

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    machine: dict[str, str] = field(default_factory=dict)
    program: str = ""

    def text(self) -> str:
        """Return the report for a terminal."""
        machine = ", ".join(f"{key}: {value}" for key, value in self.machine.items())
        lines = [
            self.title,
            machine,
            "",
            *_aligned([self.header, *self.rows]),
            "",
            *self.notes,
        ]
        return "\n".join(lines)

    def emit(self, json_file: Path | None) -> None:
        """Print the report, and write the figures to the given file."""
        print(self.text(), flush=True)
        if json_file is not None:
            json_file.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False))


def median_ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Return the time of ``of`` in units of ``to``: the median over rounds, which share their
    conditions. Rounds that only one of them has are ignored."""
    return median(a / b for a, b in zip(of, to, strict=False))


def of_medians(of: Sequence[float], to: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of two medians, from independent rounds, and the bounds of its 95 %
    confidence interval, by the percentile bootstrap (Efron 1979). Resampling is seeded, so the same
    times give the same interval."""
    random = np.random.default_rng(0)
    drawn = _drawn_medians(np.asarray(of), random) / _drawn_medians(np.asarray(to), random)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    return median(of) / median(to), low, high


def _drawn_medians(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    drawn = random.choice(values, (RESAMPLES, len(values)))
    medians: np.ndarray = np.median(drawn, axis=1)
    return medians


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as aligned lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
