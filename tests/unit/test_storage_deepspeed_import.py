"""Importing folders of DeepSpeed's ZeRO, built by hand: which elements are where, and what is refused.
With DeepSpeed itself: tests/frameworks."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import difference, fresh_uri

import holdfast

SHAPES = {"a.w": (3, 5), "a.b": (7,), "scalar": ()}


def weights() -> dict[str, torch.Tensor]:
    """Different elements everywhere."""
    found = {}
    first = 0.0
    for name, shape in SHAPES.items():
        numel = math.prod(shape)
        found[name] = torch.arange(first, first + numel).view(shape)
        first += numel
    return found


def partitions(stage: int, world: int, flat: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """By rank, what it has of one group."""
    if stage == 3:
        shares = [
            tensor.view(-1).split(math.ceil(tensor.numel() / world)) for tensor in flat.values()
        ]
        padded = [[*share, *[share[0].new_zeros(0)] * world] for share in shares]
        width = [math.ceil(tensor.numel() / world) for tensor in flat.values()]
        return [
            torch.cat(
                [
                    torch.cat([p[rank], torch.zeros(w - len(p[rank]))])
                    for p, w in zip(padded, width, strict=True)
                ]
            )
            for rank in range(world)
        ]
    whole = torch.cat([tensor.reshape(-1) for tensor in flat.values()])
    return list(whole.split(math.ceil(len(whole) / world)))


def written(folder: Path, stage: int, world: int, **changed: Any) -> Path:
    """A folder as DeepSpeed lays it out, without its classes."""
    step = folder / "global_step7"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    parts = partitions(stage, world, weights())
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    optimizer = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    for rank, part in enumerate(parts):
        state = {
            "zero_stage": stage,
            "partition_count": world,
            key: [part],
            optimizer: {"state": {0: {"exp_avg": part + 100, "step": torch.tensor(7.0)}}},
        }
        torch.save(
            {"optimizer_state_dict": state | changed},
            step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        info = {
            "module": {"mask": torch.arange(3), "a.w": torch.zeros(3, 5)},
            "buffer_names": ["mask"],
            "param_shapes": [
                OrderedDict((name, torch.Size(shape)) for name, shape in SHAPES.items())
            ],
            "shared_params": {"tied": "a.b"},
        }
        torch.save(info, step / f"{prefix}mp_rank_00_model_states.pt")
    return folder


@pytest.mark.parametrize(("stage", "world"), [(1, 1), (2, 3), (3, 2), (3, 5)])
def test_parameters_are_put_together(tmp_path: Path, stage: int, world: int) -> None:
    """However many ranks share them; tied ones, buffers, and moments with them."""
    uri = fresh_uri()
    holdfast.import_(written(tmp_path, stage, world), uri)
    model = weights() | {"tied": weights()["a.b"], "mask": torch.arange(3)}
    moments = {
        name: {"exp_avg": tensor + 100, "step": torch.tensor(7.0)}
        for name, tensor in weights().items()
    }
    found = holdfast.load(uri)
    for name, tensor in model.items():
        assert difference(tensor, found["model"][name]) is None, name
    for name, of_name in moments.items():
        assert difference(of_name["exp_avg"], found["optim"]["state"][name]["exp_avg"]) is None, (
            name
        )
        assert found["optim"]["state"][name]["step"] == 7
    assert sorted(found["model"]) == sorted(model)


def test_the_folder_of_a_step_and_the_model_alone(tmp_path: Path) -> None:
    """By the same commands as of other models."""
    uri = fresh_uri()
    folder = written(tmp_path, 2, 2) / "global_step7"
    holdfast.import_(folder, uri, only=["model.*"], rename={"model.*": "*"})
    assert sorted(holdfast.load(uri)) == ["a.b", "a.w", "mask", "scalar", "tied"]


def test_what_is_not_plain_zero_is_refused(tmp_path: Path) -> None:
    """Missing ranks, other layouts, a tag that leads elsewhere; by name."""
    folder = written(tmp_path / "missing", 2, 3)
    (folder / "global_step7" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(holdfast.UnsupportedFormatError, match="2 files of stage 2 and 3 ranks"):
        holdfast.import_(folder, fresh_uri())
    folder = written(tmp_path / "parallel", 2, 1)
    (folder / "global_step7" / "mp_rank_01_model_states.pt").touch()
    with pytest.raises(holdfast.UnsupportedFormatError, match="mp_rank_01_model_states"):
        holdfast.import_(folder, fresh_uri())
    folder = written(tmp_path / "short", 2, 1, single_partition_of_fp32_groups=[torch.ones(20)])
    with pytest.raises(
        holdfast.UnsupportedFormatError, match=r"elements of 'model\.a\.b' are missing"
    ):
        holdfast.import_(folder, fresh_uri())
    (folder / "latest").write_text("../missing/global_step7")
    with pytest.raises(holdfast.DamagedError, match="not a folder next to it"):
        holdfast.import_(folder, fresh_uri())
    (folder / "latest").write_text("global_step8")
    with pytest.raises(holdfast.NotFoundError, match="no ZeRO checkpoint"):
        holdfast.import_(folder, fresh_uri())
