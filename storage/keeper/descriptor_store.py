"""Keeps images alive in systemd's descriptor store while a keeper service restarts.

The next keeper gets back the descriptors of images and labels, even if no trainer is left. For the
protocol see sd_notify(3) and sd_listen_fds(3): a service sends descriptors under a name, removes
them by that name, and receives the stored ones when it is started again. An image and its label
share one name and come back in any order.
The store may be out of date when a keeper dies, so an image must be verified before it is used.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping, Sequence

from .slot_memory import PooledSlot, SlotPool

_FIRST_FD = 3
_AGREED = "agreed"
_SEALED = "sealed"

_log = logging.getLogger(__name__)


class DescriptorStore:
    """Descriptor store of this service. ``address``: systemd's notification socket; ``kept``:
    (name, descriptor) pairs that systemd passed to this process."""

    def __init__(self, address: str, kept: Sequence[tuple[str, int]]) -> None:
        self._address = address
        self._handed = list(kept)
        self._names: dict[int, str] = {}
        """Names of stored images, by the inode of their memory, which stays the same across
        keepers."""

    @classmethod
    def of_environment(cls, environment: MutableMapping[str, str]) -> DescriptorStore | None:
        """Return the store that systemd announced in ``environment``, or None if this process is no
        service. Removes the variables, which child processes must not inherit."""
        address = environment.pop("NOTIFY_SOCKET", "")
        pid = environment.pop("LISTEN_PID", "")
        count = environment.pop("LISTEN_FDS", "")
        names = environment.pop("LISTEN_FDNAMES", "").split(":")
        if address[:1] not in ("/", "@"):
            return None
        fds: Sequence[int] = ()
        if pid == str(os.getpid()) and count.isdecimal():
            fds = range(_FIRST_FD, _FIRST_FD + int(count))
        for fd in fds:
            os.set_inheritable(fd, False)
        return cls(address, [(name, fd) for name, fd in zip(names, fds, strict=False)])

    def recall(self, pool: SlotPool, run: str) -> None:
        """Add the stored images of ``run`` to ``pool``, and drop everything else from the store."""
        by_name: dict[str, list[int]] = {}
        for name, fd in self._handed:
            by_name.setdefault(name, []).append(fd)
        self._handed = []
        for name, fds in by_name.items():
            slot = pool.take_over(fds, run, agreed=name.startswith(_AGREED))
            if slot is None:
                self._forget(name)
            else:
                self._names[_number_of(slot)] = name

    def keep(self, pool: SlotPool) -> None:
        """Make the store match the held images. A failure is logged and retried at the next
        call."""
        wanted = {_number_of(slot): (slot, agreed) for slot, agreed in pool.held()}
        for number, name in list(self._names.items()):
            if number not in wanted or name != _name_of(number, *wanted[number]):
                if not self._forget(name):
                    return
                del self._names[number]
        for number, (slot, agreed) in wanted.items():
            if number not in self._names:
                name = _name_of(number, slot, agreed)
                fds = [slot.memory.fd, slot.label_fd]
                if not self._send(f"FDSTORE=1\nFDNAME={name}", fds):
                    return
                self._names[number] = name

    def say_ready(self) -> None:
        """Tell systemd that trainers can connect."""
        self._send("READY=1")

    def _forget(self, name: str) -> bool:
        return self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def _send(self, text: str, fds: Sequence[int] = ()) -> bool:
        """Send a message without blocking, and return whether that worked."""
        address = self._address
        if address.startswith("@"):
            address = "\0" + address[1:]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.connect(address)
                socket.send_fds(sock, [text.encode()], fds)
        except OSError as error:
            _log.warning("cannot reach the descriptor store of systemd: %s", error)
            return False
        return True


def _name_of(number: int, slot: PooledSlot, agreed: bool) -> str:
    """Return the name of a stored image. It identifies the contents, since one memory holds
    different images over time."""
    assert slot.label is not None
    id = slot.label.generation
    return f"{_AGREED if agreed else _SEALED}-{number}-{id.epoch}-{id.step}"


def _number_of(slot: PooledSlot) -> int:
    return os.fstat(slot.memory.fd).st_ino
