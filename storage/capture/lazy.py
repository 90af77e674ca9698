"""Copying while training goes on: from one optimizer step to the next, what an optimizer trains does not change.

At the call, only what may change sooner is copied: buffers of modules (a forward pass writes to them), numpy arrays, small
tensors that no optimizer is known to train, and what torch does not count the writes to. The rest is copied in the
background; Python's threads take short turns meanwhile. Before any ``torch.optim.Optimizer`` of the process steps, a hook
waits for what is left of it. Whoever writes to the state otherwise calls :func:`fence` first.

A write that came too early is found by torch's version counters: after each copy, when all is copied, when the trainer is
told so, and before the commit. Then the save fails, and names the tensor. Counters do not see writes through ``.data``, and
some fused kernels do not count. *Proof* compares digests instead, of all tensors, at the price of reading them twice more.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import SaveError
from ..frameworks.mesh import local_tensor
from .device import Queued, beside, devices_of
from .fingerprint import fingerprint
from .state import FlatState

__all__ = ["LazyCapture", "fence", "hook_optimizers"]

TURN_S = 0.0005
"""While something is copied: how long a thread of Python's may keep the interpreter's lock from one that waits for it."""

_under_way: dict[int, LazyCapture] = {}
_lock = threading.Lock()
_hooked = False


def fence() -> None:
    """Return when whatever lazy saves of this process still have to copy is copied; then the state may be written to.

    Optimizers call it before each step, by themselves. Does not raise: what became of a save, its handle tells.
    """
    for capture in list(_under_way.values()):
        capture.wait()


class LazyCapture:
    """What one save copies while training goes on. Made in the trainer's thread, at the call of the save."""

    def __init__(self, flat: FlatState, *, prove: bool) -> None:
        self._flat = flat
        self._copied = threading.Event()
        self._told = False
        self._torn: list[int] = []
        self.waited_s = 0.0
        """How long fences have waited for this."""
        self._watched = _Watched(flat, _copy_the_hasty(flat))
        if prove:
            Queued.now(devices_of(flat.locals)).wait()
        self._digests = self._digested() if prove else {}
        hook_optimizers()
        _under_way[id(self)] = self
        _turns.shorten(self)

    def check(self, rows: Iterable[int]) -> None:
        """Raise SaveError if a tensor of ``rows`` was written to since the call. For threads that copy."""
        _raise_for(self._paths(self._watched.changed_among(rows)))

    def copied(self) -> None:
        """For the engine: all is copied. Raises SaveError if anything has changed meanwhile."""
        _raise_for(self._paths(self._watched.changed()))
        if self._digests:
            now = self._digested()
            _raise_for(self._paths(row for row, digest in self._digests.items() if now[row] != digest))
        _turns.restore(self)
        self._copied.set()

    def confirm(self) -> None:
        """For the engine, before the commit: raise SaveError if anything was written to before the trainer could know that
        all was copied."""
        changed = self._watched.changed()
        _raise_for(self._paths(self._torn if self._told else changed))

    def end(self) -> None:
        """For the engine: the save is over, well or not. Nobody waits any more."""
        _turns.restore(self)
        self._copied.set()
        _under_way.pop(id(self), None)

    def wait(self) -> None:
        """Return when all is copied, or the save has failed: its own deadlines bound the wait."""
        began_s = time.perf_counter()
        self._copied.wait()
        self.waited_s += time.perf_counter() - began_s
        self.tell()

    def tell(self) -> None:
        """The trainer learns that all is copied, and is not in the middle of a write: one that began too early is counted
        by now. Later ones are as they should be."""
        with _lock:
            if self._told or not self._copied.is_set():
                return
            self._torn = self._watched.changed()
            self._told = True  # before the trainer writes: see confirm
        _under_way.pop(id(self), None)

    def _paths(self, rows: Iterable[int]) -> list[str]:
        return [self._flat.path(row) for row in rows]

    def _digested(self) -> dict[int, bytes]:
        with beside(devices_of(self._flat.locals)):
            return {row: fingerprint(self._flat, row) for row in self._watched.positions}


class _Turns:
    """How often Python's threads take turns: beside a trainer that computes in Python, a thread that copies waits for its
    turn at each chunk, for 5 ms by default, and so takes many times as long. Turns are short while anything is copied."""

    def __init__(self) -> None:
        self._for = set[int]()
        self._before_s = 0.0

    def shorten(self, capture: LazyCapture) -> None:
        """Until :meth:`restore` was called for ``capture``, too."""
        with _lock:
            if not self._for:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(TURN_S, self._before_s))
            self._for.add(id(capture))

    def restore(self, capture: LazyCapture) -> None:
        """As it was before. Called any number of times."""
        with _lock:
            if id(capture) in self._for:
                self._for.remove(id(capture))
                if not self._for:
                    sys.setswitchinterval(self._before_s)

    def forget(self) -> None:
        """In a forked child, which copies nothing."""
        if self._for:
            self._for.clear()
            sys.setswitchinterval(self._before_s)


_turns = _Turns()


class _Watched:
    """Tensors that must not be written to while they are copied. In columns, for the trainer waits for its looks at them."""

    def __init__(self, flat: FlatState, rows: Sequence[int]) -> None:
        locals_, origins = flat.locals, flat.origins
        inner = [row for row in rows if flat.parts[row] is not None]
        self._rows = [*rows, *inner]
        # A DTensor and its local tensor count apart: each those writes that go through itself.
        self._tensors = [*map(origins.__getitem__, rows), *map(locals_.__getitem__, inner)]
        self._versions = self._now()
        self.positions: dict[int, tuple[int, ...]] = {row: (at,) for at, row in enumerate(rows)}
        self.positions |= {row: (*self.positions[row], len(rows) + at) for at, row in enumerate(inner)}

    def changed(self) -> list[int]:
        """Rows that were written to."""
        now = self._now()
        return [] if now == self._versions else self.changed_among(self.positions)

    def changed_among(self, rows: Iterable[int]) -> list[int]:
        """Those of ``rows`` that were written to."""
        return [row for row in rows if any(map(self._is_newer, self.positions.get(row, ())))]

    def _is_newer(self, position: int) -> bool:
        return self._tensors[position]._version != self._versions[position]

    def _now(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]


def _raise_for(changed: Sequence[str]) -> None:
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise SaveError(
            f"{changed[0]}{more} changed while it was being copied",
            advice="Call fence() before anything but an optimizer's step writes to the state, or save with lazy=False.",
        )


def _copy_the_hasty(flat: FlatState) -> list[int]:
    """Copy what may change before the next step of an optimizer. Return the rows of the rest, which are to be watched."""
    locals_ = flat.locals
    hasty = _untrained(flat)
    hasty |= {row for row, local in enumerate(locals_) if local.is_inference()}  # torch does not count writes to them
    hasty |= {row for row, part in enumerate(flat.parts) if part is not None and flat.origins[row].is_inference()}
    parts = [part for walked in flat.modules for _, part in walked.parts if part._buffers]
    buffers = {_storage(_plain(b)) for part in parts for b in part._buffers.values() if b is not None}
    if buffers:
        hasty |= {row for row, local in enumerate(locals_) if _storage(local) in buffers}
    if flat.tree.arrays:
        hasty |= {row for row, name in enumerate(flat.names) if name in flat.tree.arrays}
    for row in hasty:
        locals_[row] = locals_[row].clone()
    return [row for row in range(len(locals_)) if row not in hasty] if hasty else [*range(len(locals_))]


def _untrained(flat: FlatState) -> set[int]:
    """The small rows but for those that only optimizers write to, as far as the state shows: parameters, which modules hand
    out as views, and the optimizers' own tensors, which they hand out themselves."""
    optimizers = [s.owner for s in flat.subtrees if isinstance(s.owner, torch.optim.Optimizer)]
    own = {id(value) for optim in optimizers for entry in optim.state.values() for value in entry.values()}
    left = [row for row in flat.small if id(flat.origins[row]) not in own]
    if not left:
        return set()
    parameters = {id(p): p for walked in flat.modules for _, p in walked.parameters}
    parameters |= {id(p): p for optim in optimizers for group in optim.param_groups for p in group["params"]}
    trained = {_plain(p).data_ptr() for p in parameters.values()}
    return {row for row in left if flat.locals[row].data_ptr() not in trained}


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def hook_optimizers() -> None:
    """Once per process: all optimizers, since whichever it is, it may train what is being saved. The first lazy save does
    it; a step that is compiled sees only what is hooked before."""
    global _hooked  # noqa: PLW0603
    if not _hooked:
        _hooked = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(*_: object) -> None:
    fence()


_before_step._torchdynamo_disable = True  # type: ignore[attr-defined]  # called from compiled code, not compiled into it

os.register_at_fork(after_in_child=_under_way.clear)
os.register_at_fork(after_in_child=_turns.forget)
