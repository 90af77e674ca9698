"""``az://container/root``: Azure Blob Storage.

Credentials come from Azure's own chain, as implemented by obstore: environment, managed identities.
Only credentials and the account come from the environment; only options determine where and how
requests are sent.

The store discards uncommitted blocks of unfinished uploads after a week; obstore cannot discard
them earlier.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from ...errors import UriError
from ..options import Option, url
from .connections import made_without
from .driver import ObjectDriver
from .options import COMMON_OPTIONS, Requests

_ACCOUNT = "AZURE_STORAGE_ACCOUNT_NAME"
_NEVER_SET = ("AZURE_ENCRYPTION_KEY", "AZURE_STORAGE_ENCRYPTION_KEY")
"""Environment variables read by obstore for which no configuration value means "not set"."""


class AzureDriver(ObjectDriver):
    """Objects in one container of Azure Blob Storage. The account comes from an option, or from
    AZURE_STORAGE_ACCOUNT_NAME."""

    _object_max_nbytes = 50_000 * (4000 << 20)
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **COMMON_OPTIONS,
        "endpoint": Option(url, "", "URL of another server that speaks this protocol"),
        "account": Option(str, "", "the storage account; else AZURE_STORAGE_ACCOUNT_NAME"),
    }

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
        make: Any = AzureStore  # obstore's types are dicts of literals
        http = self._http(requests, config["endpoint"])
        return made_without(_NEVER_SET, make, self._bucket, config=config, **http)
