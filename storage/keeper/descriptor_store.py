"""What systemd keeps for the service that a keeper is: descriptors of images in memory and of their
labels, so that the keeper which is started next has them again, also where no trainer is left.

It is a protocol of a few lines, see sd_notify(3) and sd_listen_fds(3): a service sends descriptors
with a name, or that those of a name are not wanted any more, and gets what is kept when it is
started anew. An image and its label have one name, and come back in any order; nobody can change a
label, which tells it from an image.

What is kept may be out of date when the keeper dies: whoever goes on from an image verifies it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from ...errors import DamagedError
from ..arenas.label import LABEL_NBYTES_MAX, Label, check_sizes
from ..arenas.memory import Memory, check_sealed, read_sealed
from .held import Held, HeldSlot

__all__ = ["DescriptorStore", "KeptImage"]

_FIRST_FD = 3
_AGREED = "agreed"
_SEALED = "sealed"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class KeptImage:
    """An image that was kept, with its label; ``agreed``: the keeper before knew that it is agreed
    on."""

    slot: HeldSlot
    label: Label
    agreed: bool


class DescriptorStore:
    """That of this service: ``address`` is where systemd listens, ``kept`` what it has handed over,
    by name."""

    def __init__(self, address: str, kept: Sequence[tuple[str, int]]) -> None:
        self._address = address
        self._handed = list(kept)
        self._names: dict[int, str] = {}
        """What is kept, by the number of the image's memory, which it has as long as anyone has
        it."""

    @classmethod
    def of_environment(cls, environment: MutableMapping[str, str]) -> DescriptorStore | None:
        """As systemd has said when it started this process; None where it has not. What it has said
        is deleted from ``environment``: it is not for processes that this one starts."""
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

    def take(self, run: str) -> list[KeptImage]:
        """The images that were kept of this run. All else is given up."""
        by_name: dict[str, list[int]] = {}
        for name, fd in self._handed:
            by_name.setdefault(name, []).append(fd)
        self._handed = []
        found = []
        for name, fds in by_name.items():
            try:
                image = _image_of(name, fds, run)
            except (DamagedError, OSError, ValueError) as error:
                _log.warning("what was kept as %s is not an image of this run: %s", name, error)
                self._forget(name)
                continue
            self._names[_number_of(image.slot)] = name
            found.append(image)
        return found

    def keep(self, held: Held) -> None:
        """Have systemd keep what is held now, and nothing else. Where that fails, it is logged, and
        tried again at the next call."""
        wanted = {
            _number_of(slot): (slot, held.generations.is_restorable(slot.label.generation))
            for number, slot in held.slots.items()
            if slot.label is not None and held.generations.holds(number, slot.label.generation)
        }
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
        """Trainers can connect."""
        self._send("READY=1")

    def _forget(self, name: str) -> bool:
        return self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def _send(self, text: str, fds: Sequence[int] = ()) -> bool:
        """Whether systemd will receive it; it never waits for that."""
        address = self._address
        if address.startswith("@"):
            address = "\0" + address[1:]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.connect(address)
                socket.send_fds(sock, [text.encode()], fds)
        except OSError as error:
            _log.warning("systemd does not receive what is to be kept: %s", error)
            return False
        return True


def _name_of(number: int, slot: HeldSlot, agreed: bool) -> str:
    """It changes with whatever is to be known of what is kept: the same memory holds one image
    after the other."""
    assert slot.label is not None
    id = slot.label.generation
    return f"{_AGREED if agreed else _SEALED}-{number}-{id.epoch}-{id.step}"


def _number_of(slot: HeldSlot) -> int:
    return os.fstat(slot.memory.fd).st_ino


def _image_of(name: str, fds: Sequence[int], run: str) -> KeptImage:
    """The image of these descriptors, which are its own then; else they are closed. Raises OSError,
    ValueError, DamagedError."""
    left = list(fds)
    try:
        if len(fds) != 2:
            raise ValueError(f"{len(fds)} descriptors, and not two")
        label_fd, memory_fd = sorted(fds, key=_is_changeable)
        label = Label.decode(read_sealed(label_fd, LABEL_NBYTES_MAX))
        if label.run != run:
            raise ValueError(f"it is of the run {label.run}")
        check_sizes(label)
        check_sealed(memory_fd, label.nbytes)
        left.remove(memory_fd)
        memory = Memory(memory_fd, label.nbytes)
        left.remove(label_fd)
    finally:
        for fd in left:
            os.close(fd)
    return KeptImage(HeldSlot(memory, label, label_fd), label, name.startswith(_AGREED))


def _is_changeable(fd: int) -> bool:
    try:
        return not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
    except OSError as error:
        if error.errno == errno.EINVAL:  # it is something else altogether
            return True
        raise
