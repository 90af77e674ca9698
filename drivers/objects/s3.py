"""``s3://bucket/root``: S3 and compatible stores (Ceph, MinIO, R2, …), at any endpoint.

Credentials come from the chain shared by all AWS tools: environment, shared profiles, single
sign-on, roles of the container or the host. Never from the URI.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Self, TypeVar
from urllib.request import getproxies

from ...core.forks.cached import cached_property
from ...errors import AccessError, ExistsError, NotFoundError, UriError
from ..contract import Driver, Upload, UploadLostError
from ..options import Option, choice, switch, url
from ..uri import Uri
from .connections import made_without
from .driver import ObjectDriver
from .known_stores import KNOWN
from .options import COMMON_OPTIONS, Requests
from .s3_compose import Body, S3ComposedUpload
from .s3_errors import aws_failures
from .s3_options import (
    STORING_OPTIONS,
    check_storing,
    key_params,
    labels,
    store_config,
    upload_params,
)
from .s3_place import (
    Place,
    bucket_and_root,
    bucket_region,
    forget_sessions,
    is_express,
    is_plain,
    make_client,
    may_be_elsewhere,
    place_of,
    session_for,
)
from .s3_unfinished import Unfinished
from .trust import system_certificates
from .uploads import PARTS_MAX, Target, is_live

_OF_UPLOADS = (
    "ListMultipartUploads",
    "ListParts",
    "CreateMultipartUpload",
    "UploadPart",
    "UploadPartCopy",
    "CompleteMultipartUpload",
    "AbortMultipartUpload",
)
"""Operations that botocore sends."""
_CHECKSUMS = {"sha256": "SHA256", "crc64nvme": "CRC64NVME"}
T = TypeVar("T")

_STALE = re.compile(
    r"ExpiredToken|InvalidToken|TokenRefreshRequired|InvalidAccessKeyId|SignatureDoesNotMatch"
)
"""Errors that may mean that the credentials were replaced."""
_ALREADY = timedelta(seconds=1)
"""Age of the expiry time reported to obstore. Because credentials look expired, obstore asks for
them before every request, so the next part of a long upload uses renewed ones. Asking costs
microseconds; botocore renews real expiry in time."""

# Settings that obstore would read from the environment, with values that mean "not set".
_UNSET: Mapping[str, Any] = {
    "conditional_put": "etag",
    "copy_if_not_exists": "multipart",
    "disable_tagging": False,
    "imdsv1_fallback": False,
}
_NEVER_SET = (
    "AWS_CHECKSUM_ALGORITHM",
    "AWS_SERVER_SIDE_ENCRYPTION",
    "AWS_SSE_BUCKET_KEY_ENABLED",
    "AWS_SSE_CUSTOMER_KEY_BASE64",
    "AWS_SSE_KMS_KEY_ID",
)
"""Variables used only by obstore, whose settings have no value meaning "not set"."""


class S3Driver(ObjectDriver):
    """Objects in one S3 bucket."""

    _located = staticmethod(bucket_and_root)
    _object_max_nbytes = 5 << 40
    _shared_by_copies = ("endpoint", "region", "profile", "style", "anonymous", "requester_pays")
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **COMMON_OPTIONS,
        "endpoint": Option(
            url, "", "URL of a store other than AWS; http:// sends data, not secrets, in clear"
        ),
        "region": Option(
            str, "", "region of the bucket; else from environment or profile, else us-east-1"
        ),
        "profile": Option(str, "", "name of a shared profile"),
        "style": Option(
            choice("auto", "path", "virtual"),
            "auto",
            "the bucket in the path, or in the host's name; auto: path where an endpoint is given",
        ),
        "checksum": Option(
            choice("auto", "signed", "sha256", "crc64nvme", "none"),
            "auto",
            "checksum of uploads, checked by the store; auto: crc64nvme at AWS, "
            "TLS alone elsewhere, signed over http://, sha256 where a bucket has Object Lock",
        ),
        **STORING_OPTIONS,
        "bulk_delete": Option(
            switch, True, "delete many objects with one request, where the store can"
        ),
    }

    def __init__(self, uri: Uri, values: Mapping[str, Any]) -> None:
        super().__init__(uri, values)
        self._labels = labels(values)
        self._session_used: Any = None
        self._looked_again = False
        self._bulk_delete = values["bulk_delete"]
        # botocore computes no such checksums of parts, and other kinds of buckets are not tested.
        if values["checksum"] not in _CHECKSUMS and is_plain(self._bucket):
            self._allow_copies(PARTS_MAX)

    @classmethod
    def open(cls, uri: Uri) -> Self:
        """See :meth:`ObjectDriver.open`. Also raises UriError for storage options that the bucket
        does not support."""
        driver = super().open(uri)
        check_storing(driver._bucket, driver._values, uri)
        return driver

    @property
    def _container(self) -> tuple[str, ...]:
        return "s3", self._place.bucket_url

    @property
    def _session(self) -> Any:
        from botocore.exceptions import BotoCoreError

        try:
            return session_for(self._values["profile"])
        except BotoCoreError as error:
            raise AccessError(f"no credentials: {error}", uri=self.uri) from error

    @cached_property
    def _place(self) -> Place:
        """Place that requests are sent to. Unless the URI sets the region, asks AWS for the
        bucket's region, once per process."""
        place = self._place_in(self._region)
        if self._values["region"] or place.endpoint or not may_be_elsewhere(self._bucket):
            return place
        region = bucket_region(place, self._bucket, partial(self._client, place, signed=False))
        if region:
            return self._place_in(region)
        return place

    def _place_in(self, region: str) -> Place:
        values = self._values
        return place_of(
            self._session, self._bucket, region, values["endpoint"], values["style"], self.uri
        )

    @property
    def _ca(self) -> str:
        return super()._ca or os.path.expanduser(
            self._session.get_config_variable("ca_bundle") or ""
        )

    @property
    def _region(self) -> str:
        given = self._values["region"] or os.environ.get("AWS_REGION")
        return str(given or self._session.get_config_variable("region") or "us-east-1")

    def _connect(self, requests: Requests) -> Any:
        from obstore.store import S3Store

        place = self._place
        if place.clear and self._values["sse"] == "customer":
            advice = "Use an https:// endpoint."
            raise UriError(
                "the key of sse=customer would be sent in clear", uri=self.uri, advice=advice
            )
        config = {
            "region": place.region,
            "endpoint": place.bucket_url,
            "aws_endpoint_url_s3": place.bucket_url,
            "virtual_hosted_style_request": True,  # the endpoint already contains the bucket
            "skip_signature": self._values["anonymous"],
            **_UNSET,
            "disable_bulk_delete": requests is not Requests.ONCE,
            **self._checksum(),
            **store_config(self._bucket, self._values),
        }
        http = self._http(requests, place.bucket_url)
        proxied = self._settings.proxy or getproxies()  # a proxy may require TLS
        if place.clear and not self._values["anonymous"] and not proxied:
            # Without encryption, skip reading the host's certificates, which takes 5 to 10 ms for
            # each of up to three clients. A redirect to https:// would lose the signature, so
            # signed requests never follow one.
            http["client_options"]["disable_system_certificates"] = True
        make: Any = S3Store  # obstore's types are dicts of literals
        return made_without(
            _NEVER_SET,
            make,
            self._bucket.rpartition(":")[2],
            config=config,
            credential_provider=_nobody if self._values["anonymous"] else self._credentials(),
            **http,
        )

    def _checksum(self) -> dict[str, Any]:
        chosen = self._values["checksum"]
        if chosen == "auto" and self._container in KNOWN.wants_checksum:
            return {"checksum_algorithm": "SHA256", "unsigned_payload": False}
        if chosen == "auto":
            if self._place.clear:
                chosen = "signed"
            elif self._place.endpoint:
                chosen = "none"
            else:
                chosen = "crc64nvme"
        if chosen in _CHECKSUMS:
            return {"checksum_algorithm": _CHECKSUMS[chosen], "unsigned_payload": True}
        return {"unsigned_payload": chosen == "none"}

    def _credentials(self) -> Callable[[], dict[str, Any]]:
        """Return a callback that provides credentials to obstore, from the current state of the
        shared files. Raises AccessError if there are no credentials."""
        if self._session.get_credentials() is None:
            raise AccessError(
                "no credentials found",
                uri=self.uri,
                advice="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile "
                "(?profile=…), or give the host a "
                "role; ?anonymous=on for a public bucket.",
            )

        def provide() -> dict[str, Any]:
            self._session_used = self._session
            frozen = self._session_used.get_credentials().get_frozen_credentials()
            return {
                "access_key_id": frozen.access_key,
                "secret_access_key": frozen.secret_key,
                "token": frozen.token,
                "expires_at": datetime.now(UTC) - _ALREADY,
            }

        return provide

    async def _call(self, *args: Any, **kwargs: Any) -> Any:
        return await self._with_renewal(partial(super()._call, *args, **kwargs))

    async def create(self, key: str, nbytes: int) -> Upload:
        return await self._with_renewal(partial(super().create, key, nbytes))

    async def compose(self, key: str, nbytes: int) -> Upload:
        return await self._with_renewal(partial(super().compose, key, nbytes))

    def _composed(self, target: Target) -> S3ComposedUpload:
        ask = partial(self._ask, target.key, target.place[-1])
        return S3ComposedUpload(target, ask, self._copied_from)

    def _copied_from(self, source: Driver, key: str) -> dict[str, Any]:
        assert isinstance(source, S3Driver)  # copies_from has accepted it
        named = {"Bucket": source._bucket, "Key": source._path(key)}
        return {"CopySource": named, **key_params(source._values, "CopySource")}

    async def _ask(
        self, key: str, path: str, doing: str, operation: str, **params: Any
    ) -> dict[str, Any]:
        """Send a request about an upload to ``key``, which is the object ``path``. Raises
        StorageError."""
        if operation == "create_multipart_upload":
            params |= upload_params(self._values)
        if operation != "abort_multipart_upload":
            params |= key_params(self._values)
        data = params.get("Body")

        def ask() -> dict[str, Any]:
            if data is not None:
                params["Body"] = body = Body(data)
                if "checksum_algorithm" in self._checksum():
                    params["ContentMD5"] = body.md5()
            with aws_failures(doing, self.uri, key):
                answer = getattr(self._sender, operation)(Bucket=self._bucket, Key=path, **params)
                return dict(answer)

        return await self._with_renewal(partial(self._threads.run, ask))

    async def _put(self, path: str, data: Any, **how: Any) -> Any:
        put = partial(super()._put, path, data, **how)
        if not how.get("use_multipart"):
            return await self._with_renewal(put)
        try:
            return await put()
        except Exception as error:
            if not await self._threads.run(self._renewed, error):
                raise
            # The parts already sent are lost.
            raise UploadLostError(
                "upload failed: its credentials were replaced midway",
                uri=self.uri,
                advice="Save again.",
            ) from error

    async def _with_renewal(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call ``call``, and repeat it once with renewed credentials if it fails and they have
        changed."""
        try:
            return await call()
        except Exception as error:
            if not await self._threads.run(self._renewed, error):
                raise
        return await call()

    def _renewed(self, error: Exception) -> bool:
        """Return whether a retry would use other credentials, or the checksum that buckets with
        Object Lock require.

        Credentials have changed if the shared files were written since. Once, credentials that the
        store does not accept are also looked up again.
        """
        if self._wants_checksum(error):
            KNOWN.wants_checksum.add(self._container)
            self._connections.renew()
            return True
        if self._session_used is None or isinstance(error, NotFoundError | ExistsError):
            return False  # no credentials were used, or they were valid
        if self._session_used is self._session:
            if self._looked_again or not _STALE.search(f"{error} {error.__cause__}"):
                return False
            self._looked_again = True
            forget_sessions()
        self._disconnect()
        self._connections.renew()
        return True

    def _wants_checksum(self, error: Exception) -> bool:
        if self._values["checksum"] != "auto" or "Content-MD5" not in f"{error} {error.__cause__}":
            return False
        return self._container not in KNOWN.wants_checksum

    @cached_property
    def _sender(self) -> Any:
        """botocore's client for parts."""
        s = self._settings
        limit_s = min(s.timeout_s, s.read_timeout_s)
        return self._paying_client(
            read_timeout=limit_s,
            retries={"total_max_attempts": 3, "mode": "standard"},
            max_pool_connections=s.concurrency,
        )

    def _paying_client(self, **how: Any) -> Any:
        self._session_used = self._session
        client = self._client(self._place, signed=not self._values["anonymous"], **how)
        if self._values["requester_pays"]:
            for operation in _OF_UPLOADS:
                client.meta.events.register(f"provide-client-params.s3.{operation}", _pay)
        return client

    @cached_property
    def _unfinished(self) -> Unfinished:
        client = self._paying_client()
        by_folder = is_express(self._bucket)
        container = self._container

        def is_ours(path: str) -> bool:
            return is_live((*container, path))

        return Unfinished(
            client, self._bucket, self.uri, self._settings.limit_s, by_folder, is_ours
        )

    def _client(self, place: Place, *, signed: bool, **how: Any) -> Any:
        from botocore import UNSIGNED

        s = self._settings
        usual: dict[str, Any] = {
            "connect_timeout": min(s.timeout_s, 5.0),
            "read_timeout": min(s.timeout_s, s.read_timeout_s, 20.0),
            "retries": {"total_max_attempts": 2},
        }
        s3: dict[str, Any] = {"addressing_style": place.style}
        if self._values["checksum"] == "signed":
            s3["payload_signing_enabled"] = True
        return make_client(
            self._session,
            place.region,
            self._values["endpoint"],
            self._ca or system_certificates(),
            signature_version=None if signed else UNSIGNED,
            s3=s3,
            **usual | how,
            proxies={"http": s.proxy, "https": s.proxy} if s.proxy else None,
        )

    def _disconnect(self) -> None:
        if (unfinished := self.__dict__.pop("_unfinished", None)) is not None:
            unfinished.client.close()
        if (sender := self.__dict__.pop("_sender", None)) is not None:
            sender.close()

    async def _drop_unfinished(self, path: str, **which: Any) -> None:
        def drop() -> None:
            self._unfinished.drop(path, **which)

        await self._with_renewal(partial(self._threads.run, drop))


def _pay(params: Mapping[str, Any], **_: Any) -> dict[str, Any]:
    """Return the parameters of a botocore request with consent to pay for it."""
    return {**params, "RequestPayer": "requester"}


def _nobody() -> dict[str, Any]:
    """Return dummy credentials for anonymous access; without any, obstore would look for its
    own."""
    return {"access_key_id": "", "secret_access_key": "", "token": None, "expires_at": None}
