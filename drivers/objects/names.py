"""Splitting URIs into bucket and root, and encoding keys as object names."""

from __future__ import annotations

from urllib.parse import quote, unquote

from ...errors import UriError
from ..contract import check_key
from ..uri import WHERE_SECRETS_GO, Uri


def split_location(uri: Uri) -> tuple[str, str]:
    """Return the bucket of a URI, and the root: the key prefix as the store spells it, without
    surrounding slashes; "" if there is none. Raises UriError."""
    bucket, _, path = uri.location.partition("/")
    if not bucket:
        raise UriError(
            f"{uri.scheme}:// does not name a bucket",
            uri=uri.redacted,
            advice=f"Write {uri.scheme}://bucket/run.",
        )
    if "@" in bucket:
        raise UriError("a URI must not contain a user", uri=uri.redacted, advice=WHERE_SECRETS_GO)
    try:
        root = unquote(path.strip("/"), errors="strict")
    except UnicodeDecodeError as error:
        raise UriError("the path is not UTF-8", uri=uri.redacted) from error
    return bucket, encoded(check_key(root, uri=uri.redacted)) if root else ""


def encoded(key: str) -> str:
    """Percent-encode unprintable characters, which XML listings cannot carry, and so "%" too. Also
    encodes the backslash, which some stores treat as a slash. Raises UnicodeEncodeError for invalid
    Unicode."""
    if key.isprintable() and "%" not in key and "\\" not in key:
        return key
    return "".join(c if c.isprintable() and c not in "%\\" else quote(c, safe="") for c in key)
