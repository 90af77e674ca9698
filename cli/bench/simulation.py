"""``holdfast bench --simulate`` and ``--dry-run``: forecasts, and what they print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...core.units import size_text
from ...errors import UsageError
from ..commands import print_json
from ..tables import NONE, Table
from ..text import one_of, paint, printable
from .arguments import DEFAULT_HOST_RANKS
from .choices import plan_of, prices_of, read_measurement

if TYPE_CHECKING:
    from ...bench.simulated.forecast import Forecast, Rates
    from ...bench.workloads.spec import Workload

__all__ = ["check_alone", "run_dry", "run_simulation"]


def check_alone(asked: Mapping[str, Any]) -> None:
    """Raise UsageError for arguments that exclude each other, or that need ``--simulate`` or
    ``--dry-run``."""
    if asked["simulate"] and asked["dry_run"]:
        raise UsageError("--simulate and --dry-run exclude each other", advice="Give one of them.")
    if asked["rates_from"] is not None and asked["rate"] is not None:
        raise UsageError("--rates-from and --rate exclude each other", advice="Give one of them.")
    simulating = ("ranks_per_host", "host_rate", "total_rate")
    either = ("rate", "rates_from")
    if not asked["simulate"]:
        _refuse(asked, simulating, "--simulate")
        if not asked["dry_run"]:
            _refuse(asked, either, "--simulate or --dry-run")


def _refuse(asked: Mapping[str, Any], names: tuple[str, ...], needed: str) -> None:
    for name in names:
        if asked[name] is not None:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} goes with {needed}", advice=f"Give {needed} too.")


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
    found = forecast(workload, parse(uri), world, host_ranks, _rates(asked), prices_of(asked))
    if json_output:
        print(encoded(found))
    else:
        _print_forecast(found)
    return 0


def run_dry(uri: str, asked: Mapping[str, Any], *, json_output: bool) -> int:
    """Print what a measurement would do. Return 1 if this host would refuse it."""
    from ...bench.simulated.dry_run import dry_run

    if asked["ranks"] is not None:
        raise UsageError("--dry-run plans for one process", advice="Leave --ranks out.")
    found = dry_run(plan_of(uri, asked, 1), _rates(asked))
    if json_output:
        print_json(found)
    else:
        _print_dry_run(found)
    return int(found["refusal"] is not None)


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
        ("host memory of a rank, save", size_text(found.save_memory_nbytes)),
        ("host memory of a rank, async_save", size_text(found.capture_memory_nbytes)),
    ]
    Table("the job", ("figure", "value"), figures, ("figure",)).print()
    moves = [
        (name, f"{requests.puts:,}", f"{requests.gets:,}", _seconds(seconds), _usd(usd))
        for name, requests, seconds, usd in (
            ("save", found.save_requests, found.save_s, found.save_usd),
            ("load", found.load_requests, found.load_s, found.load_usd),
        )
    ]
    Table("requests", ("", "writes", "reads", "time", "cost"), moves, ("",)).print()
    for note in found.notes:
        print(f"NOTE: {printable(note)}")


def _seconds(seconds: float | None) -> str:
    return NONE if seconds is None else f"{seconds:.2f} s"


def _usd(usd: float | None) -> str:
    return NONE if usd is None else f"{usd:.4f} USD"


def _print_dry_run(found: Mapping[str, Any]) -> None:
    print(f"{printable(found['uri'])}: {printable(found['workload'])}, {found['content']}: dry run")
    print(
        f"{size_text(found['state_nbytes'])} in {one_of(found['tensors'], 'tensor')}; host memory "
        f"{size_text(found['memory_nbytes'])}, room in storage {size_text(found['stored_nbytes'])}"
    )
    print()
    titles = ("phase", "times", "written", "read", "write requests", "read requests", "time")
    totals = {**found, "name": "total, with rests", "times": ""}
    rows = [
        (
            phase["name"],
            str(phase["times"]),
            size_text(phase["written_nbytes"]),
            size_text(phase["read_nbytes"]),
            f"{phase['requests']['puts']:,}",
            f"{phase['requests']['gets']:,}",
            _seconds(phase["seconds"]),
        )
        for phase in [*found["phases"], totals]
    ]
    Table("phases", titles, rows, ("phase",)).print()
    if found["cost_usd"] is not None:
        print(f"requests cost {_usd(found['cost_usd'])}")
    if found["refusal"] is not None:
        print(paint(f"this host would refuse to measure it: {printable(found['refusal'])}", "red"))
