"""``holdfast bench --simulate``: forecasts of the saves and loads of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...core.units import size_text
from ...errors import UsageError
from ..tables import Table
from ..text import one_of, paint, printable

if TYPE_CHECKING:
    from ...bench.simulated.forecast import Forecast
    from ...bench.workloads.spec import Workload


def run_simulation(uri: str, workload: Workload, asked: Mapping[str, Any]) -> int:
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
    found = forecast(workload, parse(uri), world, asked["ranks_per_host"])
    if asked["json_output"]:
        print(encoded(found))
    else:
        _print_forecast(found)
    return 0


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
        (name, f"{requests.puts:,}", f"{requests.gets:,}")
        for name, requests in (("save", found.save_requests), ("load", found.load_requests))
    ]
    Table("requests", ("", "writes", "reads"), moves, ("",)).print()
    for note in found.notes:
        print(f"NOTE: {printable(note)}")
