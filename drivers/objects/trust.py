"""Trusted certificates: one file for obstore and botocore alike, with early and specific errors.

obstore treats an untrusted certificate as a failed connection and retries until its deadline. So
the first connection to a server is tested separately, without retries.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...errors import StorageError, UriError
from .known_stores import KNOWN

_SYSTEM = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
"""Files in which distributions keep trusted certificates; obstore finds them itself."""

_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)")
_NO_TLS = "InvalidMessage(\n"
_ALERT = re.compile(r"AlertReceived\(\s*(\w+)")

TRUST = (
    "If a private authority signed the store's certificate, name the authority's file: "
    "?ca=/path/ca.pem, or "
    "AWS_CA_BUNDLE (s3://), or SSL_CERT_FILE."
)
_ADVICE = {
    "UnknownIssuer": TRUST,
    "CaUsedAsEndEntity": (
        "The server shows an authority's certificate (CA:TRUE) as its own, as openssl req -x509 "
        "makes them. Make one with -addext basicConstraints=critical,CA:FALSE and -addext "
        "subjectAltName=DNS:HOST, or have an authority sign one, and name it by ?ca=…."
    ),
    "Expired": "Renew it; or is the clock of this host wrong?",
    "NotValidYet": "Is the clock of this host wrong?",
    "NotValidForName": (
        "It is for another host: write the endpoint with the name that the certificate has."
    ),
}


def certificates(path: str, uri: str) -> str:
    """Return the PEM certificates in the file ``path``. Raises UriError if there are none."""
    try:
        text = Path(path).read_text("ascii", "replace")
    except OSError as error:
        reason = error.strerror or "it cannot be read"
        raise UriError(
            f"the certificates to trust, {path}: {reason}", uri=uri, advice=_NAMED
        ) from error
    if "-----BEGIN CERTIFICATE-----" not in text:
        raise UriError(
            f"the certificates to trust, {path}: it contains none in PEM format",
            uri=uri,
            advice=_NAMED,
        )
    return text


_NAMED = "The option ca names this file, or AWS_CA_BUNDLE, or the profile's ca_bundle (s3://)."


def system_certificates() -> str | None:
    """Return the file of certificates trusted on this host. By default, botocore would trust its
    own collection."""
    named = os.environ.get("SSL_CERT_FILE")
    return next((file for file in (named, *_SYSTEM) if file and os.path.isfile(file)), None)


def check_trusted(url: str, options: Mapping[str, Any], uri: str) -> None:
    """Check, once per process, that obstore with client options ``options`` trusts the server of
    ``url``. Sends one request.

    Raises StorageError, which is permanent, if it does not, or if the server does not speak TLS. An
    unreachable server is left to the first operation.
    """
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import HTTPStore

    server = urlsplit(url)
    how = (server.netloc, str(options.get("root_certificate")), str(options.get("proxy_url")))
    if server.scheme != "https" or how in KNOWN.trusted:
        return
    make: Any = HTTPStore
    quick = {
        **options,
        "timeout": options["connect_timeout"],
        "read_timeout": options["connect_timeout"],
    }
    store = make(f"https://{server.netloc}", client_options=quick, retry_config={"max_retries": 0})
    try:
        obstore.head(store, "holdfast")
    except (BaseError, OSError) as error:
        if (refusal := untrusted(str(error), uri)) is not None:
            raise refusal from error
        if "kind: Connect" in str(error) or "kind: Timeout" in str(error):
            return
    KNOWN.trusted.add(how)


def untrusted(text: str, uri: str, key: str | None = None) -> StorageError | None:
    """Return the error if obstore's message ``text`` is about an untrusted server, else None."""
    if match := _CERTIFICATE.search(text):
        reason = match[1].removesuffix("Context")
        advice = _ADVICE.get(
            reason,
            "Look at the server's certificate, and at the authorities that this host trusts.",
        )
        return StorageError(
            f"the server's certificate is not trusted: {reason}", uri=uri, key=key, advice=advice
        )
    if _NO_TLS in text:
        return StorageError(
            "the server does not speak TLS", uri=uri, key=key, advice="Is its endpoint http://…?"
        )
    if match := _ALERT.search(text):
        return StorageError(
            f"the server refuses a TLS connection: {match[1]}",
            uri=uri,
            key=key,
            advice="Which versions of TLS does it speak? Client certificates are not supported.",
        )
    return None
