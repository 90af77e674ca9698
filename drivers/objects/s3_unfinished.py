"""Finds and drops unfinished multipart uploads of S3, with botocore, because obstore cannot.

They are never visible, but are stored and billed until dropped. All functions block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from math import inf
from typing import Any

from ...errors import StorageDownError
from .known_stores import KNOWN
from .s3_errors import aws_failures

_log = logging.getLogger(__name__)

_UNKNOWN = {
    "NotImplemented",
    "MethodNotAllowed",
    "NoSuchUpload",
    "UnsupportedOperation",
    "501",
    "405",
}
"""Error codes of servers that cannot list unfinished uploads."""

_CLOCK_S = 2.0
"""Tolerance in seconds: servers report whole seconds, and those of one store may differ
slightly."""
_CLOCK_KEY = ".holdfast-clock"
_DATES_S = 300.0
"""Maximum error, in seconds, of a store's dates for uploads to be judged by their age."""


@dataclass
class Unfinished:
    """Unfinished uploads of one bucket.

    ``client`` is botocore's; ``uri`` appears in messages; ``limit_s``: time limit of a listing.
    """

    client: Any
    bucket: str
    uri: str
    limit_s: float
    by_folder: bool = False
    """True if the store only lists whole folders, as directory buckets do."""
    is_live: Callable[[str], bool] = lambda path: False
    """Returns whether this process is uploading to a path."""

    def drop(
        self, path: str, *, whole_key: bool = False, quiet_s: float = 0, began_within_s: float = inf
    ) -> None:
        """Drop unfinished uploads to ``path``, and unless ``whole_key`` also below it.

        Only affects uploads without activity for ``quiet_s`` that began in the last
        ``began_within_s`` seconds, by the store's clock. With a ``quiet_s``, spares uploads of this
        process, and all uploads if the store's dates are wrong. Raises StorageError.
        """
        deadline_s = time.monotonic() + self.limit_s
        if self._place in KNOWN.no_upload_list:
            return
        with aws_failures("dropping unfinished uploads", self.uri, path):
            for now_s, upload in self._all(path, deadline_s):
                if upload["Key"] != path and (
                    whole_key or not upload["Key"].startswith(path + "/")
                ):
                    continue
                age_s = now_s - upload["Initiated"].timestamp()
                if age_s > began_within_s + _CLOCK_S:
                    continue
                if quiet_s and not self._is_dead(upload, now_s, quiet_s, path):
                    continue
                self._abort(upload)

    def _is_dead(self, upload: dict[str, Any], now_s: float, quiet_s: float, path: str) -> bool:
        """Return whether ``upload`` had no activity for ``quiet_s``, judged by the store's dates.

        False for uploads of this process, and if the dates are wrong. ``now_s``: the store's time.
        """
        if self.is_live(upload["Key"]) or self._place in KNOWN.wrong_dates:
            return False
        if now_s - upload["Initiated"].timestamp() < quiet_s:
            return False
        if min(self._ages_s(upload, now_s)) < quiet_s:
            return False
        if not self._dates_are_right(path):
            KNOWN.wrong_dates.add(self._place)
            _log.warning(
                "%s gives unfinished uploads wrong dates: they stay until the store drops them",
                self.uri,
            )
            return False
        return True

    def _dates_are_right(self, path: str) -> bool:
        """Return whether the store dates a trial upload below ``path`` and its part correctly. Some
        stores give all uploads the same date, so live ones would look dead."""
        name = {"Bucket": self.bucket, "Key": f"{path}/{_CLOCK_KEY}"}
        upload = {**name, **self.client.create_multipart_upload(**name)}
        try:
            sent = {**name, "UploadId": upload["UploadId"]}
            self.client.upload_part(**sent, PartNumber=1, Body=b"0")
            listed = self._all(name["Key"], time.monotonic() + self.limit_s)
            ages_s = [
                self._ages_s(found, now_s)
                for now_s, found in listed
                if found["UploadId"] == upload["UploadId"]
            ]
        finally:
            self._abort(upload)
        return bool(ages_s) and all(abs(age_s) < _DATES_S for age_s in ages_s[0])

    def _all(self, path: str, deadline_s: float) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yield ``(now_s, upload)`` for every upload whose key begins with ``path``.

        With ``by_folder``, also yields all others in the same folder: callers compare keys.
        ``now_s``: the store's time of the listing, in seconds since the epoch. Yields nothing if
        the store cannot list uploads. Raises StorageDownError once ``time.monotonic()`` exceeds
        ``deadline_s``, and botocore's errors.
        """
        more: dict[str, str] = {}
        while True:
            if time.monotonic() > deadline_s:
                raise StorageDownError(
                    f"listing uploads took more than {self.limit_s:g} s", uri=self.uri
                )
            page = self._page(path, more)
            if page is None:
                return
            now_s = _server_time_s(page)
            yield from ((now_s, upload) for upload in page.get("Uploads", ()))
            if not page.get("IsTruncated"):
                return
            markers = {
                "KeyMarker": page.get("NextKeyMarker"),
                "UploadIdMarker": page.get("NextUploadIdMarker"),
            }
            more = {name: marker for name, marker in markers.items() if marker}

    def _page(self, path: str, more: dict[str, str]) -> dict[str, Any] | None:
        """Return one page of the list; None if the server cannot list uploads. Raises ClientError.

        ``more``: the position after the previous page; empty for the first one.
        """
        from botocore.exceptions import ClientError

        prefix = path
        if self.by_folder:
            prefix = path[: path.rfind("/") + 1]
        try:
            page: dict[str, Any] = self.client.list_multipart_uploads(
                Bucket=self.bucket, Prefix=prefix, **more
            )
        except ClientError as error:
            code = error.response["Error"]["Code"]
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if code not in _UNKNOWN and status != 501:
                raise
            KNOWN.no_upload_list.add(self._place)
            _log.warning(
                "%s cannot list unfinished uploads (%s, status %d): leftovers of failed "
                "uploads stay there until the store removes them",
                self.uri,
                code,
                status,
            )
            return None
        return page

    @property
    def _place(self) -> tuple[str, str]:
        return self.client.meta.endpoint_url, self.bucket

    def _ages_s(self, upload: dict[str, Any], now_s: float) -> list[float]:
        """Return the ages in seconds of an upload and of each of its parts."""
        name = {"Bucket": self.bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
        dates = [upload["Initiated"]]
        for page in self.client.get_paginator("list_parts").paginate(**name):
            dates += [part["LastModified"] for part in page.get("Parts", ())]
        return [now_s - date.timestamp() for date in dates]

    def _abort(self, upload: dict[str, Any]) -> None:
        from botocore.exceptions import ClientError

        try:
            self.client.abort_multipart_upload(
                Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
            )
        except ClientError as error:
            # completed, or dropped by another process
            if error.response["Error"]["Code"] != "NoSuchUpload":
                raise


def _server_time_s(page: dict[str, Any]) -> float:
    date = page["ResponseMetadata"]["HTTPHeaders"].get("date")
    if date:
        return parsedate_to_datetime(date).timestamp()
    return time.time()
