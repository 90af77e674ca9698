"""Checkpoints on a real S3 server, through the public names only: no line differs from saving to a
disk."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.framework_jobs import run_job
from support.servers.moto import Moto

import holdfast
from holdfast.drivers.registry import open_driver


def state_of(seed: int, elements: int = 12_000_000) -> dict[str, Any]:
    """48 MB that nothing could compress, in tensors of very different sizes."""
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal(elements, np.float32))
    return {
        "big": values,
        "part": {"ü/x y": values[:1000].clone(), "none": values[:0].clone()},
        "step": seed,
    }


def zeros_like(state: dict[str, Any]) -> dict[str, Any]:
    """The same with nothing in it."""
    part = {name: torch.zeros_like(value) for name, value in state["part"].items()}
    return {"big": torch.zeros_like(state["big"]), "part": part, "step": 0}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit."""
    assert torch.equal(found["big"], expected["big"])
    assert all(torch.equal(found["part"][name], value) for name, value in expected["part"].items())
    assert found["step"] == expected["step"]


@pytest.mark.nightly(4)
def test_what_was_saved_is_loaded(s3_url: str) -> None:
    """Saved, loaded into tensors and built anew, read in slices, verified, listed, and saved again
    over itself."""
    first, second = state_of(1), state_of(2)
    holdfast.save(s3_url, first, step=1)
    into = zeros_like(first)
    holdfast.load(s3_url, into=into)
    assert_same(into, first)
    holdfast.async_save(s3_url, second, step=2).wait()
    assert_same(holdfast.load(s3_url), second)
    with holdfast.open(s3_url) as checkpoint:
        assert checkpoint.step == 2
        assert torch.equal(
            checkpoint.read("big", rows=slice(5_000_000, 5_000_100)),
            second["big"][5_000_000:5_000_100],
        )
        assert not checkpoint.verify().damages


@pytest.mark.nightly(3)
def test_a_damaged_object_is_found(s3_url: str, request: pytest.FixtureRequest) -> None:
    """One flipped byte in the bucket is an error on load, and never a value."""
    if "HOLDFAST_TEST_S3_URL" in os.environ:
        pytest.skip("the damage is done by the administrator of our own server")
    client, root = (
        request.getfixturevalue("radosgw").client(),
        s3_url.removeprefix("s3://holdfast/").partition("?")[0],
    )
    state = state_of(3)
    holdfast.save(s3_url, state)
    keys = [
        found["Key"] for found in client.list_objects_v2(Bucket="holdfast", Prefix=root)["Contents"]
    ]
    (image,) = (key for key in keys if key.endswith("/0.safetensors"))
    content = bytearray(client.get_object(Bucket="holdfast", Key=image)["Body"].read())
    content[30_000_000] ^= 1
    client.put_object(Bucket="holdfast", Key=image, Body=bytes(content))
    with pytest.raises(holdfast.errors.DamagedError, match="big"):
        holdfast.load(s3_url)
    client.put_object(Bucket="holdfast", Key=image, Body=bytes(content[:20_000_000]))
    with pytest.raises(holdfast.errors.DamagedError, match="beyond the end"):
        holdfast.load(s3_url)


def test_two_ranks_save_and_load_in_another_layout(s3_url: str, tmp_path: Path) -> None:
    """Under torchrun: saved by rows, loaded by columns, and then read by this process alone."""
    run_job("torchrun", tmp_path, s3_url, world=2)
    with holdfast.open(s3_url) as c:
        assert c.world == 2
        assert torch.equal(c.read("w"), torch.arange(15.0).reshape(5, 3))


# Storing as asked


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


@pytest.mark.nightly(5)
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
