"""Test torch_checkpointing with its files on storage of Holdfast's drivers."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.framework_jobs import check_page

import holdfast

pytest.importorskip("torch_checkpointing", reason="not installed: make frameworks")

from support.torch_checkpointing_job import settings
from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.base_storage import ReadArgs
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from holdfast.storage.integrations.torch_checkpointing import HoldfastStorageConfig

# Warnings of torch_checkpointing and of the packages it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

TAKEN = r"taken|occupied"
RANGES = ReadArgs(pre_read_full_file=False)


@pytest.mark.parametrize(
    "worlds", [(1, 2, 1), pytest.param((2, 1, 2), marks=pytest.mark.nightly(20))]
)
def test_how_to(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    """A job with the page's manager is killed, and resumes on another number of ranks."""
    check_page("use-with-torch-checkpointing.md", tmp_path, worlds=worlds)
    assert (tmp_path / "run" / "step-12" / "model_0.pt").is_file()


def test_background_process_saves(tmp_path: Path) -> None:
    """A background process opens the storage from the configuration that it is given."""
    uri = f"file://{tmp_path}?threads=2"
    checkpoints = CheckpointManager.Config(
        **settings(uri, asynchronous=True), storage_config=HoldfastStorageConfig(uri)
    ).build()
    written = checkpoints.save("step-7", {"model": {"w": torch.arange(6.0)}, "step": 7})
    assert written is not None
    written.result(timeout=100)
    into = {"model": {"w": torch.zeros(6)}, "step": 0}
    assert checkpoints.load("step-7", into)["step"] == 7
    assert torch.equal(into["model"]["w"], torch.arange(6.0))
    checkpoints.close()


@pytest.fixture(params=["memory", "file", "theirs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """Return an empty storage, ours or torch_checkpointing's own, and the root of its paths."""
    if request.param == "theirs":
        return LocalFileSystemStorageConfig(use_direct_io=False).create_storage(), tmp_path
    uri = {"memory": "memory://", "file": tmp_path.as_uri()}[request.param]
    return HoldfastStorageConfig(uri, {"retries": 1}).create_storage(), Path("/")


def test_rename_follows_the_contract(place: tuple[Any, Path]) -> None:
    """A rename follows the table in the contract, except for empty folders."""
    storage, root = place
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


def test_files_are_read_and_written(place: tuple[Any, Path]) -> None:
    """Files are read and written whole, in ranges, and by streams that seek."""
    storage, root = place
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


def test_unfinished_file_does_not_exist() -> None:
    """A file does not appear if its stream raised or was dropped."""
    storage = HoldfastStorageConfig("memory://").create_storage()
    with pytest.raises(TypeError), storage.stream_write(Path("a")) as stream:
        stream.writelines([b"half", None])
    stream = storage.stream_write(Path("a"))
    stream.write(b"half")
    del stream
    assert not storage.exists(Path("a"))


def test_paths_are_not_uris() -> None:
    """A URI in place of a path is refused, since it would lie below the storage's own URI."""
    storage = HoldfastStorageConfig("memory://").create_storage()
    with pytest.raises(holdfast.UriError, match="is a URI"):
        storage.exists(Path("s3://bucket/run"))
    assert storage.remap_path(Path("/a/b")) == "memory:///a/b"
    with pytest.raises(holdfast.UriError, match="no option 'retires'"):
        HoldfastStorageConfig("memory://", {"retires": 1}).create_storage()
