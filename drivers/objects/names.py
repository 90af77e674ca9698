"""From URIs to buckets, and from keys to names that object stores take."""

from __future__ import annotations

from urllib.parse import quote, unquote

from ...errors import UriError
from ..contract import check_key
from ..uri import WHERE_SECRETS_GO, Uri

__all__ = ["encoded", "split_location"]


def split_location(uri: Uri) -> tuple[str, str]:
    """(bucket, root): the root without slashes at its ends, decoded. Raises UriError."""
    bucket, _, path = uri.location.partition("/")
    if not bucket:
        raise UriError(
            f"{uri.scheme}:// names no bucket",
            uri=uri.redacted,
            advice=f"Write {uri.scheme}://bucket/run.",
        )
    if "@" in bucket:
        raise UriError("a URI is no place for a user", uri=uri.redacted, advice=WHERE_SECRETS_GO)
    try:
        root = unquote(path.strip("/"), errors="strict")
    except UnicodeDecodeError as error:
        raise UriError("the path is no UTF-8", uri=uri.redacted) from error
    return bucket, encoded(check_key(root, uri=uri.redacted)) if root else ""


def encoded(key: str) -> str:
    """``key`` with what cannot be printed percent-encoded, and so "%" too: listings, which are XML,
    could not carry it. The backslash likewise: some stores take it for a slash. Raises
    UnicodeEncodeError for what is no text."""
    if key.isprintable() and "%" not in key and "\\" not in key:
        return key
    return "".join(c if c.isprintable() and c not in "%\\" else quote(c, safe="") for c in key)
