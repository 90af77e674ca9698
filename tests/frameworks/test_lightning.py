"""Lightning itself, with its checkpoints in Holdfast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.bits import difference
from support.drivers import HookedDriver
from support.framework_jobs import check_losses, check_page, losses, run_job
from support.given import Serve
from support.servers.radosgw import find_ceph
from support.servers.start import started
from torch import nn

import holdfast
from holdfast.drivers.local.driver import LocalDriver
from holdfast.storage.integrations.value_conversion import to_stored

pytest.importorskip("lightning", reason="not installed: make frameworks")

# Warnings of Lightning and of the packages it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Return the folder of a job that never stopped, with the test's ranks and strategy."""
    world, strategy = request.param
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_job("lightning", folder, *options_of(world, strategy), world=world)
    return folder


def options_of(world: int, strategy: str) -> tuple[str, ...]:
    """Return the options of a job."""
    return ("--world", str(world), "--strategy", strategy)


LEFT = {"step=12.ckpt", "step=14.ckpt", "last.ckpt"}
"""The best two checkpoints, and the last one."""


@pytest.mark.nightly(84)
@pytest.mark.parametrize(
    ("uninterrupted", "plugin"),
    [
        ((1, "auto"), "sync"),
        pytest.param((1, "auto"), "lazy", marks=pytest.mark.nightly(30)),
        pytest.param((2, "auto"), "async", marks=pytest.mark.nightly(30)),
        ((2, "fsdp2"), "sync"),
        pytest.param((2, "tp"), "async", marks=pytest.mark.nightly(30)),
        pytest.param((2, "fsdp1"), "lazy", marks=pytest.mark.nightly(30)),
    ],
    indirect=["uninterrupted"],
)
def test_killed_job_resumes(
    uninterrupted: Path, tmp_path: Path, plugin: str, request: pytest.FixtureRequest
) -> None:
    """A job killed at step 9 resumes to exactly the losses of an uninterrupted one.

    Under DDP rank 0 saves alone. Otherwise each rank saves its shards, and one rank loads them all.
    """
    from holdfast.storage.integrations.lightning import HoldfastCheckpointIO

    world, strategy = request.node.callspec.params["uninterrupted"]
    options = (*options_of(world, strategy), "--plugin", plugin)
    checkpoints = tmp_path / "checkpoints"
    last = checkpoints / "last.ckpt"
    run_job("lightning", tmp_path, *options, "--die-at", "9", world=world, is_killed=True)
    assert 9 not in losses(tmp_path)  # counted from 0
    run_job("lightning", tmp_path, *options, "--resume", last, world=world)
    check_losses(tmp_path, uninterrupted, world)
    outcome = json.loads((tmp_path / "done.json").read_text())
    assert outcome["seen"] == list(range(1, 16))
    assert outcome["best"] == [str(checkpoints / f"step={step}.ckpt") for step in (12, 14)]
    # Lightning does not know of checkpoints saved after the one that the job resumed from.
    paths = {c.path for c in holdfast.list_checkpoints(checkpoints)}
    assert LEFT <= paths <= LEFT | {"step=8.ckpt"}
    checkpoint = HoldfastCheckpointIO().load_checkpoint(last)
    assert checkpoint["callbacks"]["Seen"]["steps"] == set(range(1, 15))
    with holdfast.open(last) as c:
        assert (c.step, c.world) == (14, 1 if strategy == "auto" else world)
        if strategy == "auto":
            return
        assert c.tensors["state_dict.layers.0.weight"].ranks == (0, 1)
        assert c.tensors["optimizer_states.0.state.layers.0.weight.exp_avg"].ranks == (0, 1)
    again = tmp_path / "again"
    alone = ("--strategy", strategy, "--resume", last, "--steps", "14", "--again", again)
    run_job("lightning", tmp_path, *alone)
    differing = [each.name for each in holdfast.diff(last, again).tensors]
    assert not [name for name in differing if not name.startswith("trainer.")]
    assert checkpoint["state_dict"]["layers.0.weight"].shape == (16, 8)


@pytest.mark.parametrize("strict", [True, False])
def test_load_into_a_sharded_model_reads_the_manifest_once(
    tmp_path: Path, serve: Serve, strict: bool
) -> None:
    """A load reads the manifest once, and refuses a checkpoint of DDP, which has weights alone."""
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


def test_sharding_strategies_refuse_what_they_would_not_save(tmp_path: Path) -> None:
    """Another plugin, and a model state that a hook has changed, are errors."""
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
def test_job_saves_to_s3_and_resumes(
    uninterrupted: Path, tmp_path: Path, world: int, strategy: str
) -> None:
    """ModelCheckpoint's folder and ckpt_path may be URIs; old checkpoints are deleted there."""
    if find_ceph() is None:
        pytest.skip("radosgw is not installed: make test-servers")
    options = (*options_of(world, strategy), "--folder", "s3://holdfast/run")
    with started("s3", tmp_path / "radosgw") as (uri, settings), pytest.MonkeyPatch.context() as m:
        for name, value in {**settings, "AWS_ENDPOINT_URL": uri.partition("endpoint=")[2]}.items():
            m.setenv(name, value)
        run_job("lightning", tmp_path, *options, "--die-at", "9", world=world, is_killed=True)
        newest = ("--resume", "s3://holdfast/run/step=8.ckpt")
        run_job("lightning", tmp_path, *options, *newest, world=world)
        listed = {c.path: c.step for c in holdfast.list_checkpoints("s3://holdfast/run")}
    check_losses(tmp_path, uninterrupted, world)
    assert listed.keys() >= {"step=12.ckpt", "step=14.ckpt"}
    assert "step=6.ckpt" not in listed


def test_unsupported_values_are_refused(tmp_path: Path) -> None:
    """A value that would need pickle is named by its path; nothing is left out silently."""
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


@pytest.mark.parametrize(
    "worlds", [(1, 2, 1), pytest.param((2, 1, 2), marks=pytest.mark.nightly(35))]
)
def test_how_to(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    """The page's script is killed, resumes on another number of ranks, and switches back."""
    from holdfast.storage.integrations.lightning import HoldfastCheckpointIO

    check_page("use-with-lightning.md", tmp_path, worlds=worlds)
    run = tmp_path / "run"
    names = {c.path for c in holdfast.list_checkpoints(run)}
    assert names >= {"last.ckpt", *(f"epoch=0-step={step}.ckpt" for step in (4, 8, 12))}
    if worlds[-1] == 1:
        ours = HoldfastCheckpointIO().load_checkpoint(run / "again.ckpt")
        theirs = torch.load(tmp_path / "run.ckpt", weights_only=True)
        assert ours["global_step"] == theirs["global_step"] == 12
        assert difference(ours["state_dict"], theirs["state_dict"]) is None
