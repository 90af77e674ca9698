"""``gs://bucket/root``, Google Cloud Storage, and ``az://container/root``, Azure Blob Storage.

Credentials come from each cloud's own chain, as obstore follows it: environment, application default credentials, managed
identities. Unfinished uploads are left to the stores: Azure forgets uncommitted blocks after a week, Google by a life-cycle
rule (``AbortIncompleteMultipartUpload``). Neither can be told earlier by what obstore knows of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..options import Option, option_values, url
from ..uri import Uri
from .common import COMMON_OPTIONS, needs, settings, split_location
from .driver import ObjectDriver

__all__ = ["AzureDriver", "GcsDriver"]


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
        """The driver for ``uri``. Raises UriError for what OPTIONS does not know, and where obstore is not installed."""
        values = option_values(cls.OPTIONS, uri)
        needs(uri, "gs", "obstore")
        return cls(uri, values)

    @property
    def _container(self) -> tuple[str, ...]:
        return "gs", self._values["endpoint"], self._bucket

    def _connect(self) -> Any:
        from obstore.store import GCSStore

        make: Any = GCSStore  # typed by dicts of literals, which options cannot be
        return make(self._bucket, config=_config(self._values, "base_url"), **_http(self))


class AzureDriver(ObjectDriver):
    """Objects of one container of Azure Blob Storage. The account is an option, or AZURE_STORAGE_ACCOUNT_NAME."""

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
        """The driver for ``uri``. Raises UriError for what OPTIONS does not know, and where obstore is not installed."""
        values = option_values(cls.OPTIONS, uri)
        needs(uri, "az", "obstore")
        return cls(uri, values)

    @property
    def _container(self) -> tuple[str, ...]:
        return "az", self._values["endpoint"], self._values["account"], self._bucket

    def _connect(self) -> Any:
        from obstore.store import AzureStore

        config = _config(self._values, "endpoint")
        if self._values["account"]:
            config["account_name"] = self._values["account"]
        make: Any = AzureStore  # typed by dicts of literals, which options cannot be
        return make(self._bucket, config=config, **_http(self))


def _config(values: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if values["endpoint"]:
        config[endpoint] = values["endpoint"]
    if values["anonymous"]:
        config["skip_signature"] = True
    return config


def _http(driver: GcsDriver | AzureDriver) -> dict[str, Any]:
    http = driver._values["endpoint"].startswith("http://")
    return {"client_options": driver._settings.client(http=http), "retry_config": driver._settings.retry()}
