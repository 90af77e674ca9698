"""A plugin of pytest: ``s3://`` sends objects of more than 64 KiB in parts, as it does from 16 MiB
on. AWS takes none that small; radosgw does, when told so. With it the conformance kit, whose
objects are small, tries uploads of several parts."""

from __future__ import annotations

from dataclasses import replace

from holdfast.drivers.objects.s3 import S3Driver
from holdfast.drivers.options import size

__all__ = ["RADOSGW", "pytest_configure"]

PART_NBYTES = 64 << 10
RADOSGW = f"rgw_multipart_min_part_size = {PART_NBYTES}"
"""What the server is to be told."""


def pytest_configure() -> None:
    """Before any driver is opened."""
    option = replace(
        S3Driver.OPTIONS["part_size"], parse=size(PART_NBYTES, 5 << 30), default=PART_NBYTES
    )
    S3Driver.OPTIONS = {**S3Driver.OPTIONS, "part_size": option}
