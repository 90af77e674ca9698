"""``holdfast diff``: compares the states in two checkpoints."""

from __future__ import annotations

import math
from dataclasses import asdict

from ..core.units import size_text
from ..storage.format.tree import ByRank
from ..storage.operations.reading.diff import (
    DiffReport,
    TensorDifference,
    TensorKind,
    ValueDifference,
    diff,
)
from .commands import print_json
from .progress import progress_bar
from .text import is_terminal, one_of, paint, printable, ranks_text, shape_text
from .valued import by_rank_text


def run(a: str, b: str, *, json_output: bool) -> int:
    """Compare, and print the differences. Return 0 if the checkpoints are equal, else 1."""
    with progress_bar("diff") as progress:
        report = diff(a, b, progress=progress)
    if json_output:
        print_json(_document(report))
    else:
        print("\n".join([*_lines(report), _summary(report)]))
    return int(not report.equal)


def _document(report: DiffReport) -> dict[str, object]:
    tensors = [asdict(t) | {"max_abs": _json_number(t.max_abs)} for t in report.tensors]
    return {
        "a": report.a,
        "b": report.b,
        "equal": report.equal,
        "tensors": tensors,
        "values": [
            {"path": v.path, "a": _json_value(v.a), "b": _json_value(v.b)} for v in report.values
        ],
        "equal_tensors": report.equal_tensors,
        "equal_by_digest": report.equal_by_digest,
        "read_nbytes": report.read_nbytes,
        "seconds": report.seconds,
    }


def _json_number(number: float | None) -> object:
    """Return a number as JSON allows it: NaN and infinities become strings."""
    if number is None or math.isfinite(number):
        return number
    return repr(number)


def _json_value(value: ByRank | None) -> object:
    if value is None:
        return None
    return [{"ranks": ranks, "value": encoded} for ranks, encoded in value]


def _lines(report: DiffReport) -> list[str]:
    """Return a line for each difference: kind, name and details. On a terminal they are aligned."""
    rows = [("value", printable(v.path), _value_text(v)) for v in report.values]
    rows += [(t.what, _name(t), _tensor_text(t)) for t in report.tensors]
    if not is_terminal():
        return ["  ".join(row) for row in rows]
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:2]]
    return [
        f"{paint(what.ljust(widths[0]), 'red')}  {name.ljust(widths[1])}  {text}"
        for what, name, text in rows
    ]


def _name(tensor: TensorDifference) -> str:
    if tensor.rank is None:
        return printable(tensor.name)
    return f"{printable(tensor.name)} of {ranks_text([tensor.rank])}"


def _value_text(value: ValueDifference) -> str:
    sides = ["nothing" if side is None else by_rank_text(side) for side in (value.a, value.b)]
    return " | ".join(sides)


def _tensor_text(tensor: TensorDifference) -> str:
    sides = [_kind_text(kind) for kind in (tensor.a, tensor.b) if kind is not None]
    if tensor.differing is None:
        return " | ".join(sides)
    count = math.prod(tensor.a.shape) if tensor.a else 0
    text = f"{sides[0]}  {tensor.differing:,} of {one_of(count, 'element')}"
    if tensor.max_abs is not None:
        text += f", by up to {tensor.max_abs:.6g}"
    return text


def _kind_text(kind: TensorKind) -> str:
    return f"{printable(kind.dtype)} {shape_text(kind.shape)}"


def _summary(report: DiffReport) -> str:
    if report.equal:
        verdict = paint("equal", "green")
        counts = one_of(report.equal_tensors, "tensor")
    else:
        verdict = paint("different", "red")
        counts = (
            f"{one_of(len(report.tensors), 'tensor')} and {one_of(len(report.values), 'value')}; "
            f"{one_of(report.equal_tensors, 'tensor')} equal"
        )
    return f"{verdict}: {counts}; {size_text(report.read_nbytes)} of each side read"
