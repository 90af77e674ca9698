"""Import DeepSpeed checkpoints.

The weights equal the output of its own ``zero_to_fp32`` bit for bit. The moments equal
plain AdamW's after the same steps.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
from support.framework_jobs import run_job

import holdfast

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make frameworks")

JOB = textwrap.dedent(
    """
    import argparse, copy, os, sys
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch, deepspeed, deepspeed.comm.torch
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda *args, **kwargs: None  # it compiles
    stage, dtype, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(13, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 5))
    model[0].bias.requires_grad = False
    model.register_buffer("mask", torch.arange(3))
    groups = [{"params": [model[0].weight, model[1].weight]}, {"params": [model[1].bias, model[2].weight, model[2].bias], "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 50},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype == "bf16"},
    }
    reference = copy.deepcopy(model)
    by_name = dict(reference.named_parameters())
    trained = {name: p for name, p in by_name.items() if p.requires_grad}
    optim = torch.optim.AdamW(trained.values(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    torch.manual_seed(1)
    for _ in range(2):
        batch = torch.randn(4, 13)
        optim.zero_grad()
        reference(batch).square().sum().backward()
        optim.step()
        engine.backward(engine(batch.bfloat16() if dtype == "bf16" else batch).float().square().sum())
        engine.step()
    engine.save_checkpoint(folder, client_state={"args": argparse.Namespace(lr=1)})
    if engine.global_rank == 0:
        moments = {name: optim.state[p]["exp_avg"] for name, p in trained.items()}
        torch.save(moments, folder + "/moments.pt")
    torch.distributed.destroy_process_group()
    """
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that trains and saves."""
    path = tmp_path_factory.mktemp("deepspeed") / "job.py"
    path.write_text(JOB)
    return path


@pytest.mark.nightly(31)
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("stage", "dtype", "world"), [(1, "fp32", 2), (2, "bf16", 3), (3, "fp32", 2), (3, "bf16", 3)]
)
def test_weights_and_moments_are_those_of_deepspeed(
    job: Path, tmp_path: Path, stage: int, dtype: str, world: int
) -> None:
    """Imported weights and moments equal DeepSpeed's own.

    The job has several parameter groups, frozen parameters, buffers, and parameters that span
    partitions.
    """
    done = run_job(job, str(stage), dtype, tmp_path / "ds", world=world, timeout_s=300)
    assert done.returncode == 0, done.stderr[-3000:]
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
