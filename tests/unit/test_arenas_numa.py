"""Memory on the NUMA node of the rank that fills it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.storage.arenas.memory import reserved_memory
from holdfast.storage.arenas.numa import own_node

needs_policies = pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="this kernel has no NUMA policies"
)
OTHER_CPUS = "8192-16383"


def policy_of(address: int) -> str:
    """Return the policy of the mapping at an address of this process."""
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        start, policy, *_ = line.split()
        if int(start, 16) == address:
            return policy
    raise AssertionError(f"no mapping begins at {address:#x}")


@needs_policies
def test_memory_comes_from_the_node_that_it_is_reserved_on() -> None:
    """Without a node, the policy is the default."""
    for node, expected in ((0, "prefer"), (-1, "default")):
        memory = reserved_memory(4 << 20, node=node)
        assert policy_of(memory.address).startswith(expected)
        memory.close()


def test_a_process_belongs_to_the_node_of_its_processors(tmp_path: Path) -> None:
    """A process that may run on several nodes belongs to none, nor does one on a host that has one
    node or does not tell."""
    own = sorted(os.sched_getaffinity(0))

    def node_of(*lists: str) -> int:
        for number, text in enumerate(lists):
            folder = tmp_path / f"node{number}"
            folder.mkdir(exist_ok=True)
            (folder / "cpulist").write_text(f"{text}\n")
        return own_node(tmp_path)

    assert node_of() == -1
    assert node_of(f"0-{max(own)}") == -1
    assert node_of(OTHER_CPUS, f"0-{max(own)}") == 1
    assert node_of(f"{own[0]}", f"0-{max(own)}") == -1
    assert node_of("", f"0-{max(own)}") == 1


@needs_policies
def test_a_keeper_drops_the_policy_of_the_rank_that_started_it() -> None:
    """Otherwise the images of all ranks would be on the node of that one."""
    program = """
import ctypes, platform
from holdfast.storage.arenas import numa
mask = ctypes.c_ulong(1)
_, set_policy = numa._CALLS[platform.machine()]
assert not numa._libc.syscall(set_policy, 2, ctypes.byref(mask), ctypes.c_ulong(65))
def policy():
    lines = open("/proc/self/numa_maps").read().splitlines()
    return next(line.split()[1] for line in lines if "stack" in line)
assert policy() == "bind:0", policy()
numa.reset_policy()
assert policy() == "default", policy()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
