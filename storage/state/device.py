"""Reads tensors on an accelerator, on a separate stream and into pinned memory.

Events on the trainer's streams make the copies wait for everything queued before the save, and for
nothing queued later. Copies go through one stream per device. A copying thread waits for that
stream only, asleep and without the GIL.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ...core.forks.renewal import new_lock
from ...errors import UsageError
from ..runtime.buffers import HostBuffer
from .bits import as_bits, pack, span_of

_log = logging.getLogger(__name__)
_streams: dict[torch.device, torch.cuda.Stream] = {}
_lock = new_lock()


def devices_of(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """Return the accelerators that hold any of ``tensors``."""
    return tuple(dict.fromkeys(t.device for t in tensors if t.is_cuda))


def is_capturing() -> bool:
    """Return whether this thread is capturing a CUDA graph.

    A child forked after CUDA was initialized must not even ask CUDA, and captures nothing.
    """
    began = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return began and torch.cuda.is_current_stream_capturing()


def refuse_capture(capturing: Callable[[], bool] = is_capturing) -> None:
    """Raise UsageError while this thread captures a CUDA graph.

    Captured work has not run yet, so the state has no values, and waiting for an event would break
    the capture.
    """
    if capturing():
        raise UsageError(
            "a save was started during the capture of a CUDA graph",
            advice="Save before the capture begins, or after it has ended.",
        )


def refuse_forked_child() -> None:
    """Raise UsageError if CUDA is unusable because this process was forked after its parent used
    CUDA.

    Call it only for a state that needs CUDA.
    """
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise UsageError(
            f"the state needs CUDA, which does not work in this process: {error}",
            advice="Start the process by spawn rather than fork, or leave the tensors on a device "
            "and RNGState out of what it saves and loads.",
        ) from error


def copied_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, without allocating on the device, which may be full.

    torch would pack a strided tensor on its device first, and resolve conjugation there. This
    copies the tensor's whole span of memory instead.
    """
    shape, strides = tensor.shape, tensor.stride()
    if not tensor.numel():
        return torch.empty(shape, dtype=tensor.dtype, device="cpu")
    span = span_of(tensor)
    host = torch.empty(span, dtype=tensor.dtype, device="cpu")
    host.copy_(tensor.detach().as_strided((span,), (1,)))
    return host.as_strided(shape, strides)


def pack_windows(
    windows: Sequence[torch.Tensor],
    to: torch.Tensor,
    pack: Callable[[Iterable[torch.Tensor], torch.Tensor], None] = pack,
) -> None:
    """Copy the bits of ``windows`` to ``to`` like :func:`.bits.pack`, through the host if the
    device is full."""
    try:
        pack(map(as_bits, windows), to)
    except torch.OutOfMemoryError:
        pack(map(as_bits, map(copied_to_host, windows)), to)


@dataclass(frozen=True, slots=True)
class Queued:
    """The work that a thread had queued on its devices at one moment."""

    events: tuple[torch.cuda.Event, ...]

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> Queued:
        """Record the caller's current streams on ``devices``.

        If CUDA is in use, its current device counts as well: a tensor in host memory may be the
        target of a pending copy.
        """
        present = []
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            present = [torch.device("cuda", torch.cuda.current_device())]
        events = []
        for device in dict.fromkeys([*devices, *present]):
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return cls(tuple(events))

    def wait(self) -> None:
        """Block until the work is done. Sleeps without the GIL."""
        for event in self.events:
            event.synchronize()


@contextlib.contextmanager
def beside(devices: Iterable[torch.device]) -> Iterator[None]:
    """Run this thread's work on ``devices`` on separate streams within the block, and wait for it.

    Tensors that are read must stay alive until the end, and their pending writes must have been
    waited for: see :class:`Queued`.
    """
    streams = [_stream(device) for device in devices]
    if not streams:
        yield
        return
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        try:
            yield
        finally:
            for stream in streams:
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record(stream)
                event.synchronize()


def _stream(device: torch.device) -> torch.cuda.Stream:
    with _lock:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _streams[device]


def allocate_pinned(nbytes: int) -> HostBuffer:
    """Return page-aligned memory that devices copy to at full speed.

    Falls back to ordinary memory if the system cannot pin more.
    """
    try:
        pinned = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        _log.warning(
            "no memory could be pinned, so copies from the device are slower: %s",
            str(error).splitlines()[0],
        )
        return HostBuffer.allocate(nbytes)
    return HostBuffer(pinned.numpy().data, pinned.data_ptr())  # the view keeps the tensor alive
