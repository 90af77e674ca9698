"""Arguments of ``holdfast bench`` that choose a workload.

Invalid combinations are refused before any I/O. ``asked`` maps the names of arguments to their
parsed values, None for those not given.
"""

from __future__ import annotations

from argparse import _ArgumentGroup
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...core.units import parse_size
from ...errors import UsageError

if TYPE_CHECKING:
    from ...bench.prices import Prices
    from ...bench.workloads.content import Content
    from ...bench.workloads.spec import Workload

__all__ = [
    "DEFAULT_SIZE",
    "add_workload_arguments",
    "chosen_content",
    "chosen_workload",
    "planned_nbytes",
    "prices_of",
]

DEFAULT_SIZE = "1GiB"
_KINDS = ("workload", "model", "index", "size")
"""Mutually exclusive arguments."""


def add_workload_arguments(group: _ArgumentGroup) -> None:
    """Add every argument but ``--size``. Names are checked on use, because their lists are slow to
    import."""
    group.add_argument(
        "--tensors", type=int, metavar="N", help="with --size: this many equal tensors"
    )
    group.add_argument(
        "--workload",
        metavar="NAME",
        help="a checkpoint of MLPerf Storage: llama3-8b, llama3-70b, llama3-405b or llama3-1t; or "
        "the driver without checkpoints: raw, one object over a grid of part size × concurrency, "
        "or meta, many small objects",
    )
    group.add_argument(
        "--model",
        metavar="NAME",
        help="the real tensors of a model: llama3-8b, llama3-70b or llama3-405b",
    )
    group.add_argument(
        "--optimizer",
        metavar="KIND",
        help="with --model: optimizer state: none, adam or adam+master (default: none)",
    )
    group.add_argument(
        "--layers", type=int, metavar="N", help="with --model: its first N layers only"
    )
    group.add_argument(
        "--index",
        metavar="PATH",
        help="the tensors of safetensors files: a folder, its index, or a file",
    )
    group.add_argument(
        "--entropy",
        default="normal",
        metavar="WHAT",
        help="content of tensors: normal, uniform, or the random share among zeros, such as 25%% "
        "(default: %(default)s)",
    )


def chosen_content(asked: Mapping[str, Any]) -> Content:
    """Return the content of tensors that ``--entropy`` names. Raises UsageError if invalid."""
    from ...bench.workloads.content import parse_content

    return parse_content(asked["entropy"])


def chosen_workload(asked: Mapping[str, Any]) -> Workload:
    """Return the workload to save: ``DEFAULT_SIZE`` of tensors unless arguments choose another.

    Raises UsageError for an invalid value or combination, and the errors of reading an index.
    """
    _check_combination(asked)
    if asked["workload"] is not None:
        from ...bench.workloads.mlperf import mlperf

        return mlperf(asked["workload"])
    if asked["model"] is not None:
        from ...bench.workloads.llama3 import llama3

        return llama3(asked["model"], asked["optimizer"] or "none", asked["layers"])
    if asked["index"] is not None:
        from ...bench.workloads.index import indexed

        return indexed(asked["index"])
    return _of_size(asked["size"] or DEFAULT_SIZE, asked["tensors"])


def prices_of(asked: Mapping[str, Any]) -> Prices | None:
    """Return the prices of requests; None if none are given. Raises UsageError if invalid."""
    from ...bench.prices import parse_prices

    if asked["prices"] is None:
        return None
    return parse_prices(asked["prices"])


def planned_nbytes(workload: Workload, world: int) -> int:
    """Return the approximate bytes of all ranks' state: the requested size, if there is one."""
    from ...bench.workloads.sized import Sized

    if isinstance(workload, Sized):
        return workload.wanted_nbytes
    return sum(workload.nbytes(rank, world) for rank in range(world))


def _of_size(size: str, tensors: int | None) -> Workload:
    from ...bench.workloads.sized import Sized, equal_tensors

    nbytes = _size(size)
    if tensors is None:
        return Sized(nbytes)
    return equal_tensors(nbytes, tensors)


def _check_combination(asked: Mapping[str, Any]) -> None:
    given = [f"--{name}" for name in _KINDS if asked[name] is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", advice="Give one of them.")
    for name in ("optimizer", "layers"):
        if asked[name] is not None and asked["model"] is None:
            raise UsageError(f"--{name} needs --model", advice="Give --model llama3-8b.")
    if asked["tensors"] is not None and given not in ([], ["--size"]):
        raise UsageError(f"--tensors goes with --size, not with {given[0]}")


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(
            f"--size {text!r} is not a size: {error}", advice="Give one such as 4GiB."
        ) from error
