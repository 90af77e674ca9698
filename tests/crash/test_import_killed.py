"""An import that is killed by SIGKILL leaves one whole checkpoint or none, and the next one
resumes.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.aftermath import check_next_save
from support.bits import difference
from support.victims import import_and_die_at, spawned, state_of_step

import holdfast

WAIT_S = 60.0
MODEL = {f"l{i}": torch.full((12_000,), float(i)) for i in range(6)}


def there(uri: Path) -> str:
    """Which checkpoint is there, whole: "new", or the step of the old one."""
    found = holdfast.load(uri)
    with holdfast.open(uri) as c:
        assert c.verify().ok
    if "step" in found:
        assert difference(state_of_step(found["step"]), found) is None
        return str(found["step"])
    assert difference(MODEL, found) is None
    return "new"


def undecided_images(uri: Path) -> list[Path]:
    """The images of attempts that nobody has decided on."""
    attempts = [
        path
        for path in (uri / "data").iterdir()
        if (path / "attempt.json").exists() and not (path / "fate").exists()
    ]
    found = (image for path in attempts for image in path.glob("*.safetensors"))
    return [image for image in found if not image.name.startswith(".")]


@pytest.mark.nightly(17)
@pytest.mark.timeout(300)
def test_an_import_killed_before_one_of_its_system_calls(tmp_path: Path, seed: int) -> None:
    """Kill an import before every thirteenth system call, then import again.

    Before the commit, a reader finds the old checkpoint, and from then on the import. The second
    import succeeds. It keeps whole images, whose bytes it does not write again.
    """
    save_file(MODEL, tmp_path / "model.safetensors")
    kept, found = 0, []
    for at in itertools.count(1 + seed % 13, 13):
        dst = tmp_path / str(at)
        holdfast.save(dst, state_of_step(at))
        process, pipe = spawned(
            import_and_die_at, str(tmp_path / "model.safetensors"), str(dst), at
        )
        process.join(WAIT_S)
        if process.exitcode == 0:
            assert pipe.recv() < at
            break
        assert process.exitcode == -9
        found.append(there(dst))
        assert found[-1] in ("new", str(at))
        whole = {path: path.stat() for path in undecided_images(dst)}
        report = holdfast.import_(
            tmp_path / "model.safetensors", dst, overwrite=True, image_nbytes=64 << 10
        )
        if found[-1] != "new":
            assert report.reused_nbytes == sum(stat.st_size for stat in whole.values())
            assert all(path.stat().st_ino == stat.st_ino for path, stat in whole.items())
            kept = max(kept, len(whole))
        assert there(dst) == "new"
        assert list(dst.rglob("*.tmp")) == []
        check_next_save(dst, 1)
    assert len(found) > 5
    assert kept > 1
