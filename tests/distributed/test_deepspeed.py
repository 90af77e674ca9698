"""DeepSpeed itself, on two ranks, where it is installed: what is not known of it is refused by
name."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest
from support import deepspeed_job
from support.torchrun import run_job


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the job has found on each rank."""
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    folder = tmp_path_factory.mktemp("deepspeed")
    left = run_job(deepspeed_job, folder)
    return [json.loads(left[rank]) for rank in "01"]


def test_zero_3_is_refused_on_save_and_load(found: list[dict[str, Any]]) -> None:
    """Module, engine, optimizer, and a state dict without attributes: nothing is committed. What is
    saved within GatheredParameters is whole."""
    for rank in found:
        seen = rank["3"]
        for what in ("save module", "save engine", "load module"):
            assert seen[what].startswith('StateError: state["model"]["'), what
            assert "DeepSpeed ZeRO-3" in seen[what], what
        assert seen["save optimizer"].startswith(
            'StateError: state["optim"] is an optimizer of DeepSpeed'
        )
        assert 'state["model"]' in seen["save state dict"]
        assert "GatheredParameters" in seen["save state dict"]
        assert seen["committed"] == []
        assert seen["gathered"] is True


def test_what_zero_1_would_overwrite_is_not_loaded_into(found: list[dict[str, Any]]) -> None:
    """Module, engine and optimizer; the way that the error tells goes on from what was loaded. A
    save of the module is whole."""
    for rank in found:
        seen = rank["1"]
        for what in ("load module", "load engine"):
            assert seen[what].startswith('StateError: state["model"]'), what
            assert "DeepSpeed" in seen[what], what
            assert "refresh_fp32_params" in seen[what], what
        for what in ("load optimizer", "save optimizer"):
            assert seen[what].startswith(
                'StateError: state["optim"] is an optimizer of DeepSpeed'
            ), what
        assert seen["save module"] == ""
        assert seen["goes on from what was loaded"] is True
