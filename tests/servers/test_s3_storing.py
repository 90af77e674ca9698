"""What an S3 server keeps of what it is told of objects: encryption, class and tags, as another
client sees them."""

from __future__ import annotations

import asyncio

import pytest
from support.servers.moto import Moto

from holdfast.drivers.registry import open_driver

TIMEOUT_S = 60
KMS = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
LARGE = memoryview(bytes((5 << 20) + 1))


async def store(uri: str) -> None:
    """One object of one request, and one of two parts."""
    driver = open_driver(uri)
    try:
        await driver.put("small", b"abc")
        large = await driver.create("large", len(LARGE))
        await large.write(0, LARGE)
        await large.commit()
    finally:
        await driver.close()


@pytest.mark.parametrize("name", ["small", "large"])
def test_the_server_keeps_what_it_was_told(name: str, moto: Moto, moto_url: str) -> None:
    """Small and large objects alike are encrypted with the key, in the class, and have the tags."""
    options = f"part_size=5MiB&sse=aws:kms&kms={KMS}&storage_class=STANDARD_IA&tags=team=ml,run=7"
    asyncio.run(asyncio.wait_for(store(f"{moto_url}&{options}"), TIMEOUT_S))
    root = moto_url.partition("://holdfast/")[2].partition("?")[0]
    client = moto.client()
    found = client.head_object(Bucket="holdfast", Key=f"{root}/{name}")
    tags = client.get_object_tagging(Bucket="holdfast", Key=f"{root}/{name}")["TagSet"]
    client.close()
    assert (found["ServerSideEncryption"], found["SSEKMSKeyId"]) == ("aws:kms", KMS)
    assert found["StorageClass"] == "STANDARD_IA"
    assert {tag["Key"]: tag["Value"] for tag in tags} == {"team": "ml", "run": "7"}
