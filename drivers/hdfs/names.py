"""From keys to paths of HDFS and back, and the names of what is unfinished."""

from __future__ import annotations

import re
import secrets

from ...errors import UriError
from ..contract import check_key

__all__ = ["Names", "belongs_to", "is_temporary", "key_name", "path_name", "temporary_name"]

NAME_NBYTES_MAX = 255
"""Unless the name node's dfs.namenode.fs-limits.max-component-length says otherwise."""

_TEMPORARY = re.compile(r"\.[\w.-]*\.[0-9a-f]{16}\.\d+\.tmp", re.ASCII)
_ODD = re.compile(r"[^\w.-]", re.ASCII)


def path_name(name: str) -> str:
    """One part of a key as HDFS may hold it: it refuses ``:`` in names, so that is written ``%3A``,
    and ``%`` as ``%25``."""
    return name.replace("%", "%25").replace(":", "%3A")


def key_name(name: str) -> str | None:
    """The part of a key that is stored under ``name``; None where :func:`path_name` would never
    have made it."""
    plain = name.replace("%3A", ":").replace("%25", "%")
    if path_name(plain) == name:
        return plain
    return None


def temporary_name(name: str) -> str:
    """A new name, but for its end ``.0.tmp``, ``.1.tmp``, …, for what is to become ``name``.

    Without commas, which separate paths in a request of WebHDFS.
    """
    return f".{_ODD.sub('_', name)[:48]}.{secrets.token_hex(8)}"


def is_temporary(name: str) -> bool:
    """Whether a file of this name is an upload, unfinished or dead, rather than an object."""
    return _TEMPORARY.fullmatch(name) is not None


def belongs_to(temporary: str, name: str) -> bool:
    """Whether ``temporary`` may be an upload to ``name``: names that differ in odd signs only are
    not told apart."""
    return is_temporary(temporary) and temporary.startswith(f".{_ODD.sub('_', name)[:48]}.")


class Names:
    """Keys below one root. ``uri`` is for messages."""

    def __init__(self, root: str, uri: str) -> None:
        """``root``: an absolute path, decoded; "/" is the whole file system."""
        self.root = root.rstrip("/")
        self._uri = uri

    def path(self, key: str) -> str:
        """The path of an object. Raises UriError for a key that is unsafe, of temporary form, or no
        valid Unicode."""
        parts = check_key(key, uri=self._uri).split("/")
        if any(map(is_temporary, parts)):
            raise UriError(
                "names of this form are kept for unfinished uploads", uri=self._uri, key=key
            )
        try:
            lengths = [len(path_name(part).encode()) for part in parts]
        except UnicodeEncodeError as error:
            raise UriError(
                f"key {key!r} is no valid Unicode, which HDFS asks for", uri=self._uri, key=key
            ) from error
        if max(lengths) > NAME_NBYTES_MAX:
            raise UriError(f"HDFS allows {NAME_NBYTES_MAX} bytes per name", uri=self._uri, key=key)
        return "/".join([self.root, *map(path_name, parts)])

    def folder(self, prefix: str) -> str:
        """The path of what lies below ``prefix``, which may be ""."""
        if prefix:
            return self.path(prefix)
        return self.root or "/"

    def key(self, path: str) -> str | None:
        """The key of the object at ``path``; None for what is unfinished, or was not stored under a
        key."""
        names = path.removeprefix(self.root + "/").split("/")
        parts = [None if is_temporary(name) else key_name(name) for name in names]
        if None in parts:
            return None
        return "/".join(filter(None, parts))
