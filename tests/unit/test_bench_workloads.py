"""Test benchmark workloads: model sizes, subsets, rules, contents."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh

from holdfast.bench.workloads.index import indexed
from holdfast.bench.workloads.llama3 import LLAMA3, llama3
from holdfast.bench.workloads.materialised import materialise
from holdfast.bench.workloads.mlperf import deviations, mlperf
from holdfast.bench.workloads.sized import equal_tensors, sized
from holdfast.bench.workloads.spec import NORMAL, Content, Spec, Workload, parse_content
from holdfast.errors import UsageError

REAL = {
    "llama3-8b": (291, 8_030_261_248, 64_242_089_984),
    "llama3-70b": (723, 70_553_706_496, 564_429_651_968),
    "llama3-405b": (1137, 405_853_388_800, 3_246_827_110_400),
}
"""Tensors, parameters, and bytes of Adam's two moments in fp32."""
PUBLISHED = {
    "llama3-8b": (8, 16_060_522_496, 112_425_623_552),
    "llama3-70b": (64, 139_783_700_480, 978_406_572_032),
    "llama3-405b": (512, 811_764_809_728, 5_682_508_791_808),
    "llama3-1t": (1024, 2_366_163_292_416, 16_564_174_094_592),
}
"""Processes, bytes of the model, and of model and optimizer, as results of MLPerf Storage state."""


@pytest.mark.parametrize("name", REAL)
def test_real_models_have_their_parameters_to_the_byte(name: str) -> None:
    """Optimizers add nothing, the moments, or these and the masters to bf16 weights."""
    tensors, parameters, moments_nbytes = REAL[name]
    assert LLAMA3[name].parameters == parameters
    weights = llama3(name)
    assert len(weights.specs(0, 1)) == tensors
    assert weights.nbytes(0, 1) == 2 * parameters
    adam = llama3(name, "adam")
    assert len(adam.specs(0, 1)) == 3 * tensors
    assert adam.nbytes(0, 1) == 2 * parameters + moments_nbytes
    assert llama3(name, "adam+master").nbytes(0, 1) == 14 * parameters


@pytest.mark.parametrize("workload", [sized(1 << 22), equal_tensors(1 << 20, 7)])
@pytest.mark.parametrize("world", [1, 3, 64])
def test_ranks_share_all_of_a_state(workload: Workload, world: int) -> None:
    """Each row belongs to one rank, and computed sizes match the tensors."""
    held = [workload.nbytes(rank, world) for rank in range(world)]
    specs = workload.specs(0, world)
    assert held == [sum(spec.local_nbytes(rank, world) for spec in specs) for rank in range(world)]
    assert sum(held) == sum(spec.nbytes for spec in specs)
    for spec in specs:
        shares = [spec.rows(rank, world) for rank in range(world)]
        rows = [row for first, last in shares for row in range(first, last)]
        assert rows == list(range(spec.shape[0]))


@pytest.mark.parametrize("name", PUBLISHED)
def test_checkpoints_of_mlperf_have_their_published_sizes(name: str) -> None:
    """The bytes of model and optimizer are exact."""
    world, model_nbytes, total_nbytes = PUBLISHED[name]
    workload = mlperf(name)
    assert workload.world == world
    model = sum(spec.nbytes for rank in range(world) for spec in workload.model_specs(rank))
    total = sum(workload.nbytes(rank, world) for rank in range(world))
    assert (model, total) == (model_nbytes, total_nbytes)


def test_a_subset_holds_what_its_ranks_hold_in_the_whole_job() -> None:
    """No tensor has two names."""
    workload = mlperf("llama3-70b")
    for rank in range(8):
        assert workload.specs(rank, 8) == workload.specs(rank, 64)
    names = [spec.name for rank in range(8) for spec in workload.specs(rank, 8)]
    assert len(set(names)) == len(names)
    with pytest.raises(UsageError, match="has 64 processes, not 65"):
        workload.specs(0, 65)
    with pytest.raises(ValueError, match="rank 8 of 8"):
        workload.specs(8, 8)


@pytest.mark.parametrize(
    ("host_processes", "rounds", "rest_s", "said"),
    [
        ((4, 4), 10, 5.0, None),
        ((4, 2), 10, 5.0, "different numbers of processes"),
        ((2, 2), 10, 5.0, "not comparable"),
        ((2,) * 4, 10, 5.0, "only 2 on a host, of 4 processes"),
        ((8,), 9, 5.0, "9 checkpoints are written and read, not 10"),
        ((8,), 10, 1.0, "1 s pass between checkpoints, not 5 s"),
    ],
)
def test_where_a_run_departs_from_the_rules_is_said(
    host_processes: tuple[int, ...], rounds: int, rest_s: float, said: str | None
) -> None:
    """Each departure is a sentence."""
    found = list(deviations(mlperf("llama3-8b"), host_processes, rounds, rest_s))
    if said is None:
        assert found == []
    else:
        assert said in "; ".join(found)


def mesh_of(rank: int, world: int) -> DeviceMesh:
    """Return a mesh as ``rank`` sees it, which sends nothing."""
    return DeviceMesh("cpu", torch.arange(world), _init_backend=False, _rank=rank)


KINDS = ("float32", "bfloat16", "float8_e4m3fn", "bool", "int64", "complex64", "float16")
SPECS = [
    *(Spec(f"of.{kind}", (70, 3001), kind, sharded=True) for kind in KINDS),
    Spec("scalar", (), "float64", sharded=False),
]


@pytest.mark.parametrize("content", [NORMAL, Content("uniform")], ids=["normal", "uniform"])
def test_a_state_is_the_same_for_any_number_of_ranks(content: Content) -> None:
    """Shards are rows of the whole tensor, bit for bit. Another seed gives other bits."""
    whole = materialise(SPECS, 0, 1, content=content)
    for rank in range(3):
        state = materialise(SPECS, rank, 3, content=content, mesh=mesh_of(rank, 3))
        for spec in SPECS[:-1]:
            first, last = spec.rows(rank, 3)
            local = state[spec.name].to_local().view(torch.uint8)
            assert torch.equal(local, whole[spec.name][first:last].view(torch.uint8))
            assert state[spec.name].shape == whole[spec.name].shape
    other = materialise(SPECS, 0, 1, seed=1, content=content)
    assert not torch.equal(other["of.int64"], whole["of.int64"])
    assert set(whole["of.bool"].view(torch.uint8).unique().tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("entropy", "ratio"), [("normal", 1.25), ("uniform", 1.0), ("25%", 4.0), ("0.5", 2.0)]
)
def test_content_compresses_as_requested(entropy: str, ratio: float) -> None:
    """No page equals another."""
    spec = Spec("w", (1 << 19,), "bfloat16", sharded=True)
    state = materialise([spec], 0, 1, content=parse_content(entropy))
    data = state["w"].view(torch.uint8).numpy().tobytes()
    assert len(data) / len(zlib.compress(data, 1)) == pytest.approx(ratio, rel=0.1)
    assert len({data[start : start + 4096] for start in range(0, len(data), 4096)}) == 256


def model_folder(folder: Path) -> Path:
    """Make a model of two files with an index."""
    folder.mkdir()
    weight_map = {}
    for number, name in enumerate(("a", "b"), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        whole = torch.zeros(8, 4, dtype=torch.bfloat16)
        tensors = {f"{name}.w": whole, f"{name}.s": torch.ones(())}
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": 136}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("name", "tensors"),
    [("", 4), ("model.safetensors.index.json", 4), ("model-00001-of-00002.safetensors", 2)],
)
def test_a_model_of_safetensors_files_is_a_workload(
    name: str, tensors: int, tmp_path: Path
) -> None:
    """A folder of safetensors, its index or a file is a workload; rank 0 holds scalars."""
    workload = indexed(str(model_folder(tmp_path / "model") / name))
    specs = workload.specs(0, 4)
    assert len(specs) == tensors
    assert Spec("a.w", (8, 4), "bfloat16", sharded=True) in specs
    assert Spec("a.s", (), "float32", sharded=False) in specs
    assert [len(workload.specs(rank, 4)) for rank in range(1, 4)] == [tensors // 2] * 3
    state = materialise(specs, 0, 1)
    assert sum(tensor.nbytes for tensor in state.values()) == workload.nbytes(0, 1)
