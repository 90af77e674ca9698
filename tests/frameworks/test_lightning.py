"""Lightning itself, with its checkpoints in Holdfast."""

from __future__ import annotations

import json
import os
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.drivers import HookedDriver
from support.framework_jobs import SIGKILLED, documented, losses, run_job
from support.given import Serve
from support.servers.radosgw import find_ceph
from support.servers.start import started
from torch import nn

import holdfast
from holdfast.drivers.local.driver import LocalDriver
from holdfast.storage.integrations.value_conversion import to_stored

if find_spec("lightning") is None:
    pytest.skip("lightning is not installed: make frameworks", allow_module_level=True)

JOB = Path(__file__).parents[1] / "support" / "lightning_job.py"
# Warnings of Lightning and of the packages it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder of a job that never stopped, of as many ranks as the test asks for, and with its
    strategy."""
    world, strategy = request.param
    folder = tmp_path_factory.mktemp("uninterrupted")
    arguments = ("--out", folder, "--world", str(world), "--strategy", strategy)
    done = run_job(JOB, *arguments, world=world)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("uninterrupted", [(1, "auto")], indirect=True)
@pytest.mark.parametrize("plugin", ["sync", "lazy"])
def test_a_killed_job_goes_on_as_if_it_had_never_stopped(
    uninterrupted: Path, tmp_path: Path, plugin: str
) -> None:
    """Killed at step 9 and resumed from its last checkpoint, it computes the same losses to the
    last bit; callbacks have their state, and the best two checkpoints and the last one are left."""
    folder = tmp_path / "killed"
    folder.mkdir()
    common = ("--out", folder, "--plugin", plugin)
    assert run_job(JOB, *common, "--die-at", "9").returncode == SIGKILLED
    assert 9 not in losses(folder)  # counted from 0
    done = run_job(JOB, *common, "--resume", "last")
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(folder) == losses(uninterrupted)
    outcome = json.loads((folder / "done.json").read_text())
    assert outcome["seen"] == list(range(1, 16))
    checkpoints = folder / "checkpoints"
    assert outcome["best"] == [str(checkpoints / f"step={step}.ckpt") for step in (12, 14)]
    listed = {c.path: c.step for c in holdfast.list_checkpoints(checkpoints)}
    assert {"step=12.ckpt", "step=14.ckpt", "last.ckpt"} <= listed.keys()
    # Lightning does not know checkpoints that the killed job saved after the resume point.
    assert listed.keys() - {"step=12.ckpt", "step=14.ckpt", "last.ckpt"} <= {"step=8.ckpt"}
    assert listed["last.ckpt"] == 14


@pytest.mark.nightly(30)
@pytest.mark.parametrize("uninterrupted", [(2, "auto")], indirect=True)
def test_two_ranks_under_ddp_go_on_as_if_they_had_never_stopped(
    uninterrupted: Path, tmp_path: Path
) -> None:
    """Rank 0 saves alone, while the other one waits; both load."""
    folder = tmp_path / "killed"
    folder.mkdir()
    common = ("--out", folder, "--plugin", "async", "--world", "2")
    assert run_job(JOB, *common, "--die-at", "9", world=2).returncode != 0
    done = run_job(JOB, *common, "--resume", folder / "checkpoints" / "last.ckpt", world=2)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        assert losses(folder, rank) == losses(uninterrupted, rank)
    with holdfast.open(folder / "checkpoints" / "last.ckpt") as c:
        assert (c.step, c.world) == (14, 1)


@pytest.mark.nightly(84)
@pytest.mark.parametrize(
    ("uninterrupted", "strategy", "plugin"),
    [
        ((2, "fsdp2"), "fsdp2", "sync"),
        pytest.param((2, "tp"), "tp", "async", marks=pytest.mark.nightly(30)),
        pytest.param((2, "fsdp1"), "fsdp1", "lazy", marks=pytest.mark.nightly(30)),
    ],
    indirect=["uninterrupted"],
)
def test_two_ranks_that_shard_the_model_go_on_as_if_they_had_never_stopped(
    uninterrupted: Path, tmp_path: Path, strategy: str, plugin: str
) -> None:
    """Two ranks that shard the model resume to exactly the losses of an uninterrupted run.

    A single rank loads all shards and saves the same bits. The plugin reads the checkpoint as
    Lightning's dict.
    """
    from holdfast.storage.integrations.lightning import HoldfastCheckpointIO

    folder = tmp_path / "killed"
    folder.mkdir()
    common = ("--out", folder, "--plugin", plugin, "--strategy", strategy)
    killed = run_job(JOB, *common, "--world", "2", "--die-at", "9", world=2)
    assert killed.returncode != 0
    last = folder / "checkpoints" / "last.ckpt"
    done = run_job(JOB, *common, "--world", "2", "--resume", last, world=2)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        assert losses(folder, rank) == losses(uninterrupted, rank)
    with holdfast.open(last) as c:
        assert (c.step, c.world) == (14, 2)
        assert c.tensors["state_dict.layers.0.weight"].ranks == (0, 1)
        assert c.tensors["optimizer_states.0.state.layers.0.weight.exp_avg"].ranks == (0, 1)
    paths = {c.path for c in holdfast.list_checkpoints(folder / "checkpoints")}
    assert paths - {"step=8.ckpt"} == {"step=12.ckpt", "step=14.ckpt", "last.ckpt"}
    again = folder / "again"
    done = run_job(JOB, *common, "--resume", last, "--steps", "14", "--again", again)
    assert done.returncode == 0, done.stderr[-3000:]
    differing = [each.name for each in holdfast.diff(last, again).tensors]
    assert not [name for name in differing if not name.startswith("trainer.")]
    checkpoint = HoldfastCheckpointIO().load_checkpoint(last)
    assert checkpoint["callbacks"]["Seen"]["steps"] == set(range(1, 15))
    assert checkpoint["state_dict"]["layers.0.weight"].shape == (16, 8)


@pytest.mark.parametrize("strict", [True, False])
def test_a_load_into_a_sharded_model_reads_the_manifest_once(
    tmp_path: Path, serve: Serve, strict: bool
) -> None:
    """A load into a sharded model reads the manifest once and returns the rest of the saved state.

    A checkpoint with weights alone, as a single rank saves under DDP, is refused.
    """
    from holdfast.storage.integrations.lightning import HoldfastCheckpointIO

    read: list[str] = []

    async def note(operation: str, key: str) -> None:
        if operation in ("get", "read"):
            read.append(key)

    uri = serve(lambda path: HookedDriver(LocalDriver(tmp_path), before=note))
    rest = {"epoch": 3, "callbacks": {"Seen": {"steps": {1, 2}}}, "hyper": [1, (2.5, None)]}
    saved = nn.Linear(3, 2)
    io = HoldfastCheckpointIO()
    io.save_state({"state_dict": saved, "trainer": to_stored(rest)}, uri, step=1)
    read.clear()
    model = nn.Linear(3, 2)
    assert io.load_state(uri, {"state_dict": model}, strict=strict) == rest
    assert torch.equal(model.weight, saved.weight)
    assert read.count("manifest.safetensors") == 1
    io.save_state({"state_dict": saved}, uri, step=2)
    with pytest.raises(holdfast.MismatchError, match="trainer"):
        io.load_state(uri, {"state_dict": model}, strict=strict)


def test_strategies_that_shard_refuse_what_they_would_not_save(tmp_path: Path) -> None:
    """A plugin of others, and a state of the model that a hook has changed."""
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.pytorch import LightningModule

    from holdfast.storage.integrations.lightning import HoldfastModelParallelStrategy

    strategy = HoldfastModelParallelStrategy()
    with pytest.raises(holdfast.UsageError, match="cannot save through a TorchCheckpointIO"):
        strategy.checkpoint_io = TorchCheckpointIO()
    module = LightningModule()
    module.layer = nn.Linear(2, 1)
    strategy.connect(module)
    for changed in ({}, {name: p.detach() for name, p in module.named_parameters()}):
        with pytest.raises(holdfast.UsageError, match="on_save_checkpoint"):
            strategy.save_checkpoint({"state_dict": changed}, tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.nightly(60)
@pytest.mark.parametrize(
    ("uninterrupted", "world", "strategy"),
    [
        ((1, "auto"), 1, "auto"),
        pytest.param((2, "fsdp2"), 2, "fsdp2", marks=pytest.mark.nightly(30)),
    ],
    indirect=["uninterrupted"],
)
def test_a_job_saves_to_s3_and_resumes_from_there(
    uninterrupted: Path, tmp_path: Path, world: int, strategy: str
) -> None:
    """The folder of ModelCheckpoint and ckpt_path are URIs, and old checkpoints are deleted."""
    if find_ceph() is None:
        pytest.skip("radosgw is not installed: make test-servers")
    folder = tmp_path / "killed"
    folder.mkdir()
    common = ("--out", folder, "--folder", "s3://holdfast/run", "--strategy", strategy)
    common += ("--world", str(world))
    with started("s3", tmp_path / "radosgw") as (uri, settings):
        environment = {**settings, "AWS_ENDPOINT_URL": uri.partition("endpoint=")[2]}
        killed = run_job(JOB, *common, "--die-at", "9", world=world, environment=environment)
        assert killed.returncode == (SIGKILLED if world == 1 else 1), killed.stderr[-3000:]
        newest = ("--resume", "s3://holdfast/run/step=8.ckpt")
        done = run_job(JOB, *common, *newest, world=world, environment=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            listed = {c.path: c.step for c in holdfast.list_checkpoints("s3://holdfast/run")}
    for rank in range(world):
        assert losses(folder, rank) == losses(uninterrupted, rank)
    assert listed.keys() >= {"step=12.ckpt", "step=14.ckpt"}
    assert "step=6.ckpt" not in listed


def test_what_cannot_be_saved_is_refused_by_its_path(tmp_path: Path) -> None:
    """Nothing is pickled, and nothing is left out in silence."""
    from holdfast.storage.integrations.lightning import HoldfastCheckpointIO

    io = HoldfastCheckpointIO()
    refused = {
        "act": (torch.relu, r'state\["hyper_parameters"\]\["act"\] is a .*builtin'),
        "net": (nn.Linear(1, 1), r'state\["hyper_parameters"\]\["net"\] is a Linear'),
        "kind": (nn.Linear, r'state\["hyper_parameters"\]\["kind"\] is a builtins.type'),
    }
    for name, (value, message) in refused.items():
        with pytest.raises(holdfast.StateError, match=message):
            io.save_checkpoint({"hyper_parameters": {name: value}}, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    io.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, tmp_path / "c")
    with pytest.raises(holdfast.UsageError, match="loaded to the CPU"):
        io.load_checkpoint(tmp_path / "c", map_location="meta")


def test_a_checkpoint_is_deleted_when_the_saves_before_are_durable(tmp_path: Path) -> None:
    """A checkpoint is deleted only once all earlier saves are durable.

    If an earlier save failed, its predecessor stays, and the next wait for that save raises the
    error.
    """
    from holdfast.storage.integrations.lightning import HoldfastAsyncCheckpointIO

    io = HoldfastAsyncCheckpointIO()
    io.save_checkpoint({"global_step": 1, "w": torch.ones(2)}, tmp_path / "1")
    io.save_checkpoint({"global_step": 2, "w": torch.ones(2)}, tmp_path / "2")
    io.remove_checkpoint(tmp_path / "1")
    assert (tmp_path / "1").exists()
    io.teardown()
    assert os.listdir(tmp_path) == ["2"]
    (tmp_path / "file").touch()
    io.save_checkpoint({"global_step": 3, "w": torch.ones(2)}, tmp_path / "file" / "3")
    io.remove_checkpoint(tmp_path / "2")
    with pytest.raises(holdfast.StorageError):
        io.save_checkpoint({"global_step": 4, "w": torch.ones(2)}, tmp_path / "4")
    io.teardown()
    assert sorted(os.listdir(tmp_path)) == ["2", "file"]


def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    """Fabric saves and loads a state of the caller's, as Trainer does."""
    from lightning.fabric import Fabric

    from holdfast.storage.integrations.lightning import HoldfastCheckpointIO

    fabric = Fabric(accelerator="cpu", devices=1, plugins=[HoldfastCheckpointIO()])
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    fabric.save(tmp_path / "c", {"model": model, "step": 7})
    rest = fabric.load(tmp_path / "c", {"model": other})
    assert rest == {"step": 7}
    assert torch.equal(other.weight, model.weight)


def test_the_how_to_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The how-to's code blocks work: switch, resume, switch back, load the weights alone."""
    from lightning.pytorch import LightningModule, Trainer

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.layer(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    monkeypatch.chdir(tmp_path)
    data = torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=2)
    names: dict[str, Any] = {"model": Net(), "data": data}
    for block in documented("use-with-lightning.md"):
        code = block.replace("/scratch", str(tmp_path)).replace("=500", "=2")
        code = code.replace("Trainer(", "Trainer(accelerator='cpu', max_epochs=1, logger=False, ")
        (tmp_path / "block.py").write_text(code)
        names = runpy.run_path(str(tmp_path / "block.py"), names)
    trained = names["model"].layer.weight
    again = names["io"].load_checkpoint(tmp_path / "run" / "again.ckpt")
    assert again["global_step"] == 6
    assert torch.equal(again["state_dict"]["layer.weight"], trained)
    plain = Trainer(accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False)
    plain.fit(Net(), data, ckpt_path=str(tmp_path / "run.ckpt"))
    assert plain.global_step == 12
