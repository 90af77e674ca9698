"""The options that every scheme has, and the function that puts layers around a driver. A layer is
imported when used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..contract import Driver
from ..options import Option, duration, integer, or_off, size, switch

__all__ = ["OP_TIMEOUT_S", "RETRIES", "common_options", "stacked"]

RETRIES = 10
"""Of storage behind a network. With the pauses between them, about half a minute: a server that
restarts is waited for."""
OP_TIMEOUT_S = 120.0
"""Of storage behind a network."""


def _fault_plan(text: str) -> Any:
    from .faults import fault_plan

    return fault_plan(text)


def common_options(*, remote: bool) -> Mapping[str, Option]:
    """The options of every scheme, with the defaults for storage that is, or is not, behind a
    network."""
    return {
        "retries": Option(
            integer(0, 1000),
            RETRIES if remote else 0,
            "further tries of an operation that failed temporarily",
        ),
        "op_timeout_s": Option(
            or_off(duration(0.001, 86400)),
            OP_TIMEOUT_S if remote else None,
            "how long an operation may take, with its tries and the pauses between them",
        ),
        "max_concurrency": Option(
            or_off(integer(1, 65536)), None, "operations at a time, of each open URI"
        ),
        "max_bytes_per_s": Option(
            or_off(size(1, 1 << 50)),
            None,
            "how much is read and written a second, by all that share this rate in a process",
        ),
        "hedge_percent": Option(
            integer(0, 50),
            0,
            (
                "a second read for the slowest so many in a hundred, whichever ends first is used; "
                "0: never"
            ),
        ),
        "metrics": Option(switch, False, "count operations, bytes, errors and latencies"),
        "faults": Option(
            or_off(_fault_plan), None, "faults on purpose, for drills: seed:7,error:0.01,delay:0.05"
        ),
    }


def stacked(driver: Driver, values: Mapping[str, Any], *, store: str) -> Driver:
    """``driver`` with the layers that ``values``, one for each common option, ask for; itself if
    they ask for none.

    The order, from the bottom up, is that of the package docstring, with its reasons. ``store`` is
    under what name metrics count.
    """
    if values["faults"] is not None:
        from .faults import FaultsLayer

        driver = FaultsLayer(driver, values["faults"])
    if values["metrics"]:
        from .metrics import MetricsLayer, meter_of

        driver = MetricsLayer(driver, meter_of(store))
    if values["max_concurrency"] is not None:
        from .limit import LimitLayer

        driver = LimitLayer(driver, values["max_concurrency"])
    if values["max_bytes_per_s"] is not None:
        from .throttle import ThrottleLayer, shared_bucket

        driver = ThrottleLayer(driver, shared_bucket(values["max_bytes_per_s"]))
    if values["retries"] or values["op_timeout_s"] is not None:
        from .retry import RetryLayer, RetryPolicy

        driver = RetryLayer(driver, RetryPolicy(values["retries"], values["op_timeout_s"]))
    if values["hedge_percent"]:
        from .hedge import HedgeLayer

        driver = HedgeLayer(driver, values["hedge_percent"])
    return driver
