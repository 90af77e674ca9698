"""``gs://bucket/root``: Google Cloud Storage.

Credentials come from Google's own chain: environment, application default credentials, the metadata
server. Only credentials come from the environment; only options determine where and how requests
are sent.

The store drops unfinished uploads by a lifecycle rule (``AbortIncompleteMultipartUpload``); obstore
cannot drop them earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ...core.forks.cached import cached_property
from ..options import Option, url
from ..schemes import check_installed
from .driver import ObjectDriver
from .gs_credentials import credentials_file, token_provider
from .options import COMMON_OPTIONS, Requests
from .trust import system_certificates

__all__ = ["GcsDriver"]


class GcsDriver(ObjectDriver):
    """Objects in one bucket of Google Cloud Storage."""

    _object_max_nbytes = 5 << 40
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **COMMON_OPTIONS,
        "endpoint": Option(url, "", "URL of another server that speaks this protocol"),
    }

    _states_codes = False  # the usual emulator responds in plain text

    @property
    def _container(self) -> tuple[str, ...]:
        return "gs", self._values["endpoint"], self._bucket

    def _connect(self, requests: Requests) -> Any:
        from obstore.store import GCSStore

        config = {
            "base_url": self._values["endpoint"] or "https://storage.googleapis.com",
            "skip_signature": self._values["anonymous"],
        }
        make: Any = GCSStore  # obstore's types are dicts of literals
        http = self._http(requests, config["base_url"])
        return make(self._bucket, config=config, credential_provider=self._token_provider, **http)

    @cached_property
    def _token_provider(self) -> Callable[[], dict[str, Any]] | None:
        """Return a callback that provides tokens to obstore; None if obstore finds them itself."""
        if self._values["anonymous"]:
            return _nobody
        file = credentials_file()
        if file is None:
            return None
        check_installed("gs", self.uri, "google.auth", "requests")
        return token_provider(
            file, self._ca or system_certificates(), self._settings.proxy, self.uri
        )


def _nobody() -> dict[str, Any]:
    """Return an empty token for anonymous requests. Without it, obstore would ask the metadata
    server before it writes."""
    return {"token": "", "expires_at": None}
