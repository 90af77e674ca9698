"""Places memory on the NUMA node of the rank that fills it. Without effect on hosts of one node."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
from pathlib import Path

NODES = Path("/sys/devices/system/node")
_CPUS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_DEFAULT = 0
_PREFERRED = 1
_CALLS = {"x86_64": (237, 238), "aarch64": (235, 237)}
"""Numbers of mbind and set_mempolicy, which the C library does not wrap."""
_libc = ctypes.CDLL(None, use_errno=True)
_log = logging.getLogger(__name__)


def cpus_of(text: str) -> frozenset[int]:
    """Parse a list of CPUs in the format of Linux, such as ``0-3,8``. Raises ValueError."""
    cpus = set[int]()
    for part in text.split(","):
        match = _CPUS.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} is neither a CPU nor a range of CPUs such as 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part!r} ends before it begins")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def own_node(nodes: Path = NODES) -> int:
    """Return the node of all CPUs that this process may use; -1 if it may use several nodes, there
    is one only, or it is unknown."""
    cpus = os.sched_getaffinity(0)
    found = []
    try:
        folders = sorted(nodes.glob("node[0-9]*"))
        for folder in folders:
            of_node = (folder / "cpulist").read_text().strip()
            if of_node and cpus & cpus_of(of_node):  # a node may have memory alone
                found.append(int(folder.name.removeprefix("node")))
    except (OSError, ValueError) as error:
        _log.debug("the NUMA nodes of this host are unknown: %s", error)
        return -1
    return found[0] if len(found) == 1 < len(folders) else -1


def prefer_node(address: int, nbytes: int, node: int) -> None:
    """Have pages that are not allocated yet come from ``node`` if it has any left; -1: no
    preference. A failure is logged, since memory of any node serves."""
    if node < 0:
        return
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    bits = ctypes.c_ulong(len(mask) * 64 + 1)  # the kernel subtracts one
    size = ctypes.c_ulong(nbytes)
    _call(0, ctypes.c_void_p(address), size, ctypes.c_int(_PREFERRED), mask, bits, ctypes.c_uint(0))


def reset_policy() -> None:
    """Drop a policy that this process has inherited, for example from ``numactl --membind``."""
    _call(1, ctypes.c_int(_DEFAULT), None, ctypes.c_ulong(0))


def _call(which: int, *arguments: object) -> None:
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        return
    if _libc.syscall(ctypes.c_long(numbers[which]), *arguments):
        _log.debug("no NUMA policy: %s", os.strerror(ctypes.get_errno()))
