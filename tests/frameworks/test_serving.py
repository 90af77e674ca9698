"""Serving straight from a training checkpoint: engines that load whole tensors, from any layout."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.bits import difference
from support.engine import Rank, expected, stand_ins
from support.framework_jobs import documented, run_block
from support.ranks import save_as_ranks

import holdfast
from holdfast.drivers.registry import open_driver
from holdfast.storage.runtime.engine import start

transformers = pytest.importorskip("transformers", reason="not installed: make frameworks")

# Warnings of transformers and of the packages it imports.
pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = "serve-from-a-checkpoint.md"
WHOLE, VLLM, SGLANG, EXPERTS, SHARES, CONVERTED = range(6)
"""Blocks of the page."""
LAYERS = 4


def weights(*, tied: bool = False, experts: int = 0) -> dict[str, torch.Tensor]:
    """Return the weights of a small Llama, or of a model with experts, one by one."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "tie_word_embeddings": tied,
    }
    if not experts:
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        return dict(made.state_dict())
    config = transformers.MixtralConfig(**sizes, num_local_experts=experts)
    found = {}
    for name, tensor in transformers.MixtralForCausalLM(config).state_dict().items():
        block, _, kind = name.partition(".experts.")
        for expert, part in enumerate(tensor if kind else ()):
            found[f"{block}.experts.{expert}.{kind}.weight"] = part
        if not kind:
            found[name] = tensor
    return found


def trained(folder: Path, model: dict[str, torch.Tensor], layout: str) -> None:
    """Save a checkpoint at step-500, as a training job of eight ranks in that layout."""
    states: list[dict[str, Any]] = [{"model": {}, "step": 500} for _ in range(8)]
    for number, (name, tensor) in enumerate(model.items()):
        for rank, state in enumerate(states):
            if layout == "fsdp":
                rows = -(-tensor.shape[0] // 8)
                begin = min(rank * rows, tensor.shape[0])
                part = tensor[begin : begin + rows]
                offset = (begin,) + (0,) * (tensor.ndim - 1)
                state["model"][name] = holdfast.Shard(part, shape=tensor.shape, offset=offset)
            elif layout == "flat":
                length = -(-tensor.numel() // 8)
                flat = tensor.reshape(-1)[rank * length : (rank + 1) * length]
                begin = min(rank * length, tensor.numel())
                state["model"][name] = holdfast.Shard(
                    flat, shape=tensor.shape, flat=(begin, begin + len(flat))
                )
            elif layout == "replicated" or number % 8 == rank:
                state["model"][name] = tensor
    driver = open_driver(str(folder / "run" / "step-500"))
    save_as_ranks(driver, states)
    start(driver.close()).result()


def engine(tp: int, tp_size: int, stage: int = 0, stages: int = 1) -> Rank:
    """Return a rank of an engine."""
    length = LAYERS // stages
    return Rank(tp, tp_size, range(stage * length, (stage + 1) * length))


@pytest.mark.parametrize("layout", ["fsdp", "flat", "replicated", "stages"])
@pytest.mark.parametrize("rewritten", [False, True], ids=["as saved", "rewritten"])
def test_an_engine_loads_whole_tensors(tmp_path: Path, layout: str, rewritten: bool) -> None:
    """Packed parameters get their parts on every rank of tensor and pipeline parallelism, from a
    checkpoint in any layout, also after ``cp --layout``."""
    model = weights()
    trained(tmp_path, model, layout)
    uri = str(tmp_path / "run" / "step-500")
    if rewritten:
        report = holdfast.copy(uri, uri, image_nbytes=1 << 30, overwrite=True)
        assert report.checkpoints[0].files == 1
    loaders: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stand_ins(loaders).items():
            patch.setitem(sys.modules, name, module)
        run_block(documented(PAGE)[VLLM], tmp_path, {})
        sglang = run_block(documented(PAGE)[SGLANG], tmp_path, {})["HoldfastLoader"](None)
    config = SimpleNamespace(model_loader_extra_config={"uri": uri})
    for stages in (1, 2):
        for stage in range(stages):
            for tp in range(2):
                rank = engine(tp, 2, stage, stages)
                loaders["holdfast"](config).load_weights(rank, None)
                assert difference(expected(model, rank), rank.parameters) is None
                assert not any(map(rank.misses, rank.names))
    rank = engine(0, 1)
    rank.load_weights(sglang._get_all_weights(None, rank))
    assert difference(expected(model, rank), rank.parameters) is None


@pytest.mark.parametrize("tied", [False, True])
def test_how_to_loads_weights(tmp_path: Path, tied: bool) -> None:
    """Blocks of the page load a model; tied weights come under both names."""
    model = weights(tied=tied)
    trained(tmp_path, model, "fsdp")
    rank = engine(1, 2)
    run_block(documented(PAGE)[WHOLE], tmp_path, {"model": rank})
    assert difference(expected(model, rank), rank.parameters) is None
    rank = engine(1, 2)
    names = {"model": rank, "holdfast": holdfast, "torch": torch}
    run_block(documented(PAGE)[CONVERTED], tmp_path, names)
    half = {name: tensor.to(torch.bfloat16) for name, tensor in model.items()}
    assert difference(expected(half, rank), rank.parameters) is None


def test_how_to_skips_the_experts_of_others(tmp_path: Path) -> None:
    """An expert-parallel rank gets its experts, and everything else."""
    model = weights(experts=4)
    trained(tmp_path, model, "fsdp")
    rank = engine(0, 1)
    names = {"model": rank, "local_experts": {1, 2}, "holdfast": holdfast}
    run_block(documented(PAGE)[EXPERTS], tmp_path, names)
    others = {name for name in model if ".experts.0." in name or ".experts.3." in name}
    assert len(others) == LAYERS * 4
    assert set(rank.names) == model.keys() - others


@pytest.mark.parametrize("world", [1, 2, 3])
def test_how_to_reads_shares(tmp_path: Path, world: int) -> None:
    """Shares of all ranks make the tensors; others are whole everywhere."""
    model = weights()
    trained(tmp_path, model, "flat")
    found: list[dict[str, torch.Tensor]] = []
    for rank in range(world):
        mine: dict[str, torch.Tensor] = {}
        names = {"holdfast": holdfast, "rank": rank, "world": world, "place": mine.__setitem__}
        run_block(documented(PAGE)[SHARES], tmp_path, names)
        found.append(mine)
    for name, tensor in model.items():
        parts = [mine[name] for mine in found]
        dim = 1 if "o_proj" in name or "down_proj" in name else 0
        whole = parts[0] if tensor.ndim == 1 else torch.cat(parts, dim)
        assert difference(tensor, whole) is None, name
