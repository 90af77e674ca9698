"""How much memory this process may still take: what the system has, and what its control groups
allow. Memory beyond a control group's limit is not an error, but the end of the process."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_nbytes"]

_GROUPS = Path("/sys/fs/cgroup")


def available_nbytes(proc: Path = Path("/proc"), groups: Path = _GROUPS) -> int:
    """Bytes that this process can take without swapping, and without being killed, as far as the
    system says; it may say nothing of control groups of version 1."""
    found = [_system_nbytes(proc)]
    folder = groups / _group_of_this_process(proc)
    while folder.is_relative_to(groups):
        left = _left_in_group(folder)
        if left is not None:
            found.append(left)
        if folder == groups:
            break
        folder = folder.parent
    return max(0, min(found))


def _system_nbytes(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    raise OSError("/proc/meminfo does not say how much memory is available")


def _group_of_this_process(proc: Path) -> str:
    """Its path below the root of control groups, "" where there is none of version 2."""
    try:
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            number, _, rest = line.partition(":")
            if number == "0":
                return rest.partition(":")[2].lstrip("/")
    except OSError:
        pass  # a system without control groups
    return ""


def _left_in_group(folder: Path) -> int | None:
    """None where the group has no limit. Its file cache can be taken back, so it does not count."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((folder / "memory.current").read_text())
        statistics = dict(
            line.split() for line in (folder / "memory.stat").read_text().splitlines()
        )
    except (OSError, ValueError):
        return None
    return int(limit) - used + int(statistics.get("inactive_file", "0"))
