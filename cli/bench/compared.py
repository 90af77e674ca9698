"""``holdfast bench compare``: compares two results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import UsageError
from ..commands import complain
from .driver_command import DRIVER_WORKLOADS
from .results import read_result

if TYPE_CHECKING:
    from ...bench.measured.result import Measurement

__all__ = ["COMPARE", "run_comparison"]

COMPARE = "compare"


def run_comparison(files: Sequence[str], slower: str, *, json_output: bool) -> int:
    """Compare two results and print the comparison. Return 1 if the second is slower by more than
    ``slower``."""
    from ...bench.measured.comparison import compare
    from .tables import print_comparison, print_comparison_json

    if len(files) != 2:
        raise UsageError(
            f"{COMPARE} takes two results, not {len(files)}",
            advice=f"holdfast bench {COMPARE} A.json B.json",
        )
    part = _part(slower)
    a, b = _results(files)
    found = compare(a, b)
    for path, measurement in zip(files, (a, b), strict=True):
        if measurement.invalid:
            complain(f"{path} is marked as invalid: do not rely on its figures")
    if a.config_hash != b.config_hash:
        complain("the two results differ in storage or settings")
    if json_output:
        print_comparison_json(found, part)
    else:
        print_comparison(found, part)
    return int(any(each.is_slower(part) for each in found))


def _results(files: Sequence[str]) -> tuple[Measurement, Measurement]:
    from ...bench.alone import result as driver_result
    from ...bench.measured.result import decoded

    texts = list(map(read_result, files))
    of_a, of_b = map(driver_result.workload_of, texts)
    if of_a != of_b:
        raise UsageError(
            f"{files[0]} measures {of_a or 'checkpoints'}, {files[1]} measures "
            f"{of_b or 'checkpoints'}",
            advice="Only results of the same workload can be compared.",
        )

    def decode(text: str, path: str) -> Measurement:
        if of_a in DRIVER_WORKLOADS:
            return driver_result.decoded(text, path).as_measurement()
        return decoded(text, path)

    a, b = map(decode, texts, files)
    return a, b


def _part(text: str) -> float:
    try:
        part = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        part = -1.0
    if not 0 <= part < 1:
        raise UsageError(f"--slower {text!r} is not a share", advice="Give one such as 5%.")
    return part
