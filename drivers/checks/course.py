"""A complete check: opens the storage, runs all probes in a scratch folder, and removes that
folder."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import HoldfastError
from ..contract import Driver
from ..registry import driver_class, open_driver, resolved_options, serving
from ..uri import Uri, join
from .findings import Finding, Kept, Report, UnkeptError
from .ground import Counted, Ground, Warnings
from .probes import PROBES, Probe

STEP_S = 30.0
"""Time limit of one probe, in seconds."""
TOTAL_S = 90.0
"""Time after which no further probe starts, in seconds."""
CLEAN_UP_S = 60.0
_QUICK: Mapping[str, str] = {
    "part_size": "5MiB",
    "deadline": "5s",
    "timeout": "20s",
    "read_timeout": "10s",
    "retries": "2",
    "op_timeout_s": "25s",
}
"""Defaults for options that are not set: small parts and short timeouts."""


async def check(
    uri: Uri,
    options: Mapping[str, object] | None = None,
    *,
    on_finding: Callable[[Finding], None] = lambda finding: None,
    warn: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Probe the storage at ``uri`` in a scratch folder, which is removed in any case, even on
    cancellation.

    ``on_finding`` is called with each finding. ``warn`` is called if the scratch folder could not
    be removed, even if the check fails or is cancelled. Raises UriError or UsageError if no driver
    can be opened; never a StorageError.
    """
    chosen = {**quick_options(uri, options or {}), **(options or {})}
    driver = other = Counted(open_driver(uri, **chosen))
    report = Report(driver.uri)
    began_s = time.perf_counter()
    if uri.location.strip("/") or driver.traits.shared:
        other = Counted(open_driver(uri, **chosen))
    ground = Ground(driver, other, f"holdfast-check-{secrets.token_hex(8)}")
    try:
        try:
            await _try_all(ground, report, on_finding)
        finally:
            report.why_left = await _clean_up(ground)
            if report.why_left:
                report.left = join(uri, ground.scratch).redacted
                warn(report)
    finally:
        await other.close()
        await driver.close()
    report.requests = sum(one.count for one in {driver, other})
    report.seconds = time.perf_counter() - began_s
    return report


def quick_options(uri: Uri, options: Mapping[str, object]) -> dict[str, str]:
    """Return quick defaults for the options that are set nowhere: not in the URI, ``options``, the
    environment or a file."""
    known = resolved_options(uri, **options)
    cls = driver_class(serving(uri))
    return {
        name: value
        for name, value in _QUICK.items()
        if name in known and known[name].source == "default" and (name in cls.OPTIONS or cls.remote)
    }


async def _try_all(ground: Ground, report: Report, on_finding: Callable[[Finding], None]) -> None:
    why = ""
    end_s = time.perf_counter() + TOTAL_S
    for probe in PROBES:
        if not why and time.perf_counter() > end_s:
            why = f"the check's time, {TOTAL_S:g} s, is over"
        if why:
            finding = Finding(probe.name, probe.title, "not tried", why)
        else:
            finding = await _tried(ground, probe)
        report.findings.append(finding)
        on_finding(finding)
        if probe is PROBES[0] and finding.outcome == "broken":
            why = "nothing can be put"


async def _tried(ground: Ground, probe: Probe) -> Finding:
    began_s = time.perf_counter()
    kept = Kept()
    broken: dict[str, Any] = {}
    with Warnings() as warnings:
        try:
            async with asyncio.timeout(STEP_S):
                kept = await probe.tried(ground)
        except (UnkeptError, HoldfastError, TimeoutError) as error:
            advice = getattr(error, "advice", None)
            kept = Kept(getattr(error, "message", None) or str(error), "broken")
            if isinstance(error, TimeoutError) and not isinstance(error, HoldfastError):
                kept = Kept(f"did not end within {STEP_S:g} s", "broken")
            broken = {
                "effect": probe.effect,
                "follows": probe.follows,
                "advice": " ".join(filter(None, [advice, probe.advice])),
            }
    return Finding(
        probe.name,
        probe.title,
        kept.outcome,
        kept.detail,
        seconds=time.perf_counter() - began_s,
        nbytes_per_s=kept.nbytes_per_s,
        warnings=tuple(warnings.texts),
        **broken,
    )


async def _clean_up(ground: Ground) -> str:
    """Remove everything the check stored. Return why some of it remains, or ""."""
    why = ""
    if not (ground.driver.may_have_stored or ground.other.may_have_stored):
        return why
    try:
        async with asyncio.timeout(CLEAN_UP_S):
            for pause_s in (0.0, 0.5, 2.0):  # listings of some gateways lag
                await asyncio.sleep(pause_s)
                why = await _remove(ground.driver, ground.scratch)
                if not why:
                    break
    except TimeoutError:
        return f"{CLEAN_UP_S:g} s were not enough"
    return why


async def _remove(driver: Driver, scratch: str) -> str:
    why = ""
    try:
        await driver.delete_all(scratch)
    except HoldfastError as error:
        why = error.message
    left = 0
    try:
        for key in [info.key async for info in driver.list(scratch)]:
            await driver.delete(key)  # one by one, for stores whose bulk delete fails
        left = len([info async for info in driver.list(scratch)])
    except HoldfastError as error:
        return why or error.message
    if left:
        return why or f"{left} objects are still listed"
    return ""
