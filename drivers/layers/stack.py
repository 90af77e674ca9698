"""Options common to all schemes, and the function that wraps a driver in layers. Layers are
imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..contract import Driver
from ..options import Option, duration, integer, or_off, size, switch

RETRIES = 10
"""Default for remote storage. With the pauses, about half a minute: long enough for a server to
restart."""
OP_TIMEOUT_S = 120.0
"""Default for remote storage."""


def _fault_plan(text: str) -> Any:
    from .faults import fault_plan

    return fault_plan(text)


def common_options(*, remote: bool) -> Mapping[str, Option]:
    """Return the options of every scheme, with defaults for remote or local storage."""
    return {
        "retries": Option(
            integer(0, 1000),
            RETRIES if remote else 0,
            "retries of an operation that failed temporarily",
        ),
        "op_timeout_s": Option(
            or_off(duration(0.001, 86400)),
            OP_TIMEOUT_S if remote else None,
            "time limit of an operation, including retries and pauses",
        ),
        "max_concurrency": Option(
            or_off(integer(1, 65536)), None, "concurrent operations per open URI"
        ),
        "max_bytes_per_s": Option(
            or_off(size(1, 1 << 50)),
            None,
            "bytes read and written per second, by everything in the process with this limit",
        ),
        "hedge_percent": Option(
            integer(0, 50),
            0,
            "percentage of reads, the slowest ones, that get a second attempt; 0: none",
        ),
        "metrics": Option(switch, False, "count operations, bytes, errors and latencies"),
        "faults": Option(
            or_off(_fault_plan), None, "injected faults, for drills: seed:7,error:0.01,delay:0.05"
        ),
    }


def stacked(driver: Driver, values: Mapping[str, Any], *, store: str) -> Driver:
    """Return ``driver`` wrapped in the layers that ``values`` ask for; the driver itself if there
    are none.

    ``values`` has one entry per common option. The package docstring explains the order. ``store``
    is the name under which metrics are counted.
    """
    if values["faults"] is not None:
        from .faults import FaultsLayer

        driver = FaultsLayer(driver, values["faults"])
    if values["metrics"]:
        from .metrics import MetricsLayer, meter_of

        driver = MetricsLayer(driver, meter_of(store))
    if values["max_concurrency"] is not None:
        from .throttle import LimitLayer

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
