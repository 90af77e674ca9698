"""Measures steps in a keeper's memory and resumes from it, next to memcpy, a save to storage, and a
cold load by DCP.

The keeper runs in its own process, as for a trainer. *memcpy* copies the same number of bytes
between warm buffers, in pieces of 16 MiB and with as many threads as a capture; larger pieces would
bypass the processor's cache. Captures go into slots that were filled before. A resumed state is
compared with the kept one. Another program measures parity. The peak memory is about ten times the
size of the state.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import holdfast

from ..core.decoded_json import int_in, object_in
from ..drivers.uri import parse
from ..storage.arenas.client import status_of, stop
from ..storage.arenas.folder import KEEPER_DIR_VARIABLE, KeeperFolder, keeper_folders
from ..storage.arenas.messages import Flush
from ..storage.runtime.buffers import HostBuffer
from ..storage.runtime.engine import CPU_THREADS, start
from ..storage.state.bits import copy_memory
from ..storage.training.run_identity import RUN_KEY
from .contest import HEADER, Contestant, contest, rows
from .machine import drop_caches, sync_tree
from .peers.through_dcp import THROUGH_DCP
from .program import Options, Program
from .report import Report
from .states import State, build, digests, nbytes_of, zero

PIECE_NBYTES = 16 << 20
FLUSHED_S = 120.0
WARM_UP_S = 300.0
WARM_UP_STEPS = 4
"""Steps after which all slots are filled."""
LOOK_S = 0.01
MEMCPY = "limit"
CAPTURE = "captured"
AGREED = "captured and agreed"
RESTORE = "holdfast"
FLUSH = "memory to storage"
SAVE = "save to storage"
DCP = "DCP's cold load"


class _Copies:
    """Copies between two warm buffers."""

    def __init__(self, nbytes: int) -> None:
        self._source = HostBuffer.allocate(nbytes)
        self._target = HostBuffer.allocate(nbytes)
        for buffer in (self._source, self._target):
            # Memory that was never written is a single page of zeros, read from the cache.
            ctypes.memset(buffer.address, 1, nbytes)
        self._nbytes = nbytes
        self._threads = ThreadPoolExecutor(CPU_THREADS)

    def run(self) -> None:
        """Copy everything once."""
        list(self._threads.map(self._piece, range(0, self._nbytes, PIECE_NBYTES)))

    def _piece(self, start: int) -> None:
        nbytes = min(PIECE_NBYTES, self._nbytes - start)
        copy_memory(self._target.address + start, self._source.address + start, nbytes)


class _Kept:
    """A run that keeps its steps in memory."""

    def __init__(self, uri: Path, state: State) -> None:
        self._state = state
        self._uri = uri
        self._run = holdfast.Checkpointer(
            uri, keeper=holdfast.Keeper(linger="10min"), lazy=False, grace_s=None
        )
        self._step = 0
        self._handle: holdfast.SaveHandle | None = None

    def warm_up(self, steps: int) -> None:
        """Keep this many steps. The keeper skips steps until its memory is ready, which may take
        long on a freshly started system."""
        until_s = time.monotonic() + WARM_UP_S
        while self._run.counters.kept < steps:
            if time.monotonic() > until_s:
                raise AssertionError(f"too few steps are kept: {self._run.counters}")
            self._step += 1
            self._handle = self._run.step(self._step, self._state)
            if self._handle is not None:
                self.settle()

    def capture(self) -> None:
        """Keep a step, and return when the state may change."""
        self._step += 1
        self._handle = self._run.step(self._step, self._state)
        if self._handle is None:
            raise AssertionError(f"step {self._step} is not kept: {self._run.counters}")
        self._handle.captured.wait()

    def settle(self) -> None:
        """Wait until the step is agreed on."""
        assert self._handle is not None
        self._handle.agreed.wait()

    def agree(self) -> None:
        """Keep a step, and return when it survives this process."""
        self.capture()
        self.settle()

    def flush(self, uri: Path) -> None:
        """Flush the last step from the keeper's memory to storage."""
        memory = self._run._memory
        assert memory is not None
        before = self._flushed()
        if not start(memory.arena.flush(Flush(self._step, str(uri)))).result():
            raise AssertionError(f"the keeper cannot flush: {memory.arena.problem}")
        until_s = time.monotonic() + FLUSHED_S
        while self._flushed() == before:
            if time.monotonic() > until_s:
                raise AssertionError("the step did not reach storage in time")
            time.sleep(LOOK_S)

    def _flushed(self) -> int:
        """Return the number of steps that the keeper has flushed."""
        run = json.loads((self._uri / RUN_KEY).read_text())["run"]
        status = status_of(KeeperFolder.of(run))
        assert status is not None
        return int_in(object_in(status["counters"], "counters")["flushed"], "flushed")

    def close(self) -> None:
        """Disconnect from the keeper."""
        self._run.close()


def _resume(uri: Path, state: State) -> None:
    with holdfast.Checkpointer(uri, keeper="auto", grace_s=None) as run:
        run.resume(state)
        if run.resumed is None or run.resumed.tier != "memory":
            raise AssertionError(f"the resume did not come from memory: {run.resumed}")


def _compare(state: State, expected: dict[str, bytes]) -> None:
    if digests(state) != expected:
        raise AssertionError("the loaded state is not the kept one")


def _contestants(kept: _Kept, folder: Path, state: State) -> list[Contestant]:
    expected = digests(state)
    kept.warm_up(WARM_UP_STEPS)
    left = _Kept(folder / "left", state)
    left.warm_up(1)
    left.close()
    (dcp,) = [peer for peer in THROUGH_DCP if peer.name == "DCP"]
    cold = parse(folder / "dcp")
    dcp.save(cold, state)
    sync_tree(folder)

    def make_cold() -> None:
        zero(state)
        drop_caches(folder / "dcp")

    compare = partial(_compare, state, expected)
    saved = folder / "saved"
    return [
        Contestant(MEMCPY, _Copies(nbytes_of(state)).run),
        Contestant(CAPTURE, kept.capture, after=kept.settle),
        Contestant(AGREED, kept.agree),
        Contestant(
            RESTORE,
            partial(_resume, folder / "left", state),
            before=partial(zero, state),
            after=compare,
        ),
        Contestant(DCP, partial(dcp.load, cold, state), make_cold, compare),
        Contestant(
            FLUSH,
            partial(kept.flush, folder / "from memory"),
            before=kept.agree,
            after=partial(sync_tree, folder),
        ),
        Contestant(SAVE, partial(holdfast.save, saved, state), after=partial(sync_tree, folder)),
    ]


@contextmanager
def own_keepers() -> Iterator[None]:
    """Use separate keepers for this program, and stop them at the end."""
    before = os.environ.get(KEEPER_DIR_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="hk") as base:
        os.environ[KEEPER_DIR_VARIABLE] = base
        try:
            yield
        finally:
            for folder in keeper_folders(Path(base)):
                stop(folder)
            del os.environ[KEEPER_DIR_VARIABLE]
            if before is not None:
                os.environ[KEEPER_DIR_VARIABLE] = before


def _report(given: Options, folder: Path) -> Report:
    state = build(given.gib)
    with own_keepers(), closing(_Kept(folder / "kept", state)) as kept:
        contestants = _contestants(kept, folder, state)
        found = contest(contestants, given.runs, given.settle_s)
    nbytes = nbytes_of(state)
    return Report(
        f"Steps in memory: {nbytes / 1e9:.2f} GB in {len(digests(state))} tensors, one process, "
        f"{given.runs} rounds",
        HEADER,
        rows(found, nbytes),
        series=found,
    )


main = Program("keeper", __doc__, _report, gib=2.0)


if __name__ == "__main__":
    sys.exit(main())
