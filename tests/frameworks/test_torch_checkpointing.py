"""torch_checkpointing itself, with its files on storage that Holdfast has drivers for."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.framework_jobs import run_page
from support.rank_processes import RankProcesses
from support.servers.radosgw import find_ceph
from support.servers.start import started

import holdfast

pytest.importorskip("torch_checkpointing", reason="not installed: make frameworks")

from support.torch_checkpointing_job import manager, train
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.storage.base_storage import ReadArgs
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from holdfast.storage.integrations.torch_checkpointing import HoldfastStorageConfig

# torch_checkpointing's own, and those of what it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

TAKEN = r"taken|occupied"
RANGES = ReadArgs(pre_read_full_file=False)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    """Two ranks, which import torch_checkpointing once."""
    with RankProcesses(2) as made:
        yield made


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_job_goes_on_with_another_number_of_ranks(
    ranks: RankProcesses, tmp_path: Path, before: int, after: int
) -> None:
    """It computes the same losses as one that never stopped; a checkpoint is committed by its
    name."""
    whole = ranks.run(train, str(tmp_path / "whole"), 1, 8, world=before)[0]
    uri = str(tmp_path / "run")
    losses = ranks.run(train, uri, 1, 4, world=before)[0]
    assert sorted(os.listdir(uri)) == ["step-4"]
    losses += ranks.run(train, uri, 5, 8, world=after)[0]
    assert losses == whole
    assert sorted(os.listdir(uri)) == ["step-4", "step-8"]


def test_a_background_process_saves_to_s3(tmp_path: Path) -> None:
    """It opens the storage by itself, from the configuration that it is given."""
    if find_ceph() is None:
        pytest.skip("radosgw is not installed: make test-servers")
    with started("s3", tmp_path / "radosgw") as (uri, settings), pytest.MonkeyPatch.context() as m:
        for name, value in settings.items():
            m.setenv(name, value)
        checkpoints = manager(uri, asynchronous=True)
        state = {"model": {"w": torch.arange(6.0)}, "step": 7}
        written = checkpoints.save("step-7", state)
        assert written is not None
        written.result(timeout=100)
        into = {"model": {"w": torch.zeros(6)}, "step": 0}
        assert checkpoints.load("step-7", into)["step"] == 7
        assert torch.equal(into["model"]["w"], torch.arange(6.0))
        checkpoints.close()


@pytest.fixture(params=["memory", "file", "theirs"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """An empty one of ours, on one kind of storage, or torch_checkpointing's own."""
    if request.param == "theirs":
        return LocalFileSystemStorageConfig(use_direct_io=False).create_storage()
    uri = {"memory": "memory://", "file": tmp_path.as_uri()}[request.param]
    return HoldfastStorageConfig(uri, {"retries": 1}).create_storage()


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What paths begin with."""
    return tmp_path if "theirs" in request.node.name else Path("/")


def test_a_rename_does_what_the_contract_says(storage: Any, root: Path) -> None:
    """Its table, but for the row of empty folders, which are left to each storage."""
    for name in ("source/a", "source/b/metadata.pkl", "taken/c", "file", "other"):
        storage.mkdir((root / name).parent)
        storage.write(root / name, name.encode())
    for taken in ("taken", "file"):
        with pytest.raises(OSError, match=TAKEN):
            storage.rename(root / "source", root / taken, is_directory=True)
    with pytest.raises(OSError, match=TAKEN):
        storage.rename(root / "file", root / "taken")
    with pytest.raises(FileNotFoundError):
        storage.rename(root / "none", root / "new")
    storage.rename(root / "source", root / "new", is_directory=True)
    assert storage.read(root / "new/b/metadata.pkl") == b"source/b/metadata.pkl"
    assert not storage.exists(root / "source")
    storage.rename(root / "file", root / "other")
    assert storage.read(root / "other") == b"file"
    storage.rename(root / "other", root / "moved")
    assert sorted(storage.ls(root)) == ["moved", "new", "taken"]


def test_files_are_read_and_written_as_their_users_do(storage: Any, root: Path) -> None:
    """As a whole, in ranges, and by streams that seek."""
    content = os.urandom(3 << 20)
    with storage.stream_write(root / "large") as stream:
        for start in range(0, len(content), 1000):
            stream.write(content[start : start + 1000])
    assert storage.getsize(root / "large") == len(content)
    assert storage.read(root / "large") == content
    assert storage.stream_read(root / "large").read() == content
    with storage.stream_read(root / "large", RANGES) as stream:
        assert stream.seek(-10, io.SEEK_END) == len(content) - 10
        assert stream.read(100) == content[-10:]
        assert stream.seek(5) == 5
        into = bytearray(2 << 20)
        assert stream.readinto(into) == len(into)
        assert into == content[5 : 5 + len(into)]
        assert stream.tell() == 5 + len(into)
    with pytest.raises(FileNotFoundError):
        storage.read(root / "none")
    with pytest.raises(FileNotFoundError):
        storage.getsize(root / "none")
    assert storage.isdir(root)
    assert not storage.isdir(root / "large")
    assert storage.glob(str(root / "lar*")) == [str(root / "large")]
    storage.delete(root / "large")
    assert not storage.exists(root / "large")


def test_a_file_that_was_not_finished_is_not_there() -> None:
    """Whether an error came, or it was forgotten."""
    storage = HoldfastStorageConfig("memory://").create_storage()
    with pytest.raises(TypeError), storage.stream_write(Path("a")) as stream:
        stream.writelines([b"half", None])
    stream = storage.stream_write(Path("a"))
    stream.write(b"half")
    del stream
    assert not storage.exists(Path("a"))


def test_paths_are_not_uris() -> None:
    """A URI in the place of a name would lie below the URI of the storage."""
    storage = HoldfastStorageConfig("memory://").create_storage()
    with pytest.raises(holdfast.UriError, match="is a URI"):
        storage.exists(Path("s3://bucket/run"))
    assert storage.remap_path(Path("/a/b")) == "memory:///a/b"
    with pytest.raises(holdfast.UriError, match="no option 'retires'"):
        HoldfastStorageConfig("memory://", {"retires": 1}).create_storage()


def test_the_how_to_does_what_it_says(tmp_path: Path) -> None:
    """Its code, with a folder in the place of the bucket."""
    replaced = {"s3://bucket": str(tmp_path)}
    replaced["Config(storage"] = "Config(save=SyncCheckpointSaverConfig(), storage"
    given = {"SyncCheckpointSaverConfig": SyncCheckpointSaverConfig}
    names = run_page("use-with-torch-checkpointing.md", tmp_path, given, replaced)
    names["manager"].save("step-500", {"model": {"w": torch.ones(2)}})
    assert (tmp_path / "run" / "step-500" / "model_0.pt").is_file()
    into = {"model": {"w": torch.zeros(2)}}
    assert torch.equal(names["manager"].load("step-500", into)["model"]["w"], torch.ones(2))
