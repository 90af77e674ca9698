"""``gs://bucket/root``: Google Cloud Storage.

Credentials come from Google's own chain: environment, application default credentials, the metadata
server. Only credentials come from the environment; only options determine where and how requests
are sent.

The store drops unfinished uploads by a lifecycle rule (``AbortIncompleteMultipartUpload``); obstore
cannot drop them earlier.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ...core.forks.cached import cached_property
from ...errors import AccessError
from ..options import Option, url
from ..schemes import check_installed
from .driver import ObjectDriver
from .options import COMMON_OPTIONS, Requests
from .trust import system_certificates


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


_KNOWN_TO_OBSTORE = ("service_account", "authorized_user")
_FIRST = (
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_BEARER_TOKEN",
)
"""Variables that obstore prefers to a file of application default credentials."""
_SCOPE = "https://www.googleapis.com/auth/devstorage.full_control"


def credentials_file() -> str | None:
    """Return the file of application default credentials if it takes effect and its type is unknown
    to obstore."""
    if any(os.environ.get(name) for name in _FIRST):
        return None
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    folder = os.environ.get("CLOUDSDK_CONFIG", "~/.config/gcloud")
    path = Path(named or Path(folder, "application_default_credentials.json")).expanduser()
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):  # obstore reports the problem
        return None
    kind = content.get("type") if isinstance(content, dict) else None
    if isinstance(kind, str) and kind not in _KNOWN_TO_OBSTORE:
        return str(path)
    return None


def token_provider(
    file: str, verify: str | None, proxy: str, uri: str
) -> Callable[[], dict[str, Any]]:
    """Return a callback that provides tokens to obstore, which calls it again when one expires.
    ``verify`` names the certificates to trust.

    Raises AccessError for a file that google-auth cannot use. Blocks.
    """
    from google.auth.exceptions import GoogleAuthError
    from google.auth.transport.requests import Request

    try:
        found = _credentials(json.loads(Path(file).read_text()))
    except (GoogleAuthError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _unusable(file, error, uri) from error
    how: dict[str, Any] = {"verify": verify or True}
    if proxy:
        how["proxies"] = {"http": proxy, "https": proxy}
    request: Any = partial(Request(), **how)

    def provide() -> dict[str, Any]:
        try:
            found.refresh(request)
        # Some of these are raised for a response that is not a token.
        except (GoogleAuthError, ValueError, TypeError, KeyError) as error:
            raise _unusable(file, error, uri) from error
        expiry = found.expiry
        return {"token": found.token, "expires_at": expiry and expiry.replace(tzinfo=UTC)}

    provide()  # reports bad credentials here, where the error can be specific
    return provide


def _credentials(content: dict[str, Any]) -> Any:
    """Return google-auth credentials for a file's content. Raises many kinds of errors if it is
    malformed."""
    from google.auth import (
        aws,
        external_account_authorized_user,
        identity_pool,
        impersonated_credentials,
        pluggable,
    )

    kind = content["type"]
    source = content.get("credential_source", {})
    make: Any
    if kind == "impersonated_service_account":
        make = impersonated_credentials.Credentials.from_impersonated_service_account_info
    elif kind == "external_account_authorized_user":
        make = external_account_authorized_user.Credentials.from_info
    elif kind != "external_account":
        raise ValueError(f"credentials of type {kind!r} are not known")
    elif content.get("subject_token_type") == "urn:ietf:params:aws:token-type:aws4_request":
        make = aws.Credentials.from_info
    elif "executable" in source:
        make = pluggable.Credentials.from_info
    else:
        make = identity_pool.Credentials.from_info
    return make(content, scopes=[_SCOPE])


def _unusable(file: str, error: Exception, uri: str) -> AccessError:
    """Return the error for unusable credentials. Only quotes the first argument: the rest of a
    server's response may contain secrets."""
    reason = " ".join(str(error.args[0] if error.args else error).split())[:200]
    return AccessError(
        f"no token for the credentials in {file}: {reason}",
        uri=uri,
        advice=(
            "Does `gcloud auth application-default print-access-token` give one, with the "
            "same file?"
        ),
    )
