"""The tensors of torchao: quantized weights, and an optimizer with moments of 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import difference
from support.rank_processes import RankProcesses
from support.torchao_job import (
    go_on_in_eight_bits,
    go_on_with_moments_of_eight_bits,
    load_in_eight_bits,
    load_moments_of_eight_bits,
    refused_moments,
    weights_in_full,
)
from torch import nn

import holdfast

pytest.importorskip("torchao", reason="not installed: make frameworks")

# Warnings of torchao and of the packages it imports.
pytestmark = pytest.mark.filterwarnings("ignore")


def quantized(seed: int, config: str) -> nn.Module:
    """A model with quantized weights."""
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


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_quantized_model_comes_back(config: str, lazy: bool, tmp_path: Path) -> None:
    """Into the quantized tensors of another one, in place: both compute the same, bit for bit."""
    model = quantized(1, config)
    other = quantized(2, config)
    inputs = torch.randn(4, 64, dtype=torch.bfloat16)
    assert not torch.equal(model(inputs), other(inputs))
    for _ in range(2):
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


def trained(seed: int) -> tuple[nn.Module, Any]:
    """A model that is not quantized, and the optimizer."""
    from torchao.optim import AdamW8bit

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    return model, AdamW8bit(model.parameters(), lr=0.01)


def losses(model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    """Of the steps from ``first`` to ``last``, each on a batch of its own."""
    found = []
    for step in range(first, last):
        torch.manual_seed(step)
        inputs = torch.randn(8, 64)
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.nightly(52)
def test_adamw_of_8_bits_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    """Its moments are filled in place, so it needs some: a step that is undone by the load makes
    them. Without one, the error says so."""
    model, optimizer = trained(1)
    losses(model, optimizer, 0, 3)
    holdfast.save(tmp_path / "c", {"model": model, "optim": optimizer})
    expected = losses(model, optimizer, 3, 6)
    model, optimizer = trained(2)
    with pytest.raises(holdfast.MismatchError, match=r"exp_avg: .*OptimState8bit.*first step"):
        holdfast.load(tmp_path / "c", into={"model": model, "optim": optimizer})
    losses(model, optimizer, 0, 1)
    holdfast.load(tmp_path / "c", into={"model": model, "optim": optimizer})
    moments = [type(entry["exp_avg"]).__name__ for entry in optimizer.state.values()]
    assert moments.count("OptimState8bit") == 2  # of the weights: biases are too small
    assert losses(model, optimizer, 3, 6) == expected


@pytest.mark.parametrize("lazy", [pytest.param(False, marks=pytest.mark.nightly(30)), True])
def test_weights_that_fsdp2_gathers_in_eight_bits_are_stored_as_they_are(
    lazy: bool, tmp_path: Path
) -> None:
    """In full, under their own names. On another number of ranks a job goes on with the same bits,
    and forgets the scales that it had computed; one that knows nothing of eight bits takes them."""
    uri = str(tmp_path)
    with RankProcesses(2) as ranks:
        expected = ranks.run(go_on_in_eight_bits, uri, lazy)[0]
        for world in (2, 1):
            found = ranks.run(load_in_eight_bits, f"{uri}/1", world=world)
            assert found == [expected] * world
        assert ranks.run(weights_in_full, f"{uri}/1") == [True] * 2


@pytest.mark.parametrize(("optimizer", "lazy"), [("AdamW8bit", True), ("AdamWFp8", False)])
def test_moments_of_eight_bits_under_fsdp2_come_back(
    optimizer: str, lazy: bool, tmp_path: Path
) -> None:
    """On as many ranks a job goes on with the same bits; on another number it has loaded the same
    ones. Parts that are no whole blocks are refused by name."""
    uri = str(tmp_path / "c")
    with RankProcesses(2) as ranks:
        expected = ranks.run(go_on_with_moments_of_eight_bits, uri, optimizer, lazy)
        stored = holdfast.load(uri)
        moment = stored["optim"]["state"]["0.weight"]["exp_avg"]
        assert moment["codes"].shape == (128, 64)
        assert moment["scale"].shape == (128 * 64 // 256,)
        for world in (2, 1):
            again = str(tmp_path / f"again-{world}")
            found = ranks.run(load_moments_of_eight_bits, uri, optimizer, again, world=world)
            assert difference(stored, holdfast.load(again)) is None
            if world == 2:
                assert found == expected
        refused = ranks.run(refused_moments, str(tmp_path / "refused"))
    assert any("equal numbers of whole rows" in text for text in refused)
