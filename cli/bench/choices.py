"""The values that arguments of ``holdfast bench`` choose: a workload, a plan, a size, a result.

``asked`` maps the names of arguments to their parsed values, None for those not given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ...core.units import parse_duration, parse_size
from ...errors import UsageError
from .arguments import DEFAULT_SIZE

if TYPE_CHECKING:
    from ...bench.measured.plan import Plan
    from ...bench.measured.result import Measurement
    from ...bench.workloads.spec import Workload


DEFAULT_RUNS = 5
_KINDS = ("workload", "model", "index", "size")
"""Mutually exclusive arguments."""

T = TypeVar("T")


@dataclass(frozen=True)
class Output:
    """Destinations of a result: a file, and whether stdout gets JSON instead of tables."""

    html: str | None
    json: bool


def plan_of(uri: str, asked: Mapping[str, Any], ranks: int) -> Plan:
    """Return the plan of a measurement of checkpoints with ``ranks`` ranks. Raises UsageError."""
    from ...bench.measured.plan import Plan
    from ...bench.workloads.mlperf import ROUNDS, Mlperf
    from ...bench.workloads.spec import parse_content

    workload = chosen_workload(asked)
    nbytes = getattr(workload, "wanted_nbytes", None)
    if nbytes is None:
        nbytes = sum(workload.nbytes(rank, ranks) for rank in range(ranks))
    limit = asked["time_limit"]
    return Plan(
        uri=uri,
        nbytes=nbytes,
        runs=ROUNDS if isinstance(workload, Mlperf) and asked["runs"] is None else runs_of(asked),
        workload=workload,
        content=parse_content(asked["entropy"]),
        warm_ups=asked["warm_ups"],
        limit_s=None if limit is None else duration_of("--time-limit", limit),
        compression=asked["compression"],
        peers=asked["peer"],
        driver_alone=asked["driver_alone"],
    )


def chosen_workload(asked: Mapping[str, Any]) -> Workload:
    """Return the workload to save: ``DEFAULT_SIZE`` of tensors unless arguments choose another.

    Raises UsageError for an invalid value or combination, and the errors of reading an index.
    """
    given = [f"--{name}" for name in _KINDS if asked[name] is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", advice="Give one of them.")
    for name in ("optimizer", "layers"):
        if asked[name] is not None and asked["model"] is None:
            raise UsageError(f"--{name} needs --model", advice="Give --model llama3-8b.")
    if asked["tensors"] is not None and given not in ([], ["--size"]):
        raise UsageError(f"--tensors goes with --size, not with {given[0]}")
    if asked["workload"] is not None:
        from ...bench.workloads.mlperf import mlperf

        return mlperf(asked["workload"])
    if asked["model"] is not None:
        from ...bench.workloads.llama3 import llama3

        return llama3(asked["model"], asked["optimizer"] or "none", asked["layers"])
    if asked["index"] is not None:
        from ...bench.workloads.index import indexed

        return indexed(asked["index"])

    from ...bench.workloads.sized import equal_tensors, sized

    nbytes = size_of("--size", asked["size"] or DEFAULT_SIZE)
    return sized(nbytes) if asked["tensors"] is None else equal_tensors(nbytes, asked["tensors"])


def list_of(argument: str, text: str | None, parse: Callable[[str, str], int]) -> list[int] | None:
    """Return the parsed values of a comma-separated list; None for no list."""
    if text is None:
        return None
    return [parse(argument, each.strip()) for each in text.split(",")]


def runs_of(asked: Mapping[str, Any]) -> int:
    """Return the number of rounds."""
    return DEFAULT_RUNS if asked["runs"] is None else int(asked["runs"])


def size_of(argument: str, text: str) -> int:
    """Parse a size and return it in bytes. Raises UsageError, which names ``argument``."""
    return _parsed(argument, text, parse_size, "size", "4MiB")


def duration_of(argument: str, text: str, *, needs_unit: bool = True) -> float:
    """Parse a duration and return it in seconds. Raises UsageError, which names ``argument``."""
    parse = partial(parse_duration, needs_unit=needs_unit)
    return _parsed(argument, text, parse, "duration", "90s")


def number_of(argument: str, text: str) -> int:
    """Parse a number. Raises UsageError, which names ``argument``."""
    return _parsed(argument, text, int, "number", "8")


def _parsed(argument: str, text: str, parse: Callable[[str], T], what: str, example: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(
            f"{argument} {text!r} is not a {what}: {error}", advice=f"Give one such as {example}."
        ) from error


def read_measurement(path: str) -> Measurement:
    """Return the result in a file. Raises UsageError if it cannot be read, or holds none."""
    from ...bench.measured.result import decoded

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    return decoded(text, path)
