"""Tensors on an accelerator: read on a stream of our own, into pinned memory, beside the
trainer's streams.

What the trainer has queued when a save begins is waited for, by events on its streams; what it
queues later is not. Copies go through one stream per device. A thread that copies waits for that
stream alone, asleep, without the GIL.
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
from .bits import as_bits, pack

__all__ = [
    "Queued",
    "allocate_pinned",
    "beside",
    "copied_to_host",
    "devices_of",
    "is_capturing",
    "pack_windows",
    "refuse_capture",
    "refuse_forked_child",
]

_log = logging.getLogger(__name__)
_streams: dict[torch.device, torch.cuda.Stream] = {}
_lock = new_lock()


def devices_of(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """The accelerators that any of ``tensors`` is on."""
    return tuple(dict.fromkeys(t.device for t in tensors if t.is_cuda))


def is_capturing() -> bool:
    """Whether this thread captures a CUDA graph. A child that was forked after CUDA began may not
    even ask CUDA that, and captures nothing."""
    began = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return began and torch.cuda.is_current_stream_capturing()


def refuse_capture(capturing: Callable[[], bool] = is_capturing) -> None:
    """Raise UsageError while this thread captures a CUDA graph: what it queues does not run yet, so
    the state has no values, and to wait for an event would break the capture."""
    if capturing():
        raise UsageError(
            "a save was begun within the capture of a CUDA graph",
            advice="Save before the capture begins, or after it has ended.",
        )


def refuse_forked_child() -> None:
    """Raise UsageError where CUDA cannot be used because this process was forked after CUDA had
    begun in its parent. For a state that needs CUDA."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise UsageError(
            f"the state needs CUDA, which does not work in this process: {error}",
            advice="Start the process by spawn rather than fork, or leave the tensors on a device "
            "and RNGState out of what it saves and loads.",
        ) from error


def copied_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, for which a full device needs no memory: torch packs a strided
    tensor on its device first, and resolves conjugation there. So this copies the whole run of
    memory that the tensor spans."""
    shape, strides = tensor.shape, tensor.stride()
    if not tensor.numel():
        return torch.empty(shape, dtype=tensor.dtype, device="cpu")
    span = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    host = torch.empty(span, dtype=tensor.dtype, device="cpu")
    host.copy_(tensor.detach().as_strided((span,), (1,)))
    return host.as_strided(shape, strides)


def pack_windows(
    windows: Sequence[torch.Tensor],
    to: torch.Tensor,
    pack: Callable[[Iterable[torch.Tensor], torch.Tensor], None] = pack,
) -> None:
    """Copy the bits of ``windows`` to ``to``, see :func:`.bits.pack`; by way of host memory if
    their device is full."""
    try:
        pack(map(as_bits, windows), to)
    except torch.OutOfMemoryError:
        pack(map(as_bits, map(copied_to_host, windows)), to)


@dataclass(frozen=True, slots=True)
class Queued:
    """What a thread had given its devices to do, at one moment."""

    events: tuple[torch.cuda.Event, ...]

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> Queued:
        """By the caller's current streams. Where CUDA is in use, its present device counts as well:
        tensors in host memory may be the target of a copy that has not ended."""
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
        """Return when all of it is done. Sleeps, and holds no lock of Python's."""
        for event in self.events:
            event.synchronize()


@contextlib.contextmanager
def beside(devices: Iterable[torch.device]) -> Iterator[None]:
    """What this thread asks of ``devices`` within the block goes beside their other streams, and
    has ended at its end.

    Tensors that are read must stay alive until then, and be written: see :class:`Queued`.
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
    """Memory that devices copy into at full speed, page-aligned; ordinary memory where the system
    has no more to pin."""
    try:
        pinned = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        _log.warning(
            "no memory could be pinned, so copies from the device are slower: %s",
            str(error).splitlines()[0],
        )
        return HostBuffer.allocate(nbytes)
    return HostBuffer(pinned.numpy().data, pinned.data_ptr())  # the view keeps the tensor alive
