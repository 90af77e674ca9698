"""Measures how much memory this process may still allocate, according to the system and to control
groups. Exceeding the limit of a control group is no error: it kills the process."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_nbytes"]

_GROUPS = Path("/sys/fs/cgroup")


def available_nbytes(proc: Path = Path("/proc"), groups: Path = _GROUPS) -> int:
    """Return the number of bytes that this process can allocate without swapping or being killed.
    Limits of control groups version 1 are not seen."""
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
    """Return the path of this process's version 2 control group below the root, "" if there is
    none."""
    try:
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            number, _, rest = line.partition(":")
            if number == "0":
                return rest.partition(":")[2].lstrip("/")
    except OSError:
        pass  # no control groups
    return ""


def _left_in_group(folder: Path) -> int | None:
    """Return the memory left in a group, None without a limit. Reclaimable file cache counts as
    free."""
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
