"""``holdfast bench --simulate`` and ``--dry-run``: arguments and output."""

from __future__ import annotations

from argparse import _ArgumentGroup
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...core.units import size_text
from ...errors import UsageError
from ..tables import print_table
from ..text import one_of, paint, printable
from .workload import prices_of

if TYPE_CHECKING:
    from ...bench.simulated.dry_run import DryRun
    from ...bench.simulated.forecast import Forecast, Spread
    from ...bench.simulated.rates import Rates
    from ...bench.workloads.spec import Workload

__all__ = ["add_simulation_arguments", "check_alone", "run_dry", "run_simulation"]

DEFAULT_HOST_RANKS = 8
_NONE = "-"


def add_simulation_arguments(group: _ArgumentGroup) -> None:
    """Add the arguments."""
    group.add_argument(
        "--simulate",
        action="store_true",
        help="plan a save and a load of all ranks of a job in this process, without data",
    )
    group.add_argument(
        "--dry-run", action="store_true", help="print what would be measured, and measure nothing"
    )
    group.add_argument(
        "--ranks-per-host",
        type=int,
        metavar="N",
        help=f"for --simulate (default: {DEFAULT_HOST_RANKS})",
    )
    group.add_argument("--rate", metavar="RATE", help="throughput of one rank, such as 2GB/s")
    group.add_argument("--host-rate", metavar="RATE", help="limit of all ranks of a host together")
    group.add_argument("--total-rate", metavar="RATE", help="limit of the storage")
    group.add_argument(
        "--rates-from", metavar="FILE", help="take rates from a result of holdfast bench --json"
    )


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
    from ...bench.simulated.dry_run import dry_run, encoded
    from .measuring import plan_of

    if asked["ranks"] is not None:
        raise UsageError("--dry-run plans for one process", advice="Leave --ranks out.")
    plan = plan_of(uri, asked, 1)
    found = dry_run(plan, _rates(asked), prices_of(asked))
    if json_output:
        print(encoded(found))
    else:
        _print_dry_run(found)
    return int(found.refusal is not None)


def _rates(asked: Mapping[str, Any]) -> Rates:
    from ...bench.simulated.rates import Limits, Rates, measured_rates, parse_rate
    from .results import read_measurement

    given = {
        name: parse_rate(f"--{name.replace('_', '-')}", asked[name])
        for name in ("rate", "host_rate", "total_rate")
        if asked[name] is not None
    }
    host, total = given.get("host_rate"), given.get("total_rate")
    path = asked["rates_from"]
    if path is None:
        return Rates.alike(Limits(given.get("rate"), host, total))
    measured = measured_rates(read_measurement(path), path)
    return Rates(Limits(measured.save.rank, host, total), Limits(measured.load.rank, host, total))


def _print_forecast(found: Forecast) -> None:
    ranks = one_of(found.world, "rank")
    print(f"{printable(found.uri)}: {printable(found.workload)} on {ranks}, simulated")
    print(paint(f"{one_of(found.host_ranks, 'rank')} on each host", "dim"))
    print()
    titles = ("bytes", "least", "median", "most", "all ranks", "exact")
    rows = [_spread("state", found.state_nbytes), _spread("written", found.image_nbytes)]
    print_table("per rank", titles, rows, ("bytes",))
    print_table("the job", ("figure", "value"), list(_figures(found)), ("figure",))
    print_table(
        "requests",
        ("", "writes", "reads", "time", "cost"),
        [
            _move("save", found.save_requests, found.save_s, found.save_usd),
            _move("load", found.load_requests, found.load_s, found.load_usd),
        ],
        ("",),
    )
    for note in found.notes:
        print(f"NOTE: {printable(note)}")


def _spread(name: str, of: Spread) -> tuple[str, ...]:
    sizes = map(size_text, (of.least, round(of.median), of.most, of.total))
    return (name, *sizes, f"{of.total:,} B")


def _figures(found: Forecast) -> Iterator[tuple[str, str]]:
    yield "largest rank, relative to the mean", f"{found.balance:.3f}"
    yield "tensors", f"{found.tensors:,}"
    yield "shards", f"{found.shards:,}"
    yield "chunks", f"{found.chunks:,}"
    yield "manifest", size_text(found.manifest_nbytes)
    yield "host memory of a rank, save", size_text(found.save_memory_nbytes)
    yield "host memory of a rank, async_save", size_text(found.capture_memory_nbytes)


def _move(name: str, requests: Any, seconds: float | None, usd: float | None) -> tuple[str, ...]:
    return name, f"{requests.puts:,}", f"{requests.gets:,}", _seconds(seconds), _usd(usd)


def _seconds(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{seconds:.2f} s"


def _usd(usd: float | None) -> str:
    return _NONE if usd is None else f"{usd:.4f} USD"


def _print_dry_run(found: DryRun) -> None:
    print(f"{printable(found.uri)}: {printable(found.workload)}, {found.content}: dry run")
    print(
        f"{size_text(found.state_nbytes)} in {one_of(found.tensors, 'tensor')}; host memory "
        f"{size_text(found.memory_nbytes)}, room in storage {size_text(found.stored_nbytes)}"
    )
    print()
    titles = ("phase", "times", "written", "read", "write requests", "read requests", "time")
    rows = [
        (
            phase.name,
            str(phase.times),
            size_text(phase.written_nbytes),
            size_text(phase.read_nbytes),
            f"{phase.requests.puts:,}",
            f"{phase.requests.gets:,}",
            _seconds(phase.seconds),
        )
        for phase in found.phases
    ]
    print_table("phases", titles, [*rows, _totals(found)], ("phase",))
    if found.cost_usd is not None:
        print(f"requests cost {_usd(found.cost_usd)}")
    if found.refusal is not None:
        print(paint(f"this host would refuse to measure it: {printable(found.refusal)}", "red"))


def _totals(found: DryRun) -> tuple[str, ...]:
    return (
        "total, with rests",
        "",
        size_text(found.written_nbytes),
        size_text(found.read_nbytes),
        f"{found.requests.puts:,}",
        f"{found.requests.gets:,}",
        _seconds(found.seconds),
    )
