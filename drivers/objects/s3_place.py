"""Endpoint and signing region of an S3 bucket, shared by obstore and botocore.

botocore knows how region, profile, environment and bucket name determine an endpoint: partitions
such as China, FIPS, dual-stack, access points, directory buckets, the ``services`` section of a
profile. So this module asks botocore which request it would send, and configures both clients
accordingly.
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

# Threads may share a session, but must not create clients concurrently.
_making = new_lock()

_ARN = re.compile(r"arn:aws[a-z-]*:s3:[a-z0-9-]+:[0-9]{12}:accesspoint[:/][A-Za-z0-9.-]{1,63}")
_ARN_LOCATION = re.compile(rf"({_ARN.pattern})((?:/.*)?)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")

_SERVICES = ("s3", "s3express")
"""Services for which obstore can sign."""


@dataclass(frozen=True, slots=True)
class Place:
    """One bucket, as addressed by requests."""

    bucket_url: str
    """URL of the bucket; append a slash and a key for the URL of an object."""
    region: str
    """Region for which requests are signed."""
    endpoint: str
    """Endpoint of a non-AWS store; empty for AWS."""
    style: str
    """Addressing style for botocore: "path", "virtual", or "auto"."""

    @property
    def clear(self) -> bool:
        """True if requests are sent without TLS."""
        return self.bucket_url.startswith("http://")


def is_express(bucket: str) -> bool:
    """Return whether this is the name of a directory bucket of S3 Express."""
    return bucket.endswith("--x-s3")


def is_plain(bucket: str) -> bool:
    """Return whether this is the name of a bucket, rather than of an access point or a directory
    bucket."""
    return bool(_BUCKET.fullmatch(bucket)) and not is_express(bucket)


def session_for(profile: str) -> Any:
    """Return a shared botocore session. The first client of a session takes a third of a second,
    later ones almost nothing.

    A session reads the environment and the shared files once, so a call after these have changed
    returns a new session. Raises BotoCoreError if the profile does not exist or a file cannot be
    read.
    """
    names = [name for name in list(os.environ) if name.startswith("AWS_")]
    environment = frozenset((name, os.environ.get(name, "")) for name in names)
    files = (
        _state(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")),
        _state(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")),
    )
    return _session(profile, environment, files)


def forget_sessions() -> None:
    """Make later calls of :func:`session_for` look up credentials again."""
    _session.cache_clear()


@lru_cache(maxsize=8)
def _session(
    profile: str, environment: frozenset[tuple[str, str]], files: tuple[tuple[Any, ...], ...]
) -> Any:
    """Create a session. ``environment`` and ``files`` only serve as cache keys: botocore reads both
    itself."""
    import botocore.session

    session = botocore.session.Session(profile=profile or None)
    session.get_scoped_config()
    return session


def _state(file: str) -> tuple[Any, ...]:
    """Return a value that changes when ``file`` is written, replaced or removed."""
    path = Path(file).expanduser()
    try:
        found = path.stat()
    except OSError:
        return (str(path),)
    return str(path), found.st_mtime_ns, found.st_size, found.st_ino


def make_client(session: Any, region: str, endpoint: str, verify: str | None, **how: Any) -> Any:
    """Return botocore's S3 client. ``how`` goes to its ``Config``. Without an ``endpoint``,
    botocore determines it."""
    from botocore.config import Config

    s3 = {"us_east_1_regional_endpoint": "regional", **how.pop("s3", {})}
    config = Config(s3=s3, request_checksum_calculation="when_required", **how)
    with _making:
        return session.create_client(
            "s3", region_name=region, endpoint_url=endpoint or None, verify=verify, config=config
        )


def place_of(session: Any, bucket: str, region: str, endpoint: str, style: str, uri: str) -> Place:
    """Return where requests for ``bucket`` go, without sending any. Without an ``endpoint``,
    environment and profile may set one.

    Raises UriError, with ``uri``, if botocore rejects the settings, or would sign in a way that
    obstore cannot.
    """
    from botocore.exceptions import BotoCoreError

    try:
        place, service = _resolved(session, bucket, region, endpoint, style)
    except BotoCoreError as error:
        reason = " ".join(str(error).split())
        raise UriError(f"no endpoint for bucket {bucket!r}: {reason[:300]}", uri=uri) from error
    except ValueError:  # its text repeats the endpoint, which may contain a password
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
    """Return the place, and the service that requests are signed for. Cached: sessions do not
    change."""
    named = endpoint.rstrip("/") or _named_endpoint(session, region)
    if style == "auto":
        style = _profile_style(session) or ("path" if named else "auto")
    client = make_client(session, region, endpoint, None, s3={"addressing_style": style})
    bucket_url, signing = _first_request(client, bucket)
    return Place(bucket_url, signing.get("region", region), named, style), signing.get(
        "signing_name", "s3"
    )


def _named_endpoint(session: Any, region: str) -> str:
    """Return the endpoint set by environment or profile; "" if none. Raises ValueError if it is not
    a plain URL."""
    found = make_client(session, region, "", None).meta.endpoint_url
    usual = make_client(
        session, region, "", None, ignore_configured_endpoint_urls=True
    ).meta.endpoint_url
    if found == usual:
        return ""
    return url(found).rstrip("/")


def _profile_style(session: Any) -> str:
    """Return the addressing style set by the profile; "" if none."""
    chosen = session.get_scoped_config().get("s3")
    if isinstance(chosen, dict):
        return str(chosen.get("addressing_style", ""))
    return ""


def _first_request(client: Any, bucket: str) -> tuple[str, Mapping[str, Any]]:
    """Return the URL of ``bucket`` and the signing parameters, from a botocore request intercepted
    before it is sent."""
    from botocore.awsrequest import AWSResponse

    asked: list[tuple[str, Mapping[str, Any]]] = []

    def keep(
        params: Mapping[str, Any], context: Mapping[str, Any], **_: Any
    ) -> tuple[AWSResponse, dict[str, Any]]:
        asked.append((params["url"], context.get("signing") or {}))
        return AWSResponse(params["url"], 204, {}, None), {}  # replaces the actual request

    client.meta.events.register("before-call.s3", keep)
    client.delete_object(Bucket=bucket, Key="k")
    address, signing = asked[0]
    return address.removesuffix("/k"), signing


def may_be_elsewhere(bucket: str) -> bool:
    """Return whether the region of ``bucket`` may differ from the configured one. ARNs and names of
    directory buckets state theirs."""
    return not _ARN.fullmatch(bucket) and not is_express(bucket)


def bucket_region(place: Place, bucket: str, make_unsigned_client: Callable[[], Any]) -> str:
    """Return the region of ``bucket`` as reported by AWS at ``place``; "" if unknown.

    Sends one request, which needs no permission, and caches a known region for the process.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    if place.bucket_url in KNOWN.regions:
        return KNOWN.regions[place.bucket_url]
    with contextlib.closing(make_unsigned_client()) as client:
        try:
            answer = client.head_bucket(Bucket=bucket)
        except ClientError as error:
            answer = error.response
        except BotoCoreError:  # the first operation will report whether the server is reachable
            return ""
    found = str(answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region") or "")
    if found:
        KNOWN.regions[place.bucket_url] = found
    return found


def bucket_and_root(uri: Uri) -> tuple[str, str]:
    """Return bucket and root like :func:`split_location`; the bucket may be the ARN of an access
    point. Raises UriError also for an invalid bucket name."""
    if match := _ARN_LOCATION.fullmatch(uri.location):
        return match[1], split_location(Uri(uri.scheme, f"bucket{match[2]}"))[1]
    bucket, root = split_location(uri)
    if not _BUCKET.fullmatch(bucket):
        raise UriError(
            f"{bucket!r} is not a bucket name",
            uri=uri.redacted,
            advice="Name a bucket, or an access point of one region: "
            "s3://arn:aws:s3:REGION:ACCOUNT:accesspoint/NAME/run.",
        )
    return bucket, root
