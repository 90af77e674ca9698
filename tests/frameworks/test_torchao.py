"""The tensors of torchao: quantized weights, and an optimizer with moments of 8 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.bits import difference
from support.rank_processes import RankProcesses
from support.torchao_job import (
    FLOAT8,
    load_and_train,
    refused_moments,
    save_and_train,
    weights_in_full,
)
from torch import nn

import holdfast

pytest.importorskip("torchao", reason="not installed: make frameworks")

# Warnings of torchao and of the packages it imports.
pytestmark = pytest.mark.filterwarnings("ignore")


def quantized(seed: int, config: str) -> nn.Module:
    """Return a model with quantized weights."""
    from torchao import quantization

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)).to(torch.bfloat16)
    quantization.quantize_(model, getattr(quantization, config)())
    return model


CONFIGS = [
    "Int8WeightOnlyConfig",
    "Float8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_quantized_model_comes_back(config: str, tmp_path: Path) -> None:
    """It loads into the quantized tensors of another model. Both compute the same, bit for bit."""
    model = quantized(1, config)
    other = quantized(2, config)
    inputs = torch.randn(4, 64, dtype=torch.bfloat16)
    assert not torch.equal(model(inputs), other(inputs))
    for lazy in (False, True):
        holdfast.async_save(tmp_path / "c", {"model": model}, lazy=lazy).wait()
    weight = other[0].weight
    holdfast.load(tmp_path / "c", into={"model": other})
    assert other[0].weight is weight
    assert torch.equal(model(inputs), other(inputs))


def test_what_was_quantized_otherwise_is_refused(tmp_path: Path) -> None:
    """Nothing is loaded into it; a load without a target gives the inner tensors."""
    model = quantized(1, "Int8WeightOnlyConfig")
    holdfast.save(tmp_path / "c", {"model": model})
    for other in CONFIGS[1:]:
        with pytest.raises(holdfast.MismatchError, match=r'state\["model"\]\["0.weight"\]'):
            holdfast.load(tmp_path / "c", into={"model": quantized(2, other)})
    stored = holdfast.load(tmp_path / "c")["model"]["0.weight"]
    assert torch.equal(stored["qdata"], model[0].weight.qdata)
    assert torch.equal(stored["scale"], model[0].weight.scale)


def test_weights_that_fsdp2_gathers_in_eight_bits_are_stored_in_full(tmp_path: Path) -> None:
    """On another number of ranks a job resumes with the same bits, and drops its computed scales. A
    job without eight bits also loads them."""
    uri = str(tmp_path / "c")
    with RankProcesses(2) as ranks:
        expected = ranks.run(save_and_train, uri, FLOAT8, True)[0]
        for world in (2, 1):
            again = str(tmp_path / f"again-{world}")
            found = ranks.run(load_and_train, uri, FLOAT8, again, world=world)
            assert found == [expected] * world
        assert ranks.run(weights_in_full, uri) == [True] * 2


@pytest.mark.parametrize(("optimizer", "lazy"), [("AdamW8bit", True), ("AdamWFp8", False)])
def test_moments_of_eight_bits_under_fsdp2_come_back(
    optimizer: str, lazy: bool, tmp_path: Path
) -> None:
    """On as many ranks, a job resumes with the same bits. On another number, it has loaded the same
    ones. Parts that are not whole blocks are refused by name."""
    uri = str(tmp_path / "c")
    with RankProcesses(2) as ranks:
        expected = ranks.run(save_and_train, uri, optimizer, lazy)
        stored = holdfast.load(uri)
        moment = stored["optim"]["state"]["0.weight"]["exp_avg"]
        assert moment["codes"].shape == (128, 64)
        assert moment["scale"].shape == (128 * 64 // 256,)
        for world in (2, 1):
            again = str(tmp_path / f"again-{world}")
            found = ranks.run(load_and_train, uri, optimizer, again, world=world)
            assert difference(stored, holdfast.load(again)) is None
            if world == 2:
                assert found == expected
        refused = ranks.run(refused_moments, str(tmp_path / "refused"))
    assert any("equal numbers of whole rows" in text for text in refused)
