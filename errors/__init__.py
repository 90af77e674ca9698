"""All errors that Holdfast raises, in one tree, grouped by the handler's next action.

    HoldfastError
    ├── UsageError (ValueError)         fix the call; nothing was read or written
    │   ├── UriError                        the URI: unknown scheme, unknown option, unsafe key
    │   ├── StateError (TypeError)          the state holds an unsupported item; names its path
    │   └── MismatchError                   target and checkpoint differ; carries every difference
    ├── CheckpointError                 choose another checkpoint
    │   ├── NotACheckpointError (FileNotFoundError)   nothing is committed under this URI
    │   ├── DamagedError                    bytes changed; names file, offset and tensor
    │   ├── UnsupportedFormatError          written by a newer version; this reader refuses to guess
    │   └── ReplacedError                   another save replaced it while it was being read
    ├── SaveError                       save again; the previous checkpoint is untouched
    │   ├── CoverageError                   shards do not cover every element exactly once
    │   ├── InvisibleFilesError             ranks do not see each other's files
    │   └── SupersededError                 another save to the same URI took over
    ├── CoordinationError               look at the named rank
    │   ├── RankFailedError                 another rank reported a failure; carries its message
    │   └── DeadlineError (TimeoutError)    a rank or an operation did not respond in time
    ├── TelemetryError                  do without: the checkpoint does not depend on it
    └── StorageError (OSError)          look at the storage
        ├── NotFoundError (FileNotFoundError)         no such key
        ├── ExistsError (FileExistsError)             exclusive create, and the key exists
        ├── AccessError (PermissionError)             refused, or an unexpected symbolic link
        ├── FullError                                 no space, quota or file size limit
        └── StorageDownError (ConnectionError)        unreachable, timed out, or an I/O error
            └── BusyError                                 the storage asks for a pause

Each error carries ``uri`` (redacted), ``key``, ``rank`` and ``advice`` if known, and its cause as
``__cause__``. ``temporary`` says whether the same operation may succeed if retried unchanged; only
a retry layer acts on it. Errors survive pickling by others (a process pool, a test runner): their
constructors take only keywords besides the message.

Scope: this room holds nothing but the tree. Every other room may import it; it imports none of
them.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AccessError",
    "BusyError",
    "CheckpointError",
    "CoordinationError",
    "CoverageError",
    "DamagedError",
    "DeadlineError",
    "ExistsError",
    "FullError",
    "HoldfastError",
    "InvisibleFilesError",
    "MismatchError",
    "NotACheckpointError",
    "NotFoundError",
    "RankFailedError",
    "ReplacedError",
    "SaveError",
    "StateError",
    "StorageDownError",
    "StorageError",
    "SupersededError",
    "TelemetryError",
    "UnsupportedFormatError",
    "UriError",
    "UsageError",
]


class HoldfastError(Exception):
    """Base of all errors raised by Holdfast.

    ``message`` says what happened, in one sentence; the keywords say where, and what to do next.
    ``str()`` joins them.
    """

    temporary = False

    def __init__(
        self,
        message: str,
        *,
        uri: str | None = None,
        key: str | None = None,
        rank: int | None = None,
        advice: str | None = None,
        temporary: bool | None = None,
    ) -> None:
        # Only the message goes to args: OSError would read two positional arguments as (errno,
        # strerror).
        super().__init__(message)
        self.message = message
        self.uri = uri
        self.key = key
        self.rank = rank
        self.advice = advice
        if temporary is not None:
            self.temporary = temporary

    def __str__(self) -> str:
        where = [
            f"{name} {value}"
            for name, value in (("rank", self.rank), ("key", self.key), ("in", self.uri))
            if value not in (None, "")
        ]
        text = self.message
        if where:
            text += f" ({', '.join(where)})"
        if self.advice:
            text += f". {self.advice}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.message,), dict(self.__dict__))


class UsageError(HoldfastError, ValueError):
    """The call cannot be right as it stands. Raised before any I/O."""


class UriError(UsageError):
    """No driver can serve the URI, or a key below it."""


class StateError(UsageError, TypeError):
    """The state contains an item that cannot be saved; the message names its path."""


class MismatchError(UsageError):
    """The target does not fit the checkpoint.

    The message has the first differences of each kind; ``differences`` lists every one, in the same
    order.
    """

    def __init__(self, message: str, *, differences: tuple[str, ...] = (), **where: Any) -> None:
        super().__init__(message, **where)
        self.differences = differences


class CheckpointError(HoldfastError):
    """The requested data cannot be read from this checkpoint."""


class NotACheckpointError(CheckpointError, FileNotFoundError):
    """No checkpoint is committed under this URI."""


class DamagedError(CheckpointError):
    """Stored bytes differ from the bytes written. They were not returned as values.

    ``image``: the rank of the image and the first damaged byte of it, if known.
    """

    def __init__(self, message: str, *, image: tuple[int, int] | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.image = image


class UnsupportedFormatError(CheckpointError):
    """The checkpoint has a format version or a feature that this reader does not know."""


class ReplacedError(CheckpointError):
    """The checkpoint was replaced by another save while it was being read."""

    temporary = True


class SaveError(HoldfastError):
    """The save did not commit. The previous checkpoint, if any, is untouched."""


class CoverageError(SaveError):
    """An element of a tensor would be stored never, or more than once."""


class InvisibleFilesError(SaveError):
    """The committing rank does not see the files of another rank."""


class SupersededError(SaveError):
    """Another save to the same URI began later and took over, or committed first.

    Also raised if the files of this save were deleted while it was running.
    """


class CoordinationError(HoldfastError):
    """The ranks of a job could not act together."""


class RankFailedError(CoordinationError):
    """Another rank failed; ``rank`` names it and the message repeats its own."""


class DeadlineError(CoordinationError, TimeoutError):
    """A rank or an operation did not answer in time; the message names it."""


class TelemetryError(HoldfastError):
    """The telemetry of a save cannot be read. The checkpoint itself does not depend on it."""


class StorageError(HoldfastError, OSError):
    """A driver could not perform an operation."""


class NotFoundError(StorageError, FileNotFoundError):
    """No object has this key. ``taken_by``: what has its name instead, such as ``a folder``."""

    def __init__(self, message: str, *, taken_by: str | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.taken_by = taken_by


class ExistsError(StorageError, FileExistsError):
    """An exclusive put found the key taken."""


class AccessError(StorageError, PermissionError):
    """The storage refused, or the key would leave its root.

    ``unlisted``: folders that a listing could not enter, if it has listed everything else.
    """

    def __init__(self, message: str, *, unlisted: tuple[str, ...] = (), **where: Any) -> None:
        super().__init__(message, **where)
        self.unlisted = unlisted


class FullError(StorageError):
    """The storage has no room."""


class StorageDownError(StorageError, ConnectionError):
    """The storage cannot be reached, or its device fails."""

    temporary = True


class BusyError(StorageDownError):
    """The storage asks for fewer requests. ``retry_after_s``: the requested pause, if any."""

    def __init__(self, message: str, *, retry_after_s: float | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.retry_after_s = retry_after_s
