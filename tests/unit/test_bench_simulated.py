"""``holdfast bench --simulate``: plans of jobs without data, compared with real saves."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from support.commands import run, run_json
from torch.distributed.device_mesh import DeviceMesh

import holdfast
from holdfast.bench.simulated.fleet import FlatStates, fragment_told, planned_fleet
from holdfast.bench.simulated.forecast import Requests, forecast, image_requests
from holdfast.bench.workloads.llama3 import Llama, llama3, training_specs
from holdfast.bench.workloads.materialised import materialise
from holdfast.bench.workloads.sized import equal_tensors, sized
from holdfast.bench.workloads.spec import Listed, Spec, Workload
from holdfast.drivers.uri import parse
from holdfast.storage.state.flattening.flatten import flatten
from holdfast.storage.state.plan import Agreed, plan_image

MIB = 1 << 20
_LLAMA = Llama(layers=2, hidden=64, ffn=96, kv=16, vocab=101)
TINY = Listed("tiny", lambda: training_specs(dict(_LLAMA.stage(0, 1)), "adam+master"))


@pytest.mark.parametrize("workload", [TINY, sized(40 * MIB), equal_tensors(MIB, 50)])
def test_a_simulation_matches_a_save(workload: Workload, tmp_path: Path) -> None:
    """The image is equal to the byte, the manifest up to the digits of a time."""
    uri = f"file://{tmp_path}/saved"
    fleet = planned_fleet(workload, 1, 1)
    state = materialise(workload.specs(0, 1), 0, 1)
    holdfast.save(uri, state)
    (image,) = tmp_path.glob("saved/data/*/0.safetensors")
    (rank,) = fleet.ranks
    assert image.stat().st_size == rank.image_nbytes
    assert sum(tensor.nbytes for tensor in state.values()) == rank.state_nbytes
    assert fleet.tensors == rank.shards == len(state)
    manifest = tmp_path / "saved" / "manifest.safetensors"
    assert manifest.stat().st_size == pytest.approx(fleet.manifest_nbytes, abs=64)


def with_own(rank: int) -> list[Spec]:
    """Return sharded tensors, and two of the rank's own."""
    own = Spec(f"own.{rank}.a", (3, 5), "float32", False)
    return [*TINY.specs(rank, 3), own, Spec(f"own.{rank}.b", (), "int64", False)]


@pytest.mark.parametrize("rank", range(3))
def test_ranks_are_simulated_as_they_would_plan(rank: int) -> None:
    """Reports to the leader are the same for specs as for their tensors."""
    specs = with_own(rank)
    mesh = DeviceMesh("cpu", torch.arange(3), _init_backend=False, _rank=rank)
    real = flatten(materialise(specs, rank, 3, mesh=mesh))
    own = {row: (rank,) for row, spec in enumerate(specs) if not spec.sharded}
    expected = fragment_told(plan_image(real, rank, Agreed(own, {})), rank, real)
    flat, agreed, _ = FlatStates(3).of(specs, rank)
    found = fragment_told(plan_image(flat, rank, agreed), rank, flat)
    assert found.encode() == expected.encode()


@pytest.mark.parametrize(
    ("name", "ranks", "total_nbytes"),
    [("llama3-405b", 512, 5_682_508_791_808), ("llama3-1t", 1024, 16_564_174_094_592)],
)
def test_the_largest_jobs_are_planned_in_seconds(name: str, ranks: int, total_nbytes: int) -> None:
    """These are of MLPerf Storage: all ranks, to the byte."""
    began_s = time.process_time()
    arguments = ["--workload", name, "--simulate"]
    found = run_json("bench", "file:///nowhere", *arguments)
    assert time.process_time() - began_s < 20
    assert (found["world"], found["state_nbytes"]["total"]) == (ranks, total_nbytes)
    overhead = found["image_nbytes"]["total"] / total_nbytes - 1
    assert 16 / 65536 <= overhead < 0.0003  # the digests
    assert found["chunks"] > total_nbytes / (16 * MIB)
    assert found["manifest_nbytes"] > 16 * found["chunks"]
    assert not Path("/nowhere").exists()


def test_a_sharded_model_is_divided_evenly() -> None:
    """Ranks beyond the rows of all tensors write nothing. Memory is the budget, or the image."""
    found = forecast(llama3("llama3-8b"), parse("memory://x"), 8, 4)
    assert found.tensors == 291
    assert found.shards == 8 * 291
    assert found.state_nbytes.total == 16_060_522_496
    assert found.balance == pytest.approx(1, abs=1e-3)
    assert found.notes == ()
    assert found.capture_memory_nbytes >= found.image_nbytes.most
    assert 64 * MIB <= found.save_memory_nbytes <= 512 * MIB
    few = planned_fleet(equal_tensors(1 << 10, 2), 300, 8)
    assert [rank.image_nbytes == 0 for rank in few.ranks] == [False] * 256 + [True] * 44


def test_uploads_are_counted_in_parts() -> None:
    """An object takes one request, or its parts, at most 10,000, with a begin and an end."""
    sizes = (0, 1, 16 * MIB, 16 * MIB + 1, 160_000 * MIB, 160_001 * MIB)
    found = [image_requests(nbytes, 16 * MIB) for nbytes in sizes]
    assert [requests.puts for requests in found] == [0, 1, 1, 4, 10_002, 5_001 + 2]
    assert [requests.gets for requests in found] == [0, 1, 1, 2, 2, 2]
    without_parts = [image_requests(nbytes, 0) for nbytes in (0, 1, 17 * MIB)]
    assert without_parts == [Requests(0, 0), Requests(1, 0), Requests(2, 0)]


def test_a_forecast_is_printed() -> None:
    """It has exact totals, and notes that limit a comparison."""
    arguments = ["--workload", "llama3-70b", "--ranks", "8", "--simulate"]
    out = run("bench", "file:///x", *arguments).stdout
    assert f"{978_406_572_032 // 8:,} B" in out
    assert "NOTE: 8 of 64 processes save a part of llama3-70b: not comparable" in out
