"""``az://container/root``: Azure Blob Storage.

Credentials come from Azure's own chain, as implemented by obstore: environment, managed identities.
Only credentials and the account come from the environment; only options determine where and how
requests are sent.

The store discards uncommitted blocks of unfinished uploads after a week; nobody can discard them
earlier.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar
from urllib.request import OpenerDirector

from ...core.forks.cached import cached_property
from ...errors import UriError
from ..contract import Driver
from ..options import Option, url
from ..uri import Uri
from .az_compose import (
    BLOCKS_MAX,
    SIGNED_S,
    AzureComposedUpload,
    hides_signatures,
    opener,
)
from .connections import made_without
from .driver import ObjectDriver
from .options import COMMON_OPTIONS, Requests
from .trust import system_certificates
from .uploads import Target

_ACCOUNT = "AZURE_STORAGE_ACCOUNT_NAME"
_NEVER_SET = ("AZURE_ENCRYPTION_KEY", "AZURE_STORAGE_ENCRYPTION_KEY")
"""Environment variables read by obstore for which no configuration value means "not set"."""

_SAS = ("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN")
"""Environment variables with credentials that cannot sign for copies."""


class AzureDriver(ObjectDriver):
    """Objects in one container of Azure Blob Storage. The account comes from an option, or from
    AZURE_STORAGE_ACCOUNT_NAME."""

    _object_max_nbytes = 50_000 * (4000 << 20)
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **COMMON_OPTIONS,
        "endpoint": Option(url, "", "URL of another server that speaks this protocol"),
        "account": Option(str, "", "the storage account; else AZURE_STORAGE_ACCOUNT_NAME"),
    }

    _shared_by_copies = ("endpoint", "account", "anonymous")

    def __init__(self, uri: Uri, values: Mapping[str, Any]) -> None:
        super().__init__(uri, values)
        signs = not values["anonymous"] and not any(name in os.environ for name in _SAS)
        if signs and hides_signatures(values["endpoint"] or "https://"):
            self._allow_copies(BLOCKS_MAX)

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

    @cached_property
    def _opener(self) -> OpenerDirector:
        return opener(self._ca or system_certificates(), self._settings.proxy)

    async def _signed(self, key: str, method: str, path: str) -> str:
        """Return a URL for requests with ``method`` for a blob. ``key`` is for messages."""
        lasting = timedelta(seconds=SIGNED_S)
        how = {"requests": Requests.SENDING}
        return str(await self._call("sign", key, "sign_async", method, path, lasting, **how))

    def _composed(self, target: Target) -> AzureComposedUpload:
        def path_of(source: Driver, key: str) -> str:
            assert isinstance(source, AzureDriver)  # copies_from has accepted it
            return source._path(key)

        timeout_s = min(self._settings.timeout_s, self._settings.read_timeout_s)
        send = partial(self._opener.open, timeout=timeout_s)
        sign = partial(self._signed, target.key)
        return AzureComposedUpload(target, sign, path_of, send, self._threads)
