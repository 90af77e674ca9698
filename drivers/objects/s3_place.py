"""Where the requests for an S3 bucket go, and who signs them: one answer, for obstore and for
botocore.

botocore knows how a region, a profile, the environment and the name of a bucket make an endpoint:
partitions such as China, FIPS, dual-stack, access points, directory buckets, the ``services``
section of a profile. So it is asked for the request that it would send, and both clients are given
what it says.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...core.forks.renewal import new_lock
from ...errors import UriError
from ..options import url
from ..uri import Uri
from .known_stores import KNOWN
from .names import split_location

__all__ = [
    "DIRECTORY_BUCKET",
    "Place",
    "bucket_and_root",
    "bucket_region",
    "forget_sessions",
    "make_client",
    "may_be_elsewhere",
    "place_of",
    "session_for",
]

# A session may be used by many threads, but not make clients in two at once.
_making = new_lock()

DIRECTORY_BUCKET = "--x-s3"
"""How the names of S3 Express's buckets end, and no others."""

_ARN = re.compile(r"arn:aws[a-z-]*:s3:[a-z0-9-]+:[0-9]{12}:accesspoint[:/][A-Za-z0-9.-]{1,63}")
_ARN_LOCATION = re.compile(rf"({_ARN.pattern})((?:/.*)?)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")

_SERVICES = ("s3", "s3express")
"""The services for which obstore can sign."""


@dataclass(frozen=True, slots=True)
class Place:
    """One bucket, as requests name it."""

    bucket_url: str
    """A slash and a key behind it make the URL of an object."""
    region: str
    """For which requests are signed."""
    endpoint: str
    """Of a store that somebody named; empty for AWS as botocore knows it."""
    style: str
    """How botocore is told to name the bucket: "path", "virtual", or "auto"."""

    @property
    def clear(self) -> bool:
        """Whether requests are sent without TLS."""
        return self.bucket_url.startswith("http://")


def session_for(profile: str) -> Any:
    """botocore's session: shared, for the first client of each costs a third of a second, and later
    ones next to nothing.

    It reads the environment and the shared files, once; so a call after these have changed
    returns another one. Raises BotoCoreError where there is no such profile, or a file that cannot
    be read.
    """
    names = [name for name in list(os.environ) if name.startswith("AWS_")]
    environment = frozenset((name, os.environ.get(name, "")) for name in names)
    files = (
        _state(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")),
        _state(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")),
    )
    return _session(profile, environment, files)


def forget_sessions() -> None:
    """Have every later :func:`session_for` look for credentials anew."""
    _session.cache_clear()


@lru_cache(maxsize=8)
def _session(
    profile: str, environment: frozenset[tuple[str, str]], files: tuple[tuple[Any, ...], ...]
) -> Any:
    """``environment`` and ``files`` tell sessions apart; botocore reads both by itself."""
    import botocore.session

    session = botocore.session.Session(profile=profile or None)
    session.get_scoped_config()
    return session


def _state(file: str) -> tuple[Any, ...]:
    """What changes when ``file`` is written, replaced or removed."""
    path = Path(file).expanduser()
    try:
        found = path.stat()
    except OSError:
        return (str(path),)
    return str(path), found.st_mtime_ns, found.st_size, found.st_ino


def make_client(session: Any, region: str, endpoint: str, verify: str | None, **how: Any) -> Any:
    """botocore's S3 client. ``how`` is for its ``Config``; without an ``endpoint``, botocore finds
    it."""
    from botocore.config import Config

    s3 = {"us_east_1_regional_endpoint": "regional", **how.pop("s3", {})}
    config = Config(s3=s3, request_checksum_calculation="when_required", **how)
    with _making:
        return session.create_client(
            "s3", region_name=region, endpoint_url=endpoint or None, verify=verify, config=config
        )


def place_of(session: Any, bucket: str, region: str, endpoint: str, style: str, uri: str) -> Place:
    """Where requests for ``bucket`` go. Nothing is sent. Without an ``endpoint``, environment and
    profile may name one.

    Raises UriError, with ``uri``, for what botocore refuses, and for what it would sign in a way
    that obstore cannot.
    """
    from botocore.exceptions import BotoCoreError

    try:
        place, service = _resolved(session, bucket, region, endpoint, style)
    except BotoCoreError as error:
        reason = " ".join(str(error).split())
        raise UriError(f"no endpoint for bucket {bucket!r}: {reason[:300]}", uri=uri) from error
    except ValueError:  # whose text repeats the endpoint, with the password that it may hold
        needed = "is not a URL, http:// or https://, without user, password, query and fragment"
        raise UriError(
            f"the endpoint, which the environment or a profile sets, {needed}", uri=uri
        ) from None
    if service not in _SERVICES or "*" in place.region:
        raise UriError(
            f"requests for {bucket!r} need signatures that the client cannot make",
            uri=uri,
            advice="Name a bucket, or an access point of one region.",
        )
    return place


@lru_cache(maxsize=64)
def _resolved(
    session: Any, bucket: str, region: str, endpoint: str, style: str
) -> tuple[Place, str]:
    """The place, and the service that requests are signed for. A session never changes its mind."""
    named = endpoint.rstrip("/") or _named_endpoint(session, region)
    if style == "auto":
        style = _profile_style(session) or ("path" if named else "auto")
    client = make_client(session, region, endpoint, None, s3={"addressing_style": style})
    bucket_url, signing = _first_request(client, bucket)
    return Place(bucket_url, signing.get("region", region), named, style), signing.get(
        "signing_name", "s3"
    )


def _named_endpoint(session: Any, region: str) -> str:
    """The endpoint that the environment or the profile names, or nothing. Raises ValueError where
    it is no plain URL."""
    found = make_client(session, region, "", None).meta.endpoint_url
    usual = make_client(
        session, region, "", None, ignore_configured_endpoint_urls=True
    ).meta.endpoint_url
    if found == usual:
        return ""
    return url(found).rstrip("/")


def _profile_style(session: Any) -> str:
    """How the profile wants buckets to be named, or nothing."""
    chosen = session.get_scoped_config().get("s3")
    if isinstance(chosen, dict):
        return str(chosen.get("addressing_style", ""))
    return ""


def _first_request(client: Any, bucket: str) -> tuple[str, Mapping[str, Any]]:
    """The URL of ``bucket``, and how requests for it are signed: of the request that botocore was
    about to send."""
    from botocore.awsrequest import AWSResponse

    asked: list[tuple[str, Mapping[str, Any]]] = []

    def keep(
        params: Mapping[str, Any], context: Mapping[str, Any], **_: Any
    ) -> tuple[AWSResponse, dict[str, Any]]:
        asked.append((params["url"], context.get("signing") or {}))
        return AWSResponse(params["url"], 204, {}, None), {}  # in place of sending it

    client.meta.events.register("before-call.s3", keep)
    client.delete_object(Bucket=bucket, Key="k")
    address, signing = asked[0]
    return address.removesuffix("/k"), signing


def may_be_elsewhere(bucket: str) -> bool:
    """Whether the name of ``bucket`` leaves open in which region it is."""
    return not _ARN.fullmatch(bucket) and not bucket.endswith(DIRECTORY_BUCKET)


def bucket_region(place: Place, bucket: str, make_unsigned_client: Callable[[], Any]) -> str:
    """The region that AWS, asked at ``place``, says ``bucket`` is in, or nothing. One request,
    which needs no permission, and is made once in a process."""
    if place.bucket_url not in KNOWN.regions:
        with contextlib.closing(make_unsigned_client()) as client:
            found = _asked_region(client, bucket)
        if not found:
            return ""
        KNOWN.regions[place.bucket_url] = found
    return KNOWN.regions[place.bucket_url]


def _asked_region(client: Any, bucket: str) -> str:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        answer = client.head_bucket(Bucket=bucket)
    except ClientError as error:
        answer = error.response
    except BotoCoreError:  # whether it can be reached is for the first operation to say
        return ""
    return str(answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region") or "")


def bucket_and_root(uri: Uri) -> tuple[str, str]:
    """Like :func:`split_location`; the bucket may be the ARN of an access point. Raises
    UriError."""
    match = _ARN_LOCATION.fullmatch(uri.location)
    if match is None:
        bucket, root = split_location(uri)
    else:
        bucket = match[1]
        root = split_location(Uri(uri.scheme, f"bucket{match[2]}"))[1]
    if match is None and not _BUCKET.fullmatch(bucket):
        raise UriError(
            f"{bucket!r} is no name of a bucket",
            uri=uri.redacted,
            advice="Name a bucket, or an access point of one region: "
            "s3://arn:aws:s3:REGION:ACCOUNT:accesspoint/NAME/run.",
        )
    return bucket, root
