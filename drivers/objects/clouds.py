"""``gs://bucket/root``, Google Cloud Storage, and ``az://container/root``, Azure Blob Storage.

Credentials come from each cloud's own chain, as obstore follows it: environment, application
default credentials, managed identities. Only credentials, and Azure's account, come from the
environment; options alone say where requests go, and how.

Unfinished uploads are left to the stores: Azure forgets uncommitted blocks after a week, Google by
a life-cycle rule (``AbortIncompleteMultipartUpload``). Neither can be told earlier by what obstore
knows of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ...core.forks.cached import cached_property
from ...errors import UriError
from ..options import Option, option_values, url
from ..uri import Uri
from .common import COMMON_OPTIONS, Requests, needs, settings, split_location
from .driver import ObjectDriver
from .environment import made_without
from .google import credentials_file, token_provider
from .trust import system_certificates

__all__ = ["AzureDriver", "GcsDriver"]

_ACCOUNT = "AZURE_STORAGE_ACCOUNT_NAME"
_NEVER_SET = ("AZURE_ENCRYPTION_KEY", "AZURE_STORAGE_ENCRYPTION_KEY")
"""Variables of obstore for whose settings no value means "not set"."""


class GcsDriver(ObjectDriver):
    """Objects of one bucket of Google Cloud Storage."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **COMMON_OPTIONS,
        "endpoint": Option(url, "", "URL of another server that speaks this protocol"),
    }

    def __init__(self, uri: Uri, values: Mapping[str, Any]) -> None:
        self._bucket, root = split_location(uri)
        super().__init__(uri, root, settings(values))
        self._values = values

    @classmethod
    def open(cls, uri: Uri) -> GcsDriver:
        """The driver for ``uri``. Raises UriError for what OPTIONS does not know, and where obstore
        is not installed."""
        values = option_values(cls.OPTIONS, uri)
        needs(uri, "gs", "obstore")
        return cls(uri, values)

    @property
    def _container(self) -> tuple[str, ...]:
        return "gs", self._values["endpoint"], self._bucket

    def _connect(self, requests: Requests) -> Any:
        from obstore.store import GCSStore

        config = {
            "base_url": self._values["endpoint"] or "https://storage.googleapis.com",
            "skip_signature": self._values["anonymous"],
        }
        make: Any = GCSStore  # typed by dicts of literals, which options cannot be
        http = self._http(requests, config["base_url"])
        return make(self._bucket, config=config, credential_provider=self._token_provider, **http)

    @cached_property
    def _token_provider(self) -> Callable[[], dict[str, Any]] | None:
        """What obstore asks for tokens; None where it finds them itself."""
        if self._values["anonymous"]:
            return _nobody
        file = credentials_file()
        if file is None:
            return None
        needs(Uri("gs", self._bucket), "gs", "google.auth", "requests")
        return token_provider(
            file, self._ca or system_certificates(), self._settings.proxy, self.uri
        )


class AzureDriver(ObjectDriver):
    """Objects of one container of Azure Blob Storage. The account is an option, or
    AZURE_STORAGE_ACCOUNT_NAME."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **COMMON_OPTIONS,
        "endpoint": Option(url, "", "URL of another server that speaks this protocol"),
        "account": Option(str, "", "the storage account; else AZURE_STORAGE_ACCOUNT_NAME"),
    }

    def __init__(self, uri: Uri, values: Mapping[str, Any]) -> None:
        self._bucket, root = split_location(uri)
        super().__init__(uri, root, settings(values))
        self._values = values

    @classmethod
    def open(cls, uri: Uri) -> AzureDriver:
        """The driver for ``uri``. Raises UriError for what OPTIONS does not know, and where obstore
        is not installed."""
        values = option_values(cls.OPTIONS, uri)
        needs(uri, "az", "obstore")
        return cls(uri, values)

    @property
    def _container(self) -> tuple[str, ...]:
        return "az", self._values["endpoint"], self._account, self._bucket

    @property
    def _account(self) -> str:
        account = self._values["account"] or os.environ.get(_ACCOUNT)
        if not account:
            raise UriError(
                "az:// needs the name of a storage account",
                uri=self.uri,
                advice=f"Write ?account=…, or set {_ACCOUNT}.",
            )
        return str(account)

    def _connect(self, requests: Requests) -> Any:
        from obstore.store import AzureStore

        config = {
            "account_name": self._account,
            "endpoint": self._values["endpoint"]
            or f"https://{self._account}.blob.core.windows.net",
            "skip_signature": self._values["anonymous"],
            "use_emulator": False,
            "use_fabric_endpoint": False,
            "disable_tagging": False,
        }
        make: Any = AzureStore  # typed by dicts of literals, which options cannot be
        http = self._http(requests, config["endpoint"])
        return made_without(_NEVER_SET, make, self._bucket, config=config, **http)


def _nobody() -> dict[str, Any]:
    """A token for requests that need none. Without any, obstore would ask the metadata server
    before it writes."""
    return {"token": "", "expires_at": None}
