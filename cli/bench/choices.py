"""The values that arguments of ``holdfast bench`` choose: a workload, a plan, a size, a result.

``asked`` maps the names of arguments to their parsed values, None for those not given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...core.units import GIB
from ...errors import UsageError

if TYPE_CHECKING:
    from ...bench.measured.plan import Plan
    from ...bench.measured.result import Measurement
    from ...bench.workloads.spec import Workload


DEFAULT_RUNS = 5
_KINDS = ("workload", "model", "index", "size")
"""Mutually exclusive arguments."""


def plan_of(uri: str, asked: Mapping[str, Any], ranks: int) -> Plan:
    """Return the plan of a measurement of checkpoints with ``ranks`` ranks. Raises UsageError."""
    from ...bench.measured.plan import Plan
    from ...bench.workloads.changes import CHANGES
    from ...bench.workloads.mlperf import ROUNDS, Mlperf
    from ...bench.workloads.spec import parse_content

    workload = chosen_workload(asked)
    nbytes = getattr(workload, "wanted_nbytes", None)
    if nbytes is None:
        nbytes = sum(workload.nbytes(rank, ranks) for rank in range(ranks))
    return Plan(
        uri=uri,
        nbytes=nbytes,
        runs=ROUNDS if isinstance(workload, Mlperf) and asked["runs"] is None else runs_of(asked),
        workload=workload,
        content=parse_content(asked["entropy"]),
        limit_s=asked["time_limit"],
        compression=asked["compression"],
        peers=asked["peer"],
        driver_alone=asked["driver_alone"],
        change=asked["workload"] if asked["workload"] in CHANGES else None,
    )


def chosen_workload(asked: Mapping[str, Any]) -> Workload:
    """Return the workload to save: 1 GiB of tensors unless arguments choose another.

    Raises UsageError for an invalid value or combination, and the errors of reading an index.
    """
    from ...bench.workloads.changes import CHANGES

    changes = asked["workload"] in CHANGES  # of a state of any kind
    kinds = _KINDS[1:] if changes else _KINDS
    given = [f"--{name}" for name in kinds if asked[name] is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", advice="Give one of them.")
    for name in ("optimizer", "layers"):
        if asked[name] is not None and asked["model"] is None:
            raise UsageError(f"--{name} needs --model", advice="Give --model llama3-8b.")
    if asked["tensors"] is not None and given not in ([], ["--size"]):
        raise UsageError(f"--tensors goes with --size, not with {given[0]}")
    if asked["workload"] is not None and not changes:
        from ...bench.workloads.mlperf import mlperf

        return mlperf(asked["workload"])
    if asked["model"] is not None:
        from ...bench.workloads.llama3 import llama3

        return llama3(asked["model"], asked["optimizer"] or "none", asked["layers"])
    if asked["index"] is not None:
        from ...bench.workloads.index import indexed

        return indexed(asked["index"])

    from ...bench.workloads.sized import equal_tensors, sized

    nbytes = size_of(asked)
    return sized(nbytes) if asked["tensors"] is None else equal_tensors(nbytes, asked["tensors"])


def runs_of(asked: Mapping[str, Any]) -> int:
    """Return the number of rounds."""
    return DEFAULT_RUNS if asked["runs"] is None else int(asked["runs"])


def size_of(asked: Mapping[str, Any]) -> int:
    """Return the size of the state in bytes."""
    return GIB if asked["size"] is None else int(asked["size"])


def read_measurement(path: str) -> Measurement:
    """Return the result in a file. Raises UsageError if it cannot be read, or holds none."""
    from ...bench.measured.result import decoded

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    return decoded(text, path)
