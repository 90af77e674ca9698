"""The memory of slots: reserved, in huge pages if available, registered with CUDA, and on the NUMA
node of the rank that fills it."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.storage.arenas import memory as arenas_memory
from holdfast.storage.arenas.memory import Memory, reserved_memory, sealed_memory
from holdfast.storage.arenas.numa import own_node
from holdfast.storage.exchange.shared_memory import Arena
from holdfast.storage.state.pinned import Cuda, pin

NBYTES = (4 << 20) + 4096 + 16
needs_policies = pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="this kernel has no NUMA policies"
)
OTHER_CPUS = "8192-16383"


def flags_of(memory: Memory) -> set[str]:
    """Return the flags of the mapping, as /proc/self/smaps abbreviates them."""
    _, _, after = Path("/proc/self/smaps").read_text().partition(f"\n{memory.address:x}-")
    return set(after.partition("\nVmFlags:")[2].partition("\n")[0].split())


def test_reserved_memory_has_all_its_pages() -> None:
    """So no capture waits for page faults."""
    memory = reserved_memory(NBYTES)
    assert os.fstat(memory.fd).st_blocks * 512 >= NBYTES
    assert bytes(memory.view) == bytes(NBYTES)


@pytest.mark.parametrize(
    "mapped",
    [
        lambda: reserved_memory(0),
        lambda: Memory(sealed_memory(0), 0),
        lambda: Arena(0, 1),
    ],
)
def test_memory_of_no_bytes_is_an_error_of_the_system(mapped: Callable[[], object]) -> None:
    """Mapping no bytes fails like any mapping that is refused, and leaks no descriptor."""
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="0 bytes cannot be mapped"):
        mapped()
    assert os.listdir("/proc/self/fd") == before


def test_memory_that_could_not_be_mapped_closes_its_descriptor_once() -> None:
    """By the time it is collected, its number may belong to another file."""
    fd = sealed_memory(0)
    with pytest.raises(OSError, match="0 bytes") as raised:
        Memory(fd, 0)
    other = os.open("/dev/null", os.O_RDONLY)
    assert other == fd
    del raised
    gc.collect()
    os.close(other)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages"
)
@pytest.mark.parametrize("writable", [True, False])
def test_each_mapping_asks_for_huge_pages_and_stays_out_of_forks(writable: bool) -> None:
    """A second mapping of huge pages must also ask for them."""
    memory = Memory(sealed_memory(NBYTES), NBYTES, writable)
    assert {"hg", "dc"} <= flags_of(memory)
    assert memory.address % (2 << 20) == 0, "huge pages can be mapped"
    assert memory.view.readonly is not writable
    assert len(memory.view) == NBYTES


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists()
    or tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1),
    reason="a kernel that gives shared memory huge pages only if its administrator wants it",
)
@pytest.mark.parametrize("limit_s", [10.0, -1.0])
def test_reserved_memory_consists_of_huge_pages_unless_they_take_long(
    monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> None:
    """Reading it through its descriptor takes a third of the time, and mapping it almost none."""
    monkeypatch.setattr(arenas_memory, "_RESERVED_HUGE_S_MAX", limit_s)
    memory = reserved_memory(NBYTES + (32 << 20))
    assert not any(memory.view[:: 1 << 10])
    _, _, after = Path("/proc/self/smaps").read_text().partition(f"\n{memory.address:x}-")
    mapped = re.search(r"^ShmemPmdMapped: +(\d+) kB$", after, re.MULTILINE)
    assert mapped is not None
    huge_nbytes = int(mapped[1]) << 10
    assert huge_nbytes == (36 << 20 if limit_s > 0 else 16 << 20), "it stops after a slow call"


@dataclass
class Runtime:
    """A stand-in for CUDA's runtime. It records registrations, and answers with ``code``."""

    code: int = 0
    registered: dict[int, int] = field(default_factory=dict)
    was_mapped: list[bool] = field(default_factory=list)
    """True if the memory was still mapped at each unregistration."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1
        if self.code == 0:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        maps = Path("/proc/self/maps").read_text()
        self.was_mapped.append(f"{address:x}-" in maps)
        del self.registered[address]
        return 0


def test_memory_is_registered_until_it_is_unmapped() -> None:
    """A buffer keeps it mapped and registered. It is unregistered while it is still mapped."""
    runtime = Runtime()
    memory = reserved_memory(NBYTES)
    address = memory.address
    assert pin(memory, Cuda(runtime))
    assert runtime.registered == {address: NBYTES}
    buffer = memory.buffer(0, 4096)
    memory.close()
    del memory
    assert runtime.registered == {address: NBYTES}
    del buffer
    assert runtime.was_mapped == [True]
    assert not runtime.registered
    assert f"{address:x}-" not in Path("/proc/self/maps").read_text()


def test_memory_that_cannot_be_registered_is_used_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says each reason once, whether CUDA refuses or torch has no such call."""
    memory = reserved_memory(NBYTES)
    with caplog.at_level(logging.WARNING):
        for runtime in (Runtime(code=2), Runtime(code=2), object()):
            assert not pin(memory, Cuda(runtime))
    first, second = (record.message.rpartition(": ")[2] for record in caplog.records)
    assert first == "cudaHostRegister has returned 2"
    assert "has no attribute" in second
    memory.view[:4] = b"kept"
    assert bytes(memory.buffer(0, 4).view) == b"kept"


def test_a_process_that_does_not_use_cuda_registers_nothing() -> None:
    """It does not start to use CUDA either."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_initialized():
        pytest.skip("this process uses CUDA")
    memory = reserved_memory(NBYTES)
    assert not pin(memory)
    assert memory.before_unmapping is None
    assert not torch.cuda.is_initialized()


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
    """Otherwise the images of all ranks would be on that rank's node."""
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
