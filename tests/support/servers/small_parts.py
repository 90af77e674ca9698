"""A pytest plugin that makes ``s3://`` upload objects of more than 64 KiB in parts.

The default is 16 MiB. AWS rejects parts this small; radosgw accepts them if configured. With the
plugin the conformance kit, whose objects are small, covers uploads of several parts."""

from __future__ import annotations

from dataclasses import replace

from holdfast.drivers.objects.s3 import S3Driver
from holdfast.drivers.options import size

PART_NBYTES = 64 << 10
RADOSGW = f"rgw_multipart_min_part_size = {PART_NBYTES}"
"""Line of the radosgw configuration that allows parts this small."""


def pytest_configure() -> None:
    """Lower the part size before any driver is opened."""
    option = replace(
        S3Driver.OPTIONS["part_size"], parse=size(PART_NBYTES, 5 << 30), default=PART_NBYTES
    )
    S3Driver.OPTIONS = {**S3Driver.OPTIONS, "part_size": option}
