"""Tasks for rank processes: load the same bytes on all ranks, and count reads, or halt."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.drivers.local.driver import LocalDriver
from holdfast.storage.protocol import current as committed
from holdfast.storage.ranks.process_group import current_member

from .bits import difference

CHUNK_NBYTES = 16 << 20


def replicated(chunks: int) -> dict[str, torch.Tensor]:
    """Return tensors of about ``chunks`` chunks that are equal on all ranks, and one of this rank's
    own. A quarter of the equal ones shrinks when compressed."""
    n = chunks * CHUNK_NBYTES // 16
    shared = {f"t{i}": torch.arange(n, dtype=torch.float32) * (i + 1) for i in range(4)}
    shared["t3"] //= 1024
    return shared | {"own": torch.full((100,), float(dist.get_rank()))}


def replicated_save(uri: str, chunks: int, compression: Any = None) -> None:
    """Save :func:`replicated`."""
    holdfast.save(uri, replicated(chunks), compression=compression)


def exchanging_load(
    uri: str,
    chunks: int,
    exchange: Any,
    hosts: list[int] | None = None,
    cannot: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Load :func:`replicated` on every rank; return counts of reads, of received bytes, and of
    memory still shared. ``hosts``: the host of each rank. Ranks in ``cannot`` cannot share memory.
    """
    gc.collect()  # drop the errors of an earlier test
    expected, rank = replicated(chunks), dist.get_rank()
    into = {name: torch.full_like(t, -1) for name, t in expected.items()}
    reports: list[holdfast.LoadReport] = []
    manifests, checked = list[str](), list[str]()
    member = current_member(60.0)
    assert member is not None
    host, get, check = member.host, LocalDriver.get, committed.check_complete

    async def counted(self: Any, key: str) -> bytes:
        manifests.append(key)
        return await get(self, key)

    def checks(manifest: Any, what: str) -> None:
        checked.append(what)
        check(manifest, what)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalDriver, "get", counted)
            patch.setattr(committed, "check_complete", checks)
            if hosts:
                member.host = f"host {hosts[rank]}"
            if rank in cannot:
                patch.setattr(os, "memfd_create", _refused)
            holdfast.load(uri, into=into, exchange=exchange, on_report=reports.append)
    finally:
        member.host = host
    return {
        "manifests": len(manifests),
        "checked": len(checked),
        "wrong": difference(expected, into),
        "read": reports[0].bytes_read,
        "received": reports[0].bytes_received,
        "wanted": reports[0].bytes_wanted,
        "left": Path("/proc/self/maps").read_text().count("memfd:holdfast"),
    }


def _refused(*_: Any) -> int:
    raise OSError("refused")


def halting_load(uri: str, chunks: int, rank: int, sign: str, deadline_s: float) -> None:
    """Load :func:`replicated`. At its second read of an image, one rank touches ``sign`` and
    halts."""
    method, count = LocalDriver.read, 0

    async def halting(self: Any, key: str, start: int, into: memoryview) -> None:
        nonlocal count
        count += len(into) > 1 << 20
        if count > 1 and dist.get_rank() == rank:
            Path(sign).touch()
            time.sleep(600)
        await method(self, key, start, into)

    LocalDriver.read = halting  # type: ignore[method-assign]
    into = {name: torch.zeros_like(t) for name, t in replicated(chunks).items()}
    began_s = time.monotonic()
    try:
        holdfast.load(uri, into=into, exchange=True, deadline_s=deadline_s)
    except BaseException as error:
        error.took_s = time.monotonic() - began_s  # type: ignore[attr-defined]
        raise
    finally:
        LocalDriver.read = method  # type: ignore[method-assign]
