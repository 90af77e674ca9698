"""Per-object storage options of S3: encryption, storage class, tags, and who pays."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from ...errors import UriError
from ..options import Option, choice, switch
from ..uri import Uri
from .s3_place import is_express

_KMS = ("aws:kms", "aws:kms:dsse")
_SLOW = ("GLACIER", "DEEP_ARCHIVE")
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TAG = re.compile(r"[\w +\-.:/@]{1,128}")
_KEY_NBYTES = 32


def _storage_class(text: str) -> str:
    if not _WORD.fullmatch(text):
        raise ValueError("must be the name of a storage class")
    return text


def _tags(text: str) -> str:
    """Validate a list of tags such as ``team=ml,run=7`` and return it unchanged."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(
        _TAG.fullmatch(name) and equals and _TAG.fullmatch(value or "-")
        for name, equals, value in pairs
    ):
        raise ValueError("must be a list of tags, such as team=ml,run=7")
    if len({name for name, _, _ in pairs}) < len(pairs) or len(pairs) > 10:
        raise ValueError("must have distinct names, and at most ten")
    return text


STORING_OPTIONS: Mapping[str, Option] = {
    "sse": Option(
        choice("bucket", "AES256", *_KMS, "customer"),
        "bucket",
        "server-side encryption; bucket: the bucket's default",
    ),
    "kms": Option(str, "", "AWS KMS key, by id, alias or ARN; for sse=aws:kms"),
    "bucket_kms": Option(
        choice("bucket", "on", "off"), "bucket", ("for sse=aws:kms: one data key for many objects")
    ),
    "sse_customer_key": Option(str, "", "for sse=customer: 32 bytes in base64; never in a URI"),
    "storage_class": Option(
        _storage_class, "", "storage class of each object, such as STANDARD_IA"
    ),
    "tags": Option(_tags, "", "tags of each object: team=ml,run=7"),
    "requester_pays": Option(switch, False, "pay for requests to somebody else's bucket"),
}
"""Further options of ``s3://``."""


def check_storing(bucket: str, values: Mapping[str, Any], uri: Uri) -> None:
    """Raise UriError for contradictory options."""
    sse = values["sse"]
    own = bool(values["kms"] or values["tags"] or values["storage_class"] or sse != "bucket")
    kms_options = bool(values["kms"]) or values["bucket_kms"] != "bucket"
    contradictions = [
        (
            kms_options and sse not in _KMS,
            "kms and bucket_kms require sse=aws:kms",
            "Add sse=aws:kms.",
        ),
        (
            (sse == "customer") != bool(values["sse_customer_key"]),
            "sse=customer and sse_customer_key need each other",
            "Give the key by HOLDFAST_S3_SSE_CUSTOMER_KEY, or in storage_options.",
        ),
        (
            sse == "customer" and not _is_key(values["sse_customer_key"]),
            "sse_customer_key must be 32 bytes in base64",
            "Create one with: openssl rand -base64 32.",
        ),
        (
            values["storage_class"].upper() in _SLOW,
            (f"objects of the storage class {values['storage_class']} cannot be read on demand"),
            (
                "Let a life-cycle rule move old checkpoints there; load after restoring them. "
                "GLACIER_IR can be read at once."
            ),
        ),
        (
            is_express(bucket) and own,
            (
                "directory buckets of S3 Express have no tags, storage classes or encryption of "
                "single objects"
            ),
            "Set the encryption of the bucket itself.",
        ),
    ]
    for wrong, message, advice in contradictions:
        if wrong:
            raise UriError(message, uri=uri.redacted, advice=advice)


def _is_key(text: str) -> bool:
    try:
        return len(base64.b64decode(text, validate=True)) == _KEY_NBYTES
    except (binascii.Error, ValueError):
        return False


def store_config(bucket: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return obstore's configuration for these options. Unset options follow the bucket's
    defaults."""
    config: dict[str, Any] = {
        "request_payer": values["requester_pays"],
        "s3_express": is_express(bucket),
    }
    sse = values["sse"]
    if sse != "bucket":
        if sse == "customer":
            config["server_side_encryption"] = "sse-c"
        else:
            config["server_side_encryption"] = sse
    if values["sse_customer_key"]:
        config["sse_customer_key_base64"] = values["sse_customer_key"]
    if values["kms"]:
        config["sse_kms_key_id"] = values["kms"]
    if values["bucket_kms"] != "bucket":
        config["sse_bucket_key_enabled"] = values["bucket_kms"] == "on"
    return config


def upload_params(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return botocore's parameters that start an upload of an object with these options."""
    found: dict[str, Any] = {}
    if values["sse"] not in ("bucket", "customer"):
        found["ServerSideEncryption"] = values["sse"]
    if values["kms"]:
        found["SSEKMSKeyId"] = values["kms"]
    if values["bucket_kms"] != "bucket":
        found["BucketKeyEnabled"] = values["bucket_kms"] == "on"
    if values["storage_class"]:
        found["StorageClass"] = values["storage_class"]
    if values["tags"]:
        found["Tagging"] = urlencode(labels(values)["tags"])
    return found


def key_params(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return botocore's parameters with the key of ``sse=customer``. ``prefix``: ``CopySource`` for
    the key of an object that is copied."""
    if values["sse"] != "customer":
        return {}
    key = base64.b64decode(values["sse_customer_key"])
    return {f"{prefix}SSECustomerAlgorithm": "AES256", f"{prefix}SSECustomerKey": key}


def labels(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of each put that are not part of obstore's configuration."""
    given: dict[str, Any] = {}
    if values["storage_class"]:
        given["attributes"] = {"Storage-Class": values["storage_class"]}
    if values["tags"]:
        given["tags"] = dict(pair.split("=", 1) for pair in values["tags"].split(","))
    return given
