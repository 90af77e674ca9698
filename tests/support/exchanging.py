"""Tasks for rank processes: load what all of them want, and count, or fail, or halt in the
middle."""

from __future__ import annotations

import gc
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast.drivers.local.driver import LocalDriver
from holdfast.storage.exchange import exchange as ranks_exchange
from holdfast.storage.exchange.group import ExchangeLimits
from holdfast.storage.operations.loading import start_load
from holdfast.storage.operations.loading.load import LoadJob
from holdfast.storage.protocol import current as committed
from holdfast.storage.ranks.process_group import current_member

from .bits import difference

__all__ = ["broken_load", "exchanging_load", "replicated_save"]

CHUNK_NBYTES = 16 << 20


def replicated(chunks: int) -> dict[str, torch.Tensor]:
    """What all ranks hold alike, about so many chunks, of which a quarter shrinks, and what each
    has of its own."""
    n = chunks * CHUNK_NBYTES // 16
    shared = {f"t{i}": torch.arange(n, dtype=torch.float32) * (i + 1) for i in range(4)}
    shared["t3"] //= 1024
    return shared | {"own": torch.full((100,), float(dist.get_rank()))}


def replicated_save(uri: str, chunks: int, compression: Any = None) -> None:
    """Save it."""
    holdfast.save(uri, replicated(chunks), compression=compression)


def exchanging_load(
    uri: str,
    chunks: int,
    exchange: Any,
    hosts: list[int] | None = None,
    cannot: tuple[int, ...] = (),
    strangers: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Load it on every rank. ``hosts``: which host each rank takes itself to be on. Ranks in
    ``cannot`` have no memory to share; those in ``strangers`` find no other's door. Returns what
    was read, how often the manifest, and was checked, what is wrong, and how much memory is still
    shared.
    """
    gc.collect()  # what an error held that a test before was about
    expected, rank = replicated(chunks), dist.get_rank()
    into = {name: torch.full_like(t, -1) for name, t in expected.items()}
    reports: list[holdfast.LoadReport] = []
    memfd_create, get, manifests = os.memfd_create, LocalDriver.get, list[str]()
    member = current_member(60.0)
    assert member is not None
    host = member.host
    connect = ranks_exchange.connect
    check, checked = committed.check_complete, list[str]()

    async def counted(self: Any, key: str) -> bytes:
        manifests.append(key)
        return await get(self, key)

    def checks(manifest: Any, what: str) -> None:
        checked.append(what)
        check(manifest, what)

    LocalDriver.get, committed.check_complete = counted, checks  # type: ignore[method-assign]
    if hosts:
        member.host = f"host {hosts[rank]}"
    if rank in cannot:
        os.memfd_create = _refused
    if strangers:
        limits = ExchangeLimits(connect_all_timeout_s=3.0)  # the others wait so long for them
        start_load.LoadJob = partial(LoadJob, exchange_limits=limits)  # type: ignore[assignment,misc]
    if rank in strangers:
        ranks_exchange.connect = _unanswered
    try:
        holdfast.load(uri, into=into, exchange=exchange, on_report=reports.append)
    finally:
        member.host, os.memfd_create = host, memfd_create
        ranks_exchange.connect, start_load.LoadJob = connect, LoadJob  # type: ignore[misc]
        LocalDriver.get, committed.check_complete = get, check  # type: ignore[method-assign]
    return {
        "manifests": len(manifests),
        "checked": len(checked),
        "wrong": difference(expected, into),
        "read": reports[0].bytes_read,
        "received": reports[0].bytes_received,
        "wanted": reports[0].bytes_wanted,
        "left": _shared_memories(),
    }


def _shared_memories() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:holdfast")


def _refused(*_: Any) -> int:
    raise OSError("refused")


async def _unanswered(*_: Any) -> Any:
    raise ConnectionRefusedError("nobody opens")


def broken_load(
    uri: str, chunks: int, rank: int, sign: str | None, deadline_s: float, exchange: Any = True
) -> Any:
    """As above; but at its second read of an image one rank fails, or, if there is a ``sign``,
    leaves it and comes to a halt with its engine, to be killed there. Returns seconds; or raises,
    with these in ``took_s``, and in ``left`` how much memory is still shared."""
    method, count = LocalDriver.read, 0

    async def broken(self: Any, key: str, start: int, into: memoryview) -> None:
        nonlocal count
        count += len(into) > 1 << 20
        if count > 1 and dist.get_rank() == rank:
            if sign is None:
                raise holdfast.StorageError("the disk is broken", key=key)
            Path(sign).touch()
            time.sleep(600)
        await method(self, key, start, into)

    LocalDriver.read = broken  # type: ignore[method-assign]
    into = {name: torch.zeros_like(t) for name, t in replicated(chunks).items()}
    gc.collect()
    gc.disable()
    began_s = time.monotonic()
    try:
        holdfast.load(uri, into=into, exchange=exchange, deadline_s=deadline_s)
    except BaseException as error:
        error.took_s, error.left = time.monotonic() - began_s, _shared_memories()  # type: ignore[attr-defined]
        raise
    finally:
        gc.enable()
        LocalDriver.read = method  # type: ignore[method-assign]
    return time.monotonic() - began_s
