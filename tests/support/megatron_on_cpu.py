"""Let Megatron-core train over gloo on a host without a GPU.

Megatron requests CUDA devices by name, and recognizes dtypes by the names of CUDA's tensor types.
While :func:`cuda_is_cpu` is in force, "cuda" is the host's memory. The code under test is not
replaced: layouts, buffers and optimizers are Megatron's own.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._inductor.compile_fx  # before the stand-in, which it would use

if importlib.util.find_spec("triton") is None:  # Megatron 0.18 and later has GPU kernels in it
    sys.modules["triton"] = sys.modules["triton.language"] = MagicMock(__version__="0")

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import torch_norm
from megatron.core.transformer.moe import moe_utils
from torch.overrides import TorchFunctionMode

_TYPES = ("BFloat16Tensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor")


class _OnHost(TorchFunctionMode):
    """Mode that creates tensors on the host when "cuda" is requested."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple("cpu" if _names_cuda(argument) else argument for argument in args)
        made = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(made, str):
            return made.replace("torch.", "torch.cuda.", 1)
        return made


def _names_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


@functools.cache
def cuda_is_cpu() -> None:
    """Replace "cuda" by the host's memory in this process from now on."""
    _OnHost().__enter__()
    torch._dynamo.config.disable = True  # compiling takes longer than training
    replaced: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "current_stream": MagicMock(),
        "synchronize": lambda *device: None,
    }
    for name in _TYPES:
        replaced[name] = getattr(torch, name)
    for name, stand_in in replaced.items():
        setattr(torch.cuda, name, stand_in)
    torch.tensor = _on_host(torch.tensor)
    with suppress(ImportError):  # Megatron before 0.17
        from megatron.core.transformer.moe import grouped_gemm_util

        grouped_gemm_util.grouped_gemm = SimpleNamespace()
        grouped_gemm_util.ops = SimpleNamespace(gmm=_multiplied_by_group)
    moe_utils.te_general_gemm = None  # left undefined without Transformer Engine
    torch_norm.WrappedTorchNorm.__new__ = _of_a_sequence(torch_norm.WrappedTorchNorm.__new__)
    CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()  # without dropout
    DistributedOptimizer._set_main_param_and_optimizer_states = _with_step(
        DistributedOptimizer._set_main_param_and_optimizer_states
    )


def _of_a_sequence(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch's norms work under sequence parallelism, as Transformer Engine's do."""

    def made(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm = function(cls, alone, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return made


def _multiplied_by_group(
    rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, trans_b: bool
) -> torch.Tensor:
    """Multiply the rows of each expert with its weights, as the package ``grouped_gemm`` does."""
    groups = zip(rows.split(counts.tolist()), weights, strict=True)
    return torch.cat([group @ (weight.T if trans_b else weight) for group, weight in groups])


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Put the result of ``torch.tensor`` on the host: a mode does not see this function."""

    def made(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return made


def _with_step(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the step of each parameter, which Megatron drops here with torch's Adam.

    Before that, Megatron gives all parameters one shared step tensor, which then counts each of
    them.
    """

    def take(self: Any, parameter: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        present = self._get_main_param_and_optimizer_states(parameter)
        function(self, parameter, {"step": present["step"], **tensors})
        self.optimizer.state[present["param"]]["step"] = present["step"].clone()

    return take
