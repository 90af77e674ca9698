"""Test copies: the same checkpoint to the bit or nothing, never damaged, never overwriting unasked."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from support.bits import difference, fresh_uri
from support.copies import OLD, attempts, checkpoint, copied, flipped, images, loaded, run, save
from support.drivers import HookedDriver, contents

import holdfast
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.format.manifest import MANIFEST_KEY


@pytest.mark.nightly(6)
@pytest.mark.parametrize("destination", ["memory", "file"])
def test_a_copy_is_the_same_checkpoint(destination: str, tmp_path: Path) -> None:
    """Copies from memory to disk and back are equal and verify."""
    uri = fresh_uri()
    state = {
        "x": torch.randn(5 << 20, dtype=torch.float64),
        "y": [torch.arange(7), "text"],
        "step": 12,
    }
    holdfast.save(uri, state)
    there = str(tmp_path / "there") if destination == "file" else fresh_uri()
    report = holdfast.copy(uri, there)
    assert report.ok
    assert report.sent_nbytes == report.nbytes > 40 << 20
    assert [(c.path, c.step, c.files) for c in report.checkpoints] == [("", 12, 1)]
    back = fresh_uri()
    holdfast.copy(there, back)
    for copy in (there, back):
        assert difference(state, holdfast.load(copy)) is None
        with holdfast.open(copy) as c, holdfast.open(uri) as original:
            assert c.verify().ok
            assert (c.step, c.world, c.created_s) == (12, 1, original.created_s)
            assert c.attempt != original.attempt


def test_a_folder_is_copied_checkpoint_by_checkpoint(tmp_path: Path) -> None:
    """Each to the same path; those that are there already are not sent again."""
    root = fresh_uri()
    for step in (20, 3):
        holdfast.save(f"{root}/run/step-{step}", {"x": torch.ones(step), "step": step})
    first = holdfast.copy(root, tmp_path, recursive=True)
    assert [(c.path, c.step) for c in first.checkpoints] == [("run/step-3", 3), ("run/step-20", 20)]
    holdfast.save(f"{root}/run/step-30", {"x": torch.ones(3), "step": 30})
    second = holdfast.copy(root, tmp_path, recursive=True)
    assert [c.sent_nbytes > 0 for c in second.checkpoints] == [False, False, True]
    assert [c.path for c in holdfast.list_checkpoints(tmp_path)] == [
        "run/step-3",
        "run/step-20",
        "run/step-30",
    ]
    with pytest.raises(holdfast.NotACheckpointError):
        holdfast.copy(root, fresh_uri())
    with pytest.raises(holdfast.NotACheckpointError):
        holdfast.copy(fresh_uri(), fresh_uri(), recursive=True)


def test_another_checkpoint_is_replaced_only_if_asked_for() -> None:
    """Otherwise the error comes before any byte of data is read, and nothing is changed."""
    theirs, ours, seen = checkpoint(), MemoryDriver(), Counter[str]()
    run(save(ours, OLD))
    before = run(contents(ours))

    async def count(operation: str, key: str) -> None:
        seen[operation] += 1

    with pytest.raises(holdfast.ExistsError, match="another checkpoint already exists"):
        copied(HookedDriver(theirs, before=count), HookedDriver(ours, before=count))
    assert seen == {"get": 2}
    assert run(contents(ours)) == before
    copied(theirs, ours, overwrite=True)
    assert loaded(ours)["who"] == "new"
    assert len(attempts(ours)) == 1


def test_a_damaged_manifest_at_the_destination_is_no_free_place() -> None:
    """Somebody may want to salvage what it named."""
    theirs, ours = checkpoint(), MemoryDriver()
    run(ours.put(MANIFEST_KEY, b"rubbish"))
    with pytest.raises(holdfast.ExistsError, match="damaged"):
        copied(theirs, ours)
    copied(theirs, ours, overwrite=True)
    assert loaded(ours)["who"] == "new"


def test_the_same_checkpoint_is_left_alone_or_mended() -> None:
    """Nothing is sent to an equal copy; ``overwrite`` repairs a damaged one."""
    theirs, ours = checkpoint(), MemoryDriver()
    sent_nbytes = copied(theirs, ours)
    assert copied(theirs, ours) == 0
    assert copied(theirs, ours, overwrite=True) == 0
    flipped(ours, images(ours)[1], 5000)
    assert copied(theirs, ours) == 0
    assert copied(theirs, ours, overwrite=True) == sent_nbytes
    assert copied(theirs, ours, overwrite=True) == 0
    assert copied(ours, ours, overwrite=True) == 0


@pytest.mark.parametrize("at", [0, 9000, -1])
def test_a_damaged_source_is_never_copied_as_good(at: int) -> None:
    """Damaged data is an error; damaged checksums are rewritten."""
    theirs, ours = checkpoint(), MemoryDriver()
    key = images(theirs)[2]
    flipped(theirs, key, at)
    if at == -1:
        copied(theirs, ours)
        assert loaded(ours)["who"] == "new"
    else:
        with pytest.raises(holdfast.DamagedError, match="bytes 0 to ") as caught:
            copied(theirs, ours)
        assert caught.value.key == key
        assert ("own" in str(caught.value)) == (at == 9000) or at == 0
        assert run(contents(ours)) == {}


def test_a_damaged_block_is_named_with_its_tensor(tmp_path: Path) -> None:
    """Not the whole chunk: 64 KiB, and the one tensor that lies there."""
    holdfast.save(tmp_path, {"a": torch.zeros(1 << 20), "b": torch.ones(1 << 20)})
    (image,) = (tmp_path / "data").glob("*/*.safetensors")
    with image.open("r+b") as file:
        file.seek((4 << 20) + (2 << 20))
        file.write(b"\xff")
    with pytest.raises(
        holdfast.DamagedError, match=r"bytes 6,291,456 to 6,356,992 are not .* to tensor 'b'"
    ):
        holdfast.copy(tmp_path, fresh_uri())


def test_one_damaged_checkpoint_keeps_no_other_from_being_copied(tmp_path: Path) -> None:
    """It is a problem of the report."""
    root = fresh_uri()
    for step in (1, 2, 3, 4):
        holdfast.save(f"{root}/step-{step}", {"x": torch.ones(3000), "step": step})
    broken = MemoryDriver(f"{root.removeprefix('memory://')}/step-2")
    flipped(broken, images(broken)[0], 6000)
    run(MemoryDriver(f"{root.removeprefix('memory://')}/step-3").put(MANIFEST_KEY, b"rubbish"))
    report = holdfast.copy(root, tmp_path, recursive=True)
    assert not report.ok
    assert {c.path: c.problem is None for c in report.checkpoints} == {
        "step-1": True, "step-2": False, "step-3": False, "step-4": True
    }  # fmt: skip
    assert [c.step for c in holdfast.list_checkpoints(tmp_path)] == [1, 4]


def test_a_source_that_is_replaced_meanwhile_is_called_so() -> None:
    """Not damaged."""
    theirs, ours = checkpoint(), MemoryDriver()
    other = run(contents(checkpoint()))

    async def replaced(operation: str, key: str) -> None:
        if operation == "read" and MANIFEST_KEY in other:
            await theirs.put(MANIFEST_KEY, other.pop(MANIFEST_KEY))
            await theirs.delete_all("data")

    with pytest.raises(holdfast.ReplacedError):
        copied(HookedDriver(theirs, before=replaced), ours)
    assert run(contents(ours)) == {}


def test_each_side_has_options_of_its_own(tmp_path: Path) -> None:
    """What the other side would not know reaches the one that it is for."""
    uri = fresh_uri()
    holdfast.save(uri, {"x": torch.ones(3)})
    holdfast.copy(uri, tmp_path, dst_options={"threads": 3})
    assert holdfast.copy(tmp_path, fresh_uri(), src_options={"direct": "off"}).ok
    for options in ({"src_options": {"threads": 3}}, {"dst_options": {"endpoint": "x"}}):
        with pytest.raises(holdfast.UriError):
            holdfast.copy(uri, tmp_path, **options)


def test_what_is_damaged_counts_neither_as_copied_nor_as_there(tmp_path: Path) -> None:
    """Totals count only what is at the destination."""
    root, seen = tmp_path / "from", list[tuple[int, int]]()
    for step in (1, 2, 3):
        holdfast.save(
            root / f"step-{step}", {"x": torch.zeros(5 << 20, dtype=torch.uint8), "step": step}
        )
    (image,) = (root / "step-2/data").glob("*/*.safetensors")
    content = bytearray(image.read_bytes())
    content[4 << 20] ^= 1
    image.write_bytes(content)
    report = holdfast.copy(
        root,
        tmp_path / "to",
        recursive=True,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [c.step for c in report.copied] == [1, 3]
    assert (report.ok, report.checkpoints[1].problem is None) == (False, False)
    assert report.nbytes == report.sent_nbytes == 2 * report.checkpoints[0].nbytes
    assert seen[-1][0] == seen[-1][1] >= report.nbytes
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    again = holdfast.copy(root, tmp_path / "to", recursive=True)
    assert (again.nbytes, again.sent_nbytes) == (report.nbytes, 0)
