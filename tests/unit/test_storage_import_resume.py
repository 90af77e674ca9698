"""An import that fails, dies or meets another leaves a whole checkpoint or none, and goes on where
it stopped, unless its source is another one by then."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.bits import difference
from support.drivers import Hook, HookedDriver, contents
from support.given import Serve

import holdfast
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.operations.conversion.importing import ImportReport
from holdfast.storage.runtime.engine import run

IMAGE_NBYTES = 40_000
"""The model has seven images of this size."""


def model_of(number: int) -> dict[str, torch.Tensor]:
    """A model of eleven tensors of 20 kB, a small one, and one larger than an image."""
    tensors = {f"l{i}": torch.full((5000,), float(number * 100 + i)) for i in range(11)}
    return tensors | {"one": torch.tensor(float(number)), "big": torch.full((20_000,), 7.0)}


def as_safetensors(folder: Path, number: int) -> Path:
    """A folder of a model in one file."""
    save_file(model_of(number), folder / "model.safetensors")
    return folder


def as_dcp(folder: Path, number: int) -> Path:
    """A folder of torch's distributed checkpoint, with a value."""
    dcp.save(model_of(number) | {"step": number}, checkpoint_id=folder, no_dist=True)
    return folder


Make = Callable[[Path, int], Path]


class Destination:
    """Storage in memory, behind hooks that a test sets."""

    def __init__(self, serve: Serve) -> None:
        self.storage = MemoryDriver()
        self.before: Hook | None = None
        self.operations: list[tuple[str, str]] = []
        self.uri = serve(self._driver)

    def _driver(self, location: str) -> HookedDriver:
        before = self.before

        async def hook(operation: str, key: str) -> None:
            self.operations.append((operation, key))
            if before is not None:
                await before(operation, key)

        return HookedDriver(self.storage, before=hook)

    def imported(self, source: Path, **options: object) -> ImportReport:
        """Import, in small images."""
        self.operations.clear()
        return holdfast.import_(source, self.uri, image_nbytes=IMAGE_NBYTES, **options)  # type: ignore[arg-type]

    def stopped(self, source: Path, images: int, **options: object) -> None:
        """An import that dies when so many images are whole."""
        done = 0

        async def die(operation: str, key: str) -> None:
            nonlocal done
            if operation == "commit":
                done += 1
                if done > images:
                    raise holdfast.StorageDownError("injected")

        self.before = die
        with pytest.raises(holdfast.StorageDownError):
            self.imported(source, **options)
        self.before = None

    def images(self) -> dict[str, bytes]:
        """The images that are there, by key."""
        found = run(contents(self.storage))
        return {key: data for key, data in found.items() if key.endswith(".safetensors")}

    def written(self) -> int:
        """How many objects of many parts the last import began to write."""
        return sum(operation == "create" for operation, _ in self.operations)

    def check(self, expected: object) -> None:
        """The checkpoint is whole, and has what is expected; nothing else is there."""
        with holdfast.open(self.uri) as c:
            assert c.verify().ok
            attempt = c.attempt
        assert difference(expected, holdfast.load(self.uri)) is None
        assert {key.split("/")[1] for key in self.images() if "/" in key} <= {attempt}


@pytest.fixture
def destination(serve: Serve) -> Destination:
    """An empty destination."""
    return Destination(serve)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("make", [as_safetensors, as_dcp])
def test_an_import_goes_on_where_it_stopped(
    tmp_path: Path, destination: Destination, make: Make
) -> None:
    """A second import keeps the attempt and its complete images, and writes the others."""
    source = make(tmp_path, 1)
    destination.stopped(source, 3)
    there = destination.images()
    assert len(there) == 3
    with pytest.raises(holdfast.NotACheckpointError):
        holdfast.load(destination.uri)
    report = destination.imported(source, step=5)
    assert report.reused_nbytes == sum(map(len, there.values()))
    found = destination.images()
    assert destination.written() == len(found) - 1 - 3 > 0  # one is the manifest
    assert there.items() <= found.items()
    expected: dict[str, object] = dict(model_of(1))
    if make is as_dcp:
        expected["step"] = 1
    destination.check(expected)
    assert not any(key.endswith("attempt.json") for key in run(contents(destination.storage)))


@pytest.mark.parametrize("hidden", [False, True])
def test_a_changed_source_is_imported_anew(
    tmp_path: Path, destination: Destination, hidden: bool
) -> None:
    """A file of other contents is imported anew, even if its size and time are the same."""
    source = as_safetensors(tmp_path, 1)
    file = source / "model.safetensors"
    destination.stopped(source, 3)
    before = destination.images()
    status = file.stat()
    as_safetensors(source, 2)
    if hidden:
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert file.stat().st_size == status.st_size
    assert destination.imported(source).reused_nbytes == 0
    assert not before.keys() & destination.images().keys()
    destination.check(model_of(2))


def test_another_selection_is_imported_anew(tmp_path: Path, destination: Destination) -> None:
    """Other tensors, other names, or images of another size are other images."""
    source = as_safetensors(tmp_path, 1)
    destination.stopped(source, 3)
    assert destination.imported(source, skip=["l3"]).reused_nbytes == 0
    destination.stopped(source, 3, overwrite=True)
    assert destination.imported(source, rename={"*": "m.*"}, overwrite=True).reused_nbytes == 0
    destination.check({f"m.{name}": tensor for name, tensor in model_of(1).items()})


def test_an_image_that_is_cut_is_written_again(tmp_path: Path, destination: Destination) -> None:
    """An image of another size does not count as written."""
    source = as_safetensors(tmp_path, 1)
    destination.stopped(source, 3)
    key, data = sorted(destination.images().items())[1]
    run(destination.storage.put(key, data[:-1]))
    destination.imported(source)
    assert destination.written() == 7 - 2
    destination.check(model_of(1))


def test_a_file_that_changes_meanwhile_leaves_nothing(
    tmp_path: Path, destination: Destination
) -> None:
    """No other import can use what is there."""
    source = as_safetensors(tmp_path, 1)

    async def touch(operation: str, key: str) -> None:
        if operation == "create" and key.endswith("/3.safetensors"):
            os.utime(source / "model.safetensors", ns=(1, 1))

    destination.before = touch
    with pytest.raises(holdfast.DamagedError, match="changed while it was read"):
        destination.imported(source)
    assert not destination.images()


@pytest.mark.parametrize("same", [True, False], ids=["of the same", "of another"])
def test_of_two_imports_at_once_one_arrives(
    tmp_path: Path, destination: Destination, same: bool
) -> None:
    """The second import takes over complete images; the first then fails and stops writing."""
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    source = as_safetensors(tmp_path / "1", 1)
    other = source if same else as_safetensors(tmp_path / "2", 2)
    halted, go_on = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    async def halt(operation: str, key: str) -> None:
        if operation == "commit" and key.endswith("/3.safetensors"):
            halted.set()
            await asyncio.to_thread(go_on.wait, 60)

    def first() -> None:
        try:
            holdfast.import_(source, destination.uri, image_nbytes=IMAGE_NBYTES)
        except holdfast.HoldfastError as error:
            failed.append(error)

    destination.before = halt
    thread = threading.Thread(target=first)
    thread.start()
    assert halted.wait(60)
    destination.before = None
    there = destination.images()
    report = destination.imported(other)
    assert report.reused_nbytes == (sum(map(len, there.values())) if same else 0)
    go_on.set()
    thread.join(60)
    assert [type(error) for error in failed] == [holdfast.SupersededError]
    destination.check(model_of(1 if same else 2))
