"""What is at a URI that is no checkpoint is said by name: other programs' folders and files, and
checkpoints close by."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import holdfast


def said(uri: Any, call: Callable[[Any], Any] = holdfast.load) -> str:
    """What the error says."""
    with pytest.raises(holdfast.NotACheckpointError) as caught:
        call(uri)
    return str(caught.value)


def saved_by_torch(folder: Path) -> Path:
    """A checkpoint of torch.distributed.checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is one process only
        dcp.save({"w": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    return folder


def touch(folder: Path, *names: str) -> Path:
    """A folder with empty files."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def test_a_folder_of_torchs_distributed_checkpoint(tmp_path: Path) -> None:
    """Written by torch itself; by load, open, copy and on the command line."""
    saved_by_torch(tmp_path / "c")
    for call in (holdfast.load, holdfast.open, lambda uri: holdfast.copy(uri, tmp_path / "d")):
        text = said(tmp_path / "c", call)
        assert "it looks like a checkpoint of torch.distributed.checkpoint" in text
        assert (
            "`holdfast import SRC DEST`, or holdfast.import_, converts it to a checkpoint" in text
        )


def test_files_of_torch_save(tmp_path: Path) -> None:
    """By their first bytes, of either kind; in a folder by their names."""
    torch.save({"w": torch.ones(3)}, tmp_path / "new.pt")
    torch.save({"w": torch.ones(3)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    torch.save({"state_dict": {}}, tmp_path / "epoch=1.ckpt")
    assert "it is a file of torch.save (in" in said(tmp_path / "new.pt")
    assert "it is a pickle of an older version of torch.save" in said(
        tmp_path / "old.bin", holdfast.open
    )
    assert "as Lightning's Trainer writes it" in said(tmp_path / "epoch=1.ckpt")
    assert "it looks like files of torch.save" in said(tmp_path)
    assert "it is a file of torch.save" in said(tmp_path / "new.pt", holdfast.list_checkpoints)


def test_safetensors(tmp_path: Path) -> None:
    """A file, and a folder of a model."""
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    assert "it is a safetensors file" in said(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert "it looks like a model in Hugging Face's safetensors" in said(tmp_path)


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (("latest", "global_step10/mp_rank_00_model_states.pt"), "a DeepSpeed checkpoint"),
        (("meta.pt", ".metadata", "__0_0.distcp"), "a Lightning checkpoint"),
        (("latest_checkpointed_iteration.txt", "iter_10/common.pt"), "a Megatron-LM checkpoint"),
        (("common.pt", "metadata.json", ".metadata"), "a checkpoint of Megatron-core"),
        (("step-10/.metadata",), "a checkpoint of torch.distributed.checkpoint"),
        (("100/default/manifest.ocdbt", "100/_CHECKPOINT_METADATA"), "an Orbax checkpoint"),
        (("model.safetensors.index.json",), "a model in Hugging Face's safetensors"),
        (("trainer_state.json", "model.safetensors"), "a checkpoint of Hugging Face's Trainer"),
        (("random_states_0.pkl", "model.safetensors"), "a checkpoint of Accelerate"),
        (("ckpt-1.index", "ckpt-1.data-00000-of-00001"), "a TensorFlow checkpoint"),
    ],
)
def test_folders_are_known_by_their_names(
    names: tuple[str, ...], what: str, tmp_path: Path
) -> None:
    """No file in them is opened."""
    assert f"it looks like {what}" in said(touch(tmp_path / "c", *names))


def test_what_is_not_known_is_not_guessed(tmp_path: Path) -> None:
    """Nothing, an empty folder, notes, an image of a cat."""
    plain = "nothing is committed here (key manifest.safetensors"
    empty = tmp_path / "alone" / "empty"  # what other tests have saved is not beside it
    empty.mkdir(parents=True)
    assert plain in said(empty / "nowhere")
    assert plain in said(empty)
    assert plain in said(touch(empty / "c", "notes.txt", "cat.png"))
    assert plain in said("memory://nothing/here")
    (empty / "cat.png").write_bytes(b"\x89PNG")
    assert "it is a file" in said(empty / "cat.png")


def test_checkpoints_below_are_named(tmp_path: Path) -> None:
    """The last one, by number; and how many there are."""
    for step in (9, 10, 8):
        holdfast.save(tmp_path / "run" / f"step-{step}", {"step": step})
    text = said(tmp_path / "run")
    assert "3 checkpoints are below it" in text
    assert f"Did you mean file://{tmp_path}/run/step-10?" in text
    holdfast.save("memory://below/one/c", {"step": 1})
    assert "a checkpoint is below it" in said("memory://below/one")


def test_checkpoints_beside_a_misspelled_name_are_named(tmp_path: Path) -> None:
    """The one with the same number, or of the most similar name, or the last."""
    for step in (9, 10):
        holdfast.save(tmp_path / f"step-{step:08d}", {"step": step})
    assert f"Did you mean file://{tmp_path}/step-00000009?" in said(tmp_path / "step-9")
    assert f"Did you mean file://{tmp_path}/step-00000010?" in said(tmp_path / "stp-00000010")
    assert f"Did you mean file://{tmp_path}/step-00000010?" in said(tmp_path / "best")


def test_parts_of_a_checkpoint_are_recognised(tmp_path: Path) -> None:
    """A manifest alone, and the images of an interrupted save, are no foreign formats."""
    holdfast.save(tmp_path / "c", {"w": torch.ones(3)})
    manifest = tmp_path / "c" / "manifest.safetensors"
    assert "it is the manifest of a checkpoint" in said(manifest)
    manifest.unlink()
    assert "a save of Holdfast is in progress, or was interrupted" in said(tmp_path / "c")


def test_a_bounded_number_of_names_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket may have millions."""
    touch(tmp_path / "c", *(f"{i}.distcp" for i in range(50)))
    monkeypatch.setattr("holdfast.storage.operations.foreign_formats.LOOKED_AT", 10)
    assert "torch.distributed.checkpoint" in said(tmp_path / "c")
