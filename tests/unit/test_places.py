"""One URI, one place: however a URI is written, and back from a listing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.bits import fresh_uri

import holdfast
from holdfast.drivers.uri import join


@pytest.fixture(params=["memory", "file", "bare path", "fsspec+memory", "fsspec+file"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A URI of a run, of one scheme after the other."""
    name = fresh_uri().removeprefix("memory://")
    return {
        "memory": f"memory://{name}/run",
        "file": f"file://{tmp_path}/run",
        "bare path": f"{tmp_path}/run",
        "fsspec+memory": f"fsspec+memory://{name}/run",
        "fsspec+file": f"fsspec+file://{tmp_path}/run",
    }[request.param]


@pytest.mark.parametrize(
    "written", ["{}//step-1", "{}/./step-1", "{}/step-1/", "{}///step-1//", "{}/step-1/."]
)
def test_empty_parts_of_a_uri_mean_nothing(base: str, written: str) -> None:
    """What was saved there is found by a listing and by its plain URI, and the other way round."""
    uri = written.format(base)
    holdfast.save(uri, {"w": torch.ones(1)}, step=1)
    assert torch.equal(holdfast.load(f"{base}/step-1")["w"], torch.ones(1))
    (listed,) = holdfast.list_checkpoints(f"{base}/")
    assert listed.path == "step-1"
    holdfast.save(f"{base}/step-1", {"w": torch.zeros(1)}, step=1)
    assert torch.equal(holdfast.load(uri)["w"], torch.zeros(1))
    assert len(holdfast.list_checkpoints(base)) == 1


@pytest.mark.parametrize("name", ["a b", "größe", "100%", "a%20b", "x?y", "x#y", "a&b=c"])
def test_a_path_of_a_listing_leads_back(base: str, name: str) -> None:
    """Names with signs that a URI writes otherwise, too."""
    uri = str(join(base, name))
    holdfast.save(uri, {"w": torch.ones(1)})
    (listed,) = holdfast.list_checkpoints(base)
    assert listed.path == name
    again = join(base, listed.path)
    assert list(holdfast.load(str(again))) == ["w"]


@pytest.mark.parametrize("scheme", ["s3", "az", "gs", "memory", "fsspec+memory", "hdfs"])
@pytest.mark.parametrize("path", ["a/../b", "a%2F%2Fb", "a/%2E%2E/b", "%2e/a"])
def test_a_root_that_has_two_spellings_is_refused(scheme: str, path: str) -> None:
    """Before any I/O, also where it is percent-encoded."""
    with pytest.raises(holdfast.UriError):
        holdfast.list_checkpoints(f"{scheme}://bucket/{path}")


def test_a_run_with_a_slash_at_its_end_is_that_run() -> None:
    """A Checkpointer there finds what was saved below it."""
    base = f"{fresh_uri()}/run/"
    holdfast.save(f"{base}/step-00000001", {"step": 1}, step=1)
    state = {"step": 0}
    with holdfast.Checkpointer(base, every=1) as checkpointer:
        assert checkpointer.resume(state) == 1
