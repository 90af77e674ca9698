"""Inference engines that follow a weight channel, by the code of the how-to page.

vLLM and SGLang need a GPU, so these are stand-ins with the interfaces that the page uses.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.bits import difference
from support.engine import Rank, expected
from support.framework_jobs import documented, run_block

TRAINER, EXTENSION, VLLM, BUCKETS, SGLANG = documented("update-vllm-and-sglang.md")
LAYERS = 2


def policy(version: int) -> dict[str, torch.Tensor]:
    """Return weights by their Hugging Face names."""
    torch.manual_seed(version)
    made = {"model.embed_tokens.weight": torch.randn(12, 8)}
    for layer in range(LAYERS):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            made[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.randn(8, 8)
        made[f"model.layers.{layer}.input_layernorm.weight"] = torch.randn(8)
    return {name: tensor.bfloat16() for name, tensor in made.items()}


class Engine:
    """Two tensor-parallel workers of vLLM, or of SGLang."""

    def __init__(self, *, worker_extension_cls: str = "builtins.object") -> None:
        module, _, name = worker_extension_cls.rpartition(".")
        extension = getattr(importlib.import_module(module), name)
        worker = type("Worker", (extension,), {})
        self.workers: list[Any] = [worker() for _ in range(2)]
        self.resets = 0
        for worker in self.workers:
            worker.model_runner = SimpleNamespace()
        self.clear()

    def clear(self) -> None:
        """Forget the weights that were loaded."""
        for tp, worker in enumerate(self.workers):
            worker.model_runner.model = Rank(tp, 2, range(LAYERS))

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of each worker."""
        return [getattr(worker, method)(*args) for worker in self.workers]

    def update_weights_from_tensor(
        self, named_tensors: list[tuple[str, torch.Tensor]], *, flush_cache: bool = True
    ) -> None:
        """Load tensors into each worker."""
        assert not flush_cache
        for worker in self.workers:
            worker.model_runner.model.load_weights(named_tensors)

    def reset_prefix_cache(self) -> None:
        """Count that the cache was dropped."""
        self.resets += 1

    flush_cache = reset_prefix_cache

    def has(self, version: int) -> bool:
        """Return whether each worker has its part of a version, and no other."""
        ranks = [worker.model_runner.model for worker in self.workers]
        whole = policy(version)
        return all(difference(expected(whole, rank), rank.parameters) is None for rank in ranks)


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that runs a block of the page in a folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("vllm", "sglang", "follow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    made: list[Engine] = []

    def started(*_: object, worker_extension_cls: str = "builtins.object", **__: object) -> Engine:
        made.append(Engine(worker_extension_cls=worker_extension_cls))
        return made[-1]

    for name, entry in (("vllm", "LLM"), ("sglang", "Engine")):
        module = ModuleType(name)
        setattr(module, entry, started)
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "follow.py").write_text(EXTENSION)

    def run(block: str, **names: Any) -> dict[str, Any]:
        return run_block(block, tmp_path, names, {"s3://bucket": str(tmp_path)})

    yield run
    sys.modules.pop("follow", None)


def test_vllm_workers_follow(code: Any) -> None:
    """An extension prepares on each worker, then loads the version that all have prepared."""
    publisher = code(TRAINER, version=1, model=policy(1))["publisher"]
    publisher.push(2, {"model": policy(2)}).wait()
    names = code(VLLM)
    engine: Engine = names["llm"]
    assert engine.has(2)
    for version in (5, 6):
        publisher.push(version, {"model": policy(version)}).wait()
        engine.clear()
        assert names["update_weights"](10.0) == version
        assert engine.has(version)
    assert names["update_weights"](0.0) is None
    assert engine.resets == 3
    publisher.close()


def test_sglang_takes_buckets(code: Any) -> None:
    """The main process hands over every tensor once, in buckets of bounded size."""
    publisher = code(TRAINER, version=1, model=policy(1))["publisher"]
    publisher.close()
    names = code(BUCKETS)
    names = code(SGLANG, **{name: names[name] for name in ("holdfast", "update_weights")})
    engine: Engine = names["engine"]
    assert engine.has(1)
    assert names["update_weights"](engine, names["subscriber"], 0.0) is None
    assert engine.resets == 1
    names["subscriber"].close()


@pytest.mark.parametrize("nbytes", [1, 200, 1 << 30])
def test_buckets_hold_each_tensor_once(code: Any, nbytes: int) -> None:
    """This holds for buckets of any size."""
    buckets = list(code(BUCKETS)["buckets"](iter(policy(1).items()), nbytes))
    assert [pair[0] for bucket in buckets for pair in bucket] == list(policy(1))
    assert all(
        len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= nbytes
        for bucket in buckets
    )
