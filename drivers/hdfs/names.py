"""Mapping between keys and HDFS paths, and the names of temporary files."""

from __future__ import annotations

import re
import secrets

from ...errors import UriError
from ..contract import check_name

NAME_NBYTES_MAX = 255
"""Default limit; the name node's dfs.namenode.fs-limits.max-component-length may differ."""

_TEMPORARY = re.compile(r"\.[\w.-]*\.[0-9a-f]{16}\.\d+\.tmp", re.ASCII)
_ODD = re.compile(r"[^\w.-]", re.ASCII)


def path_name(name: str) -> str:
    """Encode one part of a key for HDFS: ``:``, which it forbids, as ``%3A``, and ``%`` as
    ``%25``."""
    return name.replace("%", "%25").replace(":", "%3A")


def key_name(name: str) -> str | None:
    """Decode a name to the part of a key; None if :func:`path_name` cannot have produced it."""
    plain = name.replace("%3A", ":").replace("%25", "%")
    if path_name(plain) == name:
        return plain
    return None


def temporary_name(name: str) -> str:
    """Return a new temporary name for ``name``, without the suffix ``.0.tmp``, ``.1.tmp``, ….

    Contains no commas, which separate paths in WebHDFS requests.
    """
    return f".{_ODD.sub('_', name)[:48]}.{secrets.token_hex(8)}"


def is_temporary(name: str) -> bool:
    """Return whether this is the name of an unfinished or dead upload."""
    return _TEMPORARY.fullmatch(name) is not None


def belongs_to(temporary: str, name: str) -> bool:
    """Return whether ``temporary`` may be an upload to ``name``. Names that differ only in special
    characters are not distinguished."""
    return is_temporary(temporary) and temporary.startswith(f".{_ODD.sub('_', name)[:48]}.")


class Names:
    """Keys below one root. ``uri`` appears in messages."""

    def __init__(self, root: str, uri: str) -> None:
        """``root`` is an absolute, decoded path; "/" is the whole file system."""
        self.root = root.rstrip("/")
        self._uri = uri

    def path(self, key: str) -> str:
        """Return the path of an object. Raises UriError for a key that is unsafe, looks like a
        temporary file, or is not valid Unicode."""
        checked = check_name(key, uri=self._uri, is_reserved=is_temporary)
        names = [path_name(part) for part in checked.split("/")]
        if max(len(name.encode()) for name in names) > NAME_NBYTES_MAX:
            raise UriError(f"HDFS allows {NAME_NBYTES_MAX} bytes per name", uri=self._uri, key=key)
        return "/".join([self.root, *names])

    def folder(self, prefix: str) -> str:
        """Return the path of the folder ``prefix``, which may be ""."""
        if prefix:
            return self.path(prefix)
        return self.root or "/"

    def key(self, path: str) -> str | None:
        """Return the key of the object at ``path``; None for temporary files, and for names that
        are not encoded keys."""
        names = path.removeprefix(self.root + "/").split("/")
        parts = [None if is_temporary(name) else key_name(name) for name in names]
        if None in parts:
            return None
        return "/".join(filter(None, parts))
