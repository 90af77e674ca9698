"""Imports of DeepSpeed checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.framework_jobs import run_job

import holdfast

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make frameworks")


@pytest.mark.nightly(31)
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("stage", "dtype", "world"), [(1, "fp32", 2), (2, "bf16", 3), (3, "fp32", 2), (3, "bf16", 3)]
)
def test_weights_and_moments_equal_deepspeeds(
    tmp_path: Path, stage: int, dtype: str, world: int
) -> None:
    """Imported weights equal those of DeepSpeed's own ``zero_to_fp32``; the moments are AdamW's."""
    run_job("deepspeed_import", tmp_path / "ds", str(stage), dtype, world=world)
    holdfast.import_(tmp_path / "ds", tmp_path / "c")
    state = holdfast.load(tmp_path / "c")
    expected = zero_to_fp32(tmp_path / "ds")
    assert sorted(state["model"]) == sorted(expected)
    for name, tensor in expected.items():
        found = state["model"][name]
        assert found.shape == tensor.shape, name
        assert torch.equal(found.float(), tensor.float()), name
    moments = torch.load(tmp_path / "ds" / "moments.pt", weights_only=True)
    assert sorted(state["optim"]["state"]) == sorted(moments)
    for name, moment in moments.items():
        found = state["optim"]["state"][name]
        assert found["exp_avg"].shape == found["exp_avg_sq"].shape == moment.shape, name
        error = (found["exp_avg"] - moment).norm() / moment.norm()
        assert error < 0.1, name  # elements in other places make it 1
        assert found["step"] == 2
    with holdfast.open(tmp_path / "c") as c:
        assert c.verify().ok


def zero_to_fp32(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that DeepSpeed's own program extracts."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return found
