"""URIs: where a checkpoint lies and how to reach it. Parsing, printing, joining and redacting.

A URI is ``scheme://location?option=value&…``. A bare path is a ``file://`` URI, and a leading ``~``
in it is the home folder. Text that merely resembles a URI (``s3:/bucket``, which is also what
``pathlib.Path("s3://bucket")`` becomes) is an error, never a local folder named "s3:". A bare path
with options (``/a?threads=3``) is an error too, because it would be a folder of that name.

Empty parts and single dots in a location are ignored, for every scheme: ``s3://bucket//run/`` is
``s3://bucket/run``.

Scope: this module only knows which schemes have a local path as their location. The registry knows
which schemes and options exist.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from urllib.parse import quote, unquote, unquote_to_bytes

from ..errors import UriError
from .contract import check_key
from .schemes import SCHEMES

__all__ = [
    "WHERE_SECRETS_GO",
    "Uri",
    "divided",
    "has_password",
    "is_secret",
    "join",
    "parse",
    "redact",
    "root_key",
]

_URI = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.IGNORECASE | re.DOTALL)
_NEARLY_A_URI = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)

_OPTIONS = re.compile(r"\?[a-z_][a-z0-9_.-]*=", re.IGNORECASE)
"""End of a bare path that was meant to have options."""

# A password may contain an unencoded slash, or even "?" and "#", so a colon that does not start a
# port number hides everything up to the "@". The second alternative matches text that merely
# resembles a URI.
_USERINFO = re.compile(
    r"((?<=://)|\A[a-z][a-z0-9+.-]*:(?!//)/?)(?:[^/?#\s]*@|[^/?#\s@:\[]*:(?!\d+(?:[/?#]|$))(?:[^?#\s]*@|[^\s@]*@))",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(
    r"key|secret|token|passw|pwd|sig|cred|auth|(?:^|[_-])sas(?:$|[_-])", re.IGNORECASE
)
_HIDDEN = "***"

WHERE_SECRETS_GO = (
    "Put secrets where the storage's own tools look for them: environment, profile, instance role."
)
"""Advice given when a URI contains a secret."""

_PATHS = {name for name, scheme in SCHEMES.items() if scheme.is_path}
_PATH_SAFE = "/:@,;=+$!*'()~"
_VALUE_SAFE = "/:@,;$!*'()~"


@dataclass(frozen=True)
class Uri:
    """A parsed URI. ``str()`` returns text that parses to an equal URI; ``repr()`` is redacted.

    ``location`` is the text between ``scheme://`` and ``?``, without empty parts and single dots,
    otherwise verbatim. For ``file`` and ``lustre`` it is the decoded absolute path. Option values
    are decoded. Raises UriError if the parts do not form a URI.
    """

    scheme: str
    location: str
    options: dict[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_text(self.location, *self.options, *self.options.values())
        if self.scheme in _PATHS:
            object.__setattr__(self, "location", _absolute(self.location))
        elif "?" in self.location or "#" in self.location:
            raise UriError(
                "'?' and '#' in a location are written as %3F and %23", uri=self.redacted
            )
        else:
            object.__setattr__(self, "location", _cleaned(self))

    @property
    def redacted(self) -> str:
        """The URI without secrets, safe to print."""
        return redact(str(self))

    @property
    def root(self) -> str:
        """The URI without options and secrets, used as ``Driver.uri``."""
        return redact(str(Uri(self.scheme, self.location)))

    def __str__(self) -> str:
        if self.scheme in _PATHS:
            location = _quoted(self.location, _PATH_SAFE)
        else:
            location = self.location
        options = "&".join(
            f"{_quoted(name, '')}={_quoted(value, _VALUE_SAFE)}"
            for name, value in self.options.items()
        )
        return f"{self.scheme}://{location}" + (f"?{options}" if options else "")

    def __repr__(self) -> str:
        return f"Uri({self.redacted!r})"


def parse(text: str | os.PathLike[str]) -> Uri:
    """Return the URI for ``text``. A bare path, absolute or relative, becomes a ``file`` URI, and a
    leading ``~`` is expanded.

    Raises UriError for text that is neither a URI nor a path, a password before the host, an option
    without a value or given twice, a fragment, a ``file`` URI with another host, and a bare path
    followed by options.
    """
    text = _text_of(text)
    _check_text(text)
    match = _URI.fullmatch(text)
    if match is None:
        return Uri("file", _bare_path(text))
    scheme = match[1].lower()
    rest = match[2]
    if "#" in rest:
        raise UriError(
            "a URI cannot have a fragment", uri=redact(text), advice="Write '#' in a name as %23."
        )
    location, _, query = rest.partition("?")
    # Otherwise the storage would take it for part of its name and repeat it in messages.
    if (user := _USERINFO.match(f"://{location}", 3)) and ":" in unquote(user[0]):
        raise UriError(
            "a URI must not contain a password", uri=redact(text), advice=WHERE_SECRETS_GO
        )
    if scheme in _PATHS:
        location = _path_of_uri(scheme, location, text)
    return Uri(scheme, location, _options(query, text))


def redact(text: str | os.PathLike[str]) -> str:
    """Return ``text`` without user and password, and without the values of options that look like
    secrets.

    Accepts any text, even if it is not a URI, and never raises.
    """
    head, mark, query = _USERINFO.sub(r"\1", os.fspath(text)).partition("?")
    return head + mark + "&".join(_redacted_option(option) for option in query.split("&"))


def has_password(text: str) -> bool:
    """Return whether any URI in ``text`` has a password before its host."""
    return any(not match[1] and ":" in unquote(match[0]) for match in _USERINFO.finditer(text))


def is_secret(option: str) -> bool:
    """Return whether the option's name suggests a secret. Such values are never shown."""
    return _SECRET_NAME.search(option) is not None


def join(uri: Uri | str | os.PathLike[str], *parts: str) -> Uri:
    """Return the URI of the keys ``parts`` below ``uri``, with the same options. Raises UriError
    for an unsafe part."""
    if not isinstance(uri, Uri):
        uri = parse(uri)
    if not uri.location:
        raise UriError("nothing can lie below a URI without a location", uri=uri.redacted)
    below = [check_key(part, uri=uri.redacted) for part in parts]
    if uri.scheme not in _PATHS:
        below = [_quoted(part, _PATH_SAFE) for part in below]
    return Uri(uri.scheme, "/".join([uri.location.rstrip("/"), *below]) or "/", dict(uri.options))


def divided(uri: Uri) -> tuple[Uri, str]:
    """Split ``uri`` into its folder and the key below it: the inverse of :func:`join`. Raises
    UriError if it has no folder."""
    folder, slash, name = uri.location.rstrip("/").rpartition("/")
    if not slash or not name:
        raise UriError("the URI has no parent folder", uri=uri.redacted)
    if uri.scheme not in _PATHS:
        name = _unquoted(name)
    key = check_key(name, uri=uri.redacted)
    return Uri(uri.scheme, folder or "/", dict(uri.options)), key


def root_key(path: str, uri: Uri) -> str:
    """Return the key that ``path``, a part of the location of ``uri``, decodes to; may be empty.
    Raises UriError if it is unsafe."""
    key = _unquoted(path.strip("/"))
    if key:
        check_key(key, uri=uri.redacted)
    return key


def _text_of(given: object) -> str:
    if isinstance(given, os.PathLike):
        given = os.fspath(given)
    if isinstance(given, str):
        return given
    if isinstance(given, bytes):
        raise UriError(
            "the URI is given as bytes",
            advice="Decode it: os.fsdecode makes text of a path in bytes.",
        )
    kind = type(given).__name__
    raise UriError(
        f"the URI is {'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}",
        advice="The URI comes first, then the state: save(uri, state), load(uri, into=state).",
    )


def _check_text(*texts: str) -> None:
    for text in texts:
        try:
            encoded = os.fsencode(text)
        except UnicodeEncodeError as error:
            raise UriError(f"{redact(text)!r} cannot be encoded: {error.reason}") from error
        if b"\0" in encoded:
            raise UriError(f"NUL in {redact(text)!r}")


def _bare_path(path: str) -> str:
    if not path:
        raise UriError("an empty path names no folder")
    if _NEARLY_A_URI.match(path) and not os.path.lexists(path):
        scheme, _, rest = path.partition(":")
        raise UriError(
            f"{redact(path)!r} is neither a URI nor a path that exists",
            advice=(
                f"Write {redact(f'{scheme}://' + rest.lstrip('/'))} for the URI, or put ./ "
                f"before a local name."
            ),
        )
    if path.startswith("~"):
        named = path
        path = os.path.expanduser(named)
        if path == named and not os.path.lexists(path):
            raise UriError(
                f"{redact(path)!r} begins with the home folder of an unknown user",
                advice="Put ./ before a local name.",
            )
    if _OPTIONS.search(path):
        name, _, query = path.partition("?")
        folder = _quoted(_absolute(name), _PATH_SAFE)
        raise UriError(
            f"{redact(path)!r} is a bare path, which cannot have options",
            advice=f"Write {redact(f'file://{folder}?{query}')} to give them. To mean a folder of "
            "this name, write %3F for '?' in a file:// URI.",
        )
    return path


def _path_of_uri(scheme: str, location: str, text: str) -> str:
    host, slash, path = location.partition("/")
    if host not in ("", "localhost") or not slash:
        raise UriError(
            f"{scheme}:// reaches this host only"
            if host
            else f"a {scheme}:// URI needs an absolute path",
            uri=redact(text),
            advice=f"An absolute path takes three slashes: {scheme}:///a/b."
            + (" A bare path may begin with ~, a URI may not." if host.startswith("~") else ""),
        )
    return _unquoted(slash + path)


def _absolute(path: str) -> str:
    """Return ``path`` as an absolute path without double slashes and single dots. Keeps ``..``:
    only the kernel knows what it means after a symlink."""
    if not path:
        raise UriError("an empty path names no folder")
    folder = "/"
    if not os.path.isabs(path):
        try:
            folder = os.getcwd()
        except FileNotFoundError as error:
            raise UriError(
                f"{redact(path)!r} is a relative path, and the working directory was deleted",
                advice="Give the absolute path.",
            ) from error
    return "/" + str(PurePosixPath(folder, path)).lstrip("/")


def _cleaned(uri: Uri) -> str:
    """Return the location without empty parts and single dots. Raises UriError for ``..``, which
    has no meaning on storages without folders."""
    first, *parts = uri.location.split("/")
    if ".." in parts:
        raise UriError("a location cannot contain '..'", uri=uri.redacted)
    kept = [part for part in parts if part not in ("", ".")]
    if parts and not first and not kept:
        return "/"
    return "/".join([first, *kept])


def _options(query: str, text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for option in filter(None, query.split("&")):
        name, equals, value = option.partition("=")
        name = _unquoted(name)
        # do not quote it: it may be the part of a password that follows a "?"
        if not name or not equals:
            raise UriError(
                "an option has no value", uri=redact(text), advice="Write ?name=value&name=value."
            )
        if name in options:
            raise UriError(f"option {name!r} is given twice", uri=redact(text))
        options[name] = _unquoted(value)
    return options


def _redacted_option(option: str) -> str:
    name, equals, value = option.partition("=")
    if is_secret(unquote(name)):
        return name + equals + (_HIDDEN if value else "")
    if "://" in (plain := unquote(value)) and (clean := redact(plain)) != plain:
        return name + equals + quote(clean, _VALUE_SAFE, errors="replace")
    return option


# Quote as for file names: bytes that are not UTF-8 survive unchanged.


def _quoted(text: str, safe: str) -> str:
    return quote(os.fsencode(text), safe)


def _unquoted(text: str) -> str:
    return os.fsdecode(unquote_to_bytes(os.fsencode(text)))
