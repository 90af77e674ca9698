"""Translation of errno values into Holdfast's errors."""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import (
    AccessError,
    ExistsError,
    FullError,
    NotFoundError,
    StorageDownError,
    StorageError,
)

_KINDS: dict[type[StorageError], tuple[int, ...]] = {
    NotFoundError: (errno.ENOENT,),
    ExistsError: (errno.EEXIST,),
    AccessError: (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EROFS),
    FullError: (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    StorageDownError: (
        errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENXIO, errno.ENODEV, errno.EREMOTEIO,
        errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH,
        errno.ESHUTDOWN,
    ),
}  # fmt: skip
_NAMES = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
_KIND_OF = {code: kind for kind, codes in _KINDS.items() for code in codes}

_ADVICE = {
    errno.EACCES: "Check owner and mode of the folder.",
    errno.EPERM: "Check owner, mode and attributes of the folder.",
    errno.ELOOP: (
        "Symbolic links are not followed below the root; make the link's target the "
        "root, or remove the link."
    ),
    errno.EROFS: (
        "The file system is mounted read-only; after an I/O error the kernel does that by itself."
    ),
    errno.ENOSPC: "Free some space (and inodes: df -i), or keep fewer checkpoints.",
    errno.EDQUOT: "The quota is used up: free some space, or keep fewer checkpoints.",
    errno.EFBIG: "The file is larger than ulimit -f or the file system allows.",
    errno.EIO: "The device failed; see the kernel's log.",
    errno.ESTALE: (
        "The file server has forgotten this file: it was removed, or the server restarted."
    ),
    errno.EMFILE: "Too many open files: raise ulimit -n.",
    errno.ENFILE: "Too many open files on this host: raise fs.file-max.",
    errno.ENAMETOOLONG: "Most file systems allow 255 bytes per name.",
    errno.EISDIR: "A folder has this name; objects lie below it.",
    errno.ENOTDIR: "A part of the key names a file; nothing can lie below it.",
}


class NotAnObject(FileNotFoundError):
    """A folder or special file has the name of an object."""

    def __init__(self, mode: int, key: str) -> None:
        self.kind = _NAMES.get(stat.S_IFMT(mode), "a device")
        super().__init__(errno.ENOENT, f"{self.kind} has this name", key)


@contextmanager
def storage_errors(doing: str, uri: str, key: str) -> Iterator[None]:
    """Translate an OSError of the body into a StorageError with ``uri`` (redacted), ``key`` and
    cause. ``doing`` starts the message, for example "write". A StorageError passes unchanged."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        code = error.errno or 0
        message = f"{doing} failed: {error.strerror or error}"
        if code in errno.errorcode:
            message += f" [{errno.errorcode[code]}]"
        if isinstance(error, NotAnObject):
            raise NotFoundError(message, taken_by=error.kind, uri=uri, key=key) from error
        kind = _KIND_OF.get(code, StorageError)
        raise kind(message, uri=uri, key=key, advice=_ADVICE.get(code)) from error
