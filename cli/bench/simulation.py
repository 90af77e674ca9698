"""``holdfast bench --simulate``: forecasts of the saves and loads of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...core.units import size_text
from ...errors import UsageError
from ..tables import NONE, Table
from ..text import one_of, paint, printable
from .arguments import DEFAULT_HOST_RANKS
from .choices import read_measurement

if TYPE_CHECKING:
    from ...bench.simulated.forecast import Forecast, Rates
    from ...bench.workloads.spec import Workload


def check_simulation(asked: Mapping[str, Any]) -> None:
    """Raise UsageError for arguments that exclude each other, or that need ``--simulate``."""
    if asked["rates_from"] is not None and asked["rate"] is not None:
        raise UsageError("--rates-from and --rate exclude each other", advice="Give one of them.")
    for name in ("ranks_per_host", "host_rate", "total_rate", "rate", "rates_from"):
        if asked[name] is not None and not asked["simulate"]:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} goes with --simulate", advice="Give --simulate too.")


def run_simulation(
    uri: str, workload: Workload, asked: Mapping[str, Any], *, json_output: bool
) -> int:
    """Plan, print the forecast, and return 0."""
    from ...bench.simulated.forecast import encoded, forecast
    from ...drivers.uri import parse

    world = asked["ranks"]
    if world is None:
        world = workload.world
    if world is None:
        raise UsageError(
            f"{workload.name} has no number of ranks of its own", advice="Give --ranks 8."
        )
    host_ranks = asked["ranks_per_host"]
    if host_ranks is None:
        host_ranks = DEFAULT_HOST_RANKS
    found = forecast(workload, parse(uri), world, host_ranks, _rates(asked))
    if json_output:
        print(encoded(found))
    else:
        _print_forecast(found)
    return 0


def _rates(asked: Mapping[str, Any]) -> Rates:
    from ...bench.simulated.forecast import Limits, Rates, measured_rates, parse_rate

    rank, host, total = (
        None if asked[name] is None else parse_rate(f"--{name.replace('_', '-')}", asked[name])
        for name in ("rate", "host_rate", "total_rate")
    )
    path = asked["rates_from"]
    if path is None:
        return Rates(Limits(rank, host, total), Limits(rank, host, total))
    measured = measured_rates(read_measurement(path), path)
    return Rates(Limits(measured.save.rank, host, total), Limits(measured.load.rank, host, total))


def _print_forecast(found: Forecast) -> None:
    ranks = one_of(found.world, "rank")
    print(f"{printable(found.uri)}: {printable(found.workload)} on {ranks}, simulated")
    print(paint(f"{one_of(found.host_ranks, 'rank')} on each host", "dim"))
    print()
    titles = ("bytes", "least", "median", "most", "all ranks", "exact")
    sizes = [
        (
            name,
            *map(size_text, (of.least, round(of.median), of.most, of.total)),
            f"{of.total:,} B",
        )
        for name, of in (("state", found.state_nbytes), ("written", found.image_nbytes))
    ]
    Table("per rank", titles, sizes, ("bytes",)).print()
    figures = [
        ("largest rank, relative to the mean", f"{found.balance:.3f}"),
        ("tensors", f"{found.tensors:,}"),
        ("shards", f"{found.shards:,}"),
        ("chunks", f"{found.chunks:,}"),
        ("manifest", size_text(found.manifest_nbytes)),
        ("processor time of a rank's plan", f"{found.plan_s * 1e3:.0f} ms"),
        ("processor time of the leader's merge", f"{found.merge_s:.2f} s"),
        ("host memory of a rank, save", size_text(found.save_memory_nbytes)),
        ("host memory of a rank, async_save", size_text(found.capture_memory_nbytes)),
    ]
    Table("the job", ("figure", "value"), figures, ("figure",)).print()
    moves = [
        (name, f"{requests.puts:,}", f"{requests.gets:,}", _seconds(seconds))
        for name, requests, seconds in (
            ("save", found.save_requests, found.save_s),
            ("load", found.load_requests, found.load_s),
        )
    ]
    Table("requests", ("", "writes", "reads", "time"), moves, ("",)).print()
    for note in found.notes:
        print(f"NOTE: {printable(note)}")


def _seconds(seconds: float | None) -> str:
    return NONE if seconds is None else f"{seconds:.2f} s"
