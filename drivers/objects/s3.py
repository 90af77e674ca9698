"""``s3://bucket/root``: S3, and whatever speaks its protocol (Ceph, MinIO, R2, …), at any endpoint.

Credentials come from the chain that all AWS tools share: environment, shared profiles, single sign-on, roles of the
container or the host. Never from the URI.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache
from typing import Any, ClassVar
from urllib.parse import urlsplit

from ...errors import AccessError, UriError
from ..options import Option, choice, option_values, url
from ..uri import Uri
from .common import COMMON_OPTIONS, needs, settings, split_location
from .dangling import Unfinished
from .driver import ObjectDriver

__all__ = ["S3Driver"]

_CHECKSUMS = {"sha256": "SHA256", "crc64nvme": "CRC64NVME"}
_CREDENTIALS_LAST = timedelta(minutes=15)

# A session may be used by many threads, but not make clients in two at once.
_making = threading.Lock()


class S3Driver(ObjectDriver):
    """Objects of one S3 bucket."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **COMMON_OPTIONS,
        "endpoint": Option(url, "", "URL of a store other than AWS; http:// sends data, not secrets, in clear"),
        "region": Option(str, "", "where the bucket is; else from environment or profile, else us-east-1"),
        "profile": Option(str, "", "which of the shared profiles to use"),
        "style": Option(
            choice("auto", "path", "virtual"), "auto", "the bucket in the path, or in the host's name; auto: path where "
            "an endpoint is given",
        ),
        "checksum": Option(
            choice("auto", "signed", "sha256", "crc64nvme", "none"), "auto", "of what is sent, for the store to check; "
            "auto: crc64nvme at AWS, TLS alone elsewhere, signed over http://",
        ),
    }  # fmt: skip

    def __init__(self, uri: Uri, values: Mapping[str, Any]) -> None:
        self._bucket, root = split_location(uri)
        super().__init__(uri, root, settings(values))
        self._values = values

    @classmethod
    def open(cls, uri: Uri) -> S3Driver:
        """The driver for ``uri``. Raises UriError for what OPTIONS does not know, and where obstore is not installed."""
        values = option_values(cls.OPTIONS, uri)
        needs(uri, "s3", "obstore", "botocore")
        return cls(uri, values)

    @property
    def _container(self) -> tuple[str, ...]:
        return "s3", self._endpoint, self._bucket

    @cached_property
    def _session(self) -> Any:
        from botocore.exceptions import BotoCoreError

        environment = frozenset((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))
        try:
            return _session(self._values["profile"], environment)
        except BotoCoreError as error:
            raise AccessError(f"no credentials: {error}", uri=self.uri) from error

    @cached_property
    def _endpoint(self) -> str:
        """Empty for AWS."""
        given = self._values["endpoint"] or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        given = str(given or self._session.get_scoped_config().get("endpoint_url") or "").rstrip("/")
        try:
            return url(given) if given else ""
        except ValueError as error:
            raise UriError(f"the endpoint, which the environment or a profile sets, {error}", uri=self.uri) from error

    @cached_property
    def _region(self) -> str:
        given = self._values["region"] or os.environ.get("AWS_REGION")
        return str(given or self._session.get_config_variable("region") or "us-east-1")

    @property
    def _virtual(self) -> bool:
        style = self._values["style"]
        return style == "virtual" or (style == "auto" and not self._endpoint and "." not in self._bucket)

    def _connect(self) -> Any:
        from obstore.store import S3Store

        config: dict[str, Any] = {"region": self._region, "virtual_hosted_style_request": self._virtual}
        if self._endpoint:
            config["endpoint"] = _with_bucket(self._endpoint, self._bucket) if self._virtual else self._endpoint
        if self._values["anonymous"]:
            config["skip_signature"] = True
        make: Any = S3Store  # typed by dicts of literals, which options cannot be
        return make(
            self._bucket,
            config=config | self._checksum(),
            client_options=self._settings.client(http=self._endpoint.startswith("http://")),
            retry_config=self._settings.retry(),
            credential_provider=None if self._values["anonymous"] else self._credentials(),
        )

    def _checksum(self) -> dict[str, Any]:
        chosen = self._values["checksum"]
        if chosen == "auto":
            chosen = "signed" if self._endpoint.startswith("http://") else "none" if self._endpoint else "crc64nvme"
        if chosen in _CHECKSUMS:
            return {"checksum_algorithm": _CHECKSUMS[chosen], "unsigned_payload": True}
        return {"unsigned_payload": chosen == "none"}

    def _credentials(self) -> Callable[[], dict[str, Any]]:
        """What obstore asks for credentials. Raises AccessError where there are none."""
        found = self._session.get_credentials()
        if found is None:
            raise AccessError(
                "no credentials found",
                uri=self.uri,
                advice="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile (?profile=…), or give the host a "
                "role; ?anonymous=on for a public bucket.",
            )

        def provide() -> dict[str, Any]:
            frozen = found.get_frozen_credentials()
            return {
                "access_key_id": frozen.access_key,
                "secret_access_key": frozen.secret_key,
                "token": frozen.token,
                "expires_at": datetime.now(UTC) + _CREDENTIALS_LAST,  # botocore renews in time, if asked
            }

        return provide

    @cached_property
    def _unfinished(self) -> Unfinished:
        from botocore import UNSIGNED
        from botocore.config import Config

        s = self._settings
        config = Config(
            connect_timeout=min(s.timeout_s, 5.0),
            read_timeout=min(s.timeout_s, 20.0),
            retries={"total_max_attempts": 2},
            signature_version=UNSIGNED if self._values["anonymous"] else "s3v4",
            s3={"addressing_style": "virtual" if self._virtual else "path"},
            request_checksum_calculation="when_required",
        )
        endpoint = self._endpoint or None
        with _making:
            client = self._session.create_client("s3", region_name=self._region, endpoint_url=endpoint, config=config)
        return Unfinished(client, self._bucket, self.uri, s.limit_s)

    def _disconnect(self) -> None:
        if (unfinished := self.__dict__.pop("_unfinished", None)) is not None:
            unfinished.client.close()

    async def _drop_unfinished(self, path: str, *, whole_key: bool, quiet_s: float, began_within_s: float) -> None:
        def drop() -> None:
            self._unfinished.drop(path, whole_key=whole_key, quiet_s=quiet_s, began_within_s=began_within_s)

        await self._threads.run(drop)


@lru_cache(maxsize=8)
def _session(profile: str, environment: frozenset[tuple[str, str]]) -> Any:
    """botocore's session: shared, for the first client of each costs a third of a second, and later ones next to nothing.
    It reads the environment itself; ``environment`` is there to tell sessions apart."""
    import botocore.session

    session = botocore.session.Session(profile=profile or None)
    session.get_scoped_config()
    return session


def _with_bucket(endpoint: str, bucket: str) -> str:
    parts = urlsplit(endpoint)
    return parts._replace(netloc=f"{bucket}.{parts.netloc}").geturl()
