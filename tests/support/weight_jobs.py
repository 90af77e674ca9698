"""Tasks for rank processes: trainers that publish weights, and engines that follow them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast

SHAPES = {"up": (9, 14), "down": (14, 9), "norm": (7,), "experts": (4, 6, 3)}
CHANGED = 0.01

Group = Any
Made = Callable[[dict[str, torch.Tensor], Group], dict[str, Any]]


def weights(version: int) -> dict[str, torch.Tensor]:
    """Return whole weights. Few elements differ from those of the previous version."""
    made = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        generator = torch.Generator().manual_seed(number)
        values = torch.randn(shape, generator=generator).bfloat16()
        for _ in range(version):
            values[torch.rand(shape, generator=generator) < CHANGED] += 1
            values.view(-1)[0] += 1
        made[name] = values
    return made


class Weights(nn.Module):
    """A module whose parameters are given."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone(), requires_grad=False))


def _plain(whole: dict[str, torch.Tensor], group: Group) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in whole.items()}


def _module(whole: dict[str, torch.Tensor], group: Group) -> Any:
    return Weights(whole)


def _fsdp2(whole: dict[str, torch.Tensor], group: Group) -> Any:
    return fully_shard(Weights(whole), mesh=DeviceMesh.from_group(group, "cpu"))


def _fsdp1(whole: dict[str, torch.Tensor], group: Group) -> Any:
    module, cpu = Weights(whole), torch.device("cpu")
    return FullyShardedDataParallel(
        module, process_group=group, device_id=cpu, use_orig_params=True
    )


def _tp(whole: dict[str, torch.Tensor], group: Group) -> dict[str, Any]:
    mesh = DeviceMesh.from_group(group, "cpu")
    cut = {"up": Shard(1), "down": Shard(0), "experts": Shard(2)}
    return {
        name: distribute_tensor(tensor.clone(), mesh, [cut.get(name, Replicate())])
        for name, tensor in whole.items()
    }


def _pp(whole: dict[str, torch.Tensor], group: Group) -> dict[str, Any]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    return {name: whole[name].clone() for name in list(whole)[rank::world]}


def _ep(whole: dict[str, torch.Tensor], group: Group) -> dict[str, Any]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    made: dict[str, Any] = _plain(whole, group)
    mine = whole["experts"].chunk(world)[rank].clone()
    offset = (rank * len(mine), 0, 0)
    made["experts"] = holdfast.Shard(mine, shape=whole["experts"].shape, offset=offset)
    return made


def _flat(whole: dict[str, torch.Tensor], group: Group) -> dict[str, Any]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    made: dict[str, Any] = {}
    for name, tensor in whole.items():
        start, stop = (tensor.numel() * n // world for n in (rank, rank + 1))
        part = tensor.reshape(-1)[start:stop].clone()
        made[name] = holdfast.Shard(part, shape=tensor.shape, flat=(start, stop))
    return made


LAYOUTS: dict[str, Made] = {
    "plain": _plain, "module": _module, "fsdp2": _fsdp2, "fsdp1": _fsdp1, "tp": _tp, "pp": _pp, "ep": _ep, "flat": _flat,
}  # fmt: skip


def held(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's part of each tensor."""
    named = dict(state.named_parameters()) if isinstance(state, nn.Module) else state
    for name, tensor in named.items():
        if isinstance(tensor, DTensor):
            yield name, tensor.to_local()
        else:
            yield name, tensor.tensor if isinstance(tensor, holdfast.Shard) else tensor


def fill(state: Any, made: Any) -> None:
    """Give ``state`` the values of another state of the same layout, in place."""
    with torch.no_grad():
        for (_, old), (_, new) in zip(held(state), held(made), strict=True):
            old.data.copy_(new.data)


def equal(state: Any, made: Any) -> bool:
    """Return whether this rank's parts of two states are equal, bit for bit."""
    pairs = list(zip(held(state), held(made), strict=True))
    return bool(pairs) and all(
        old.dtype == new.dtype and torch.equal(old.data, new.data) for (_, old), (_, new) in pairs
    )


def split(trainers: int) -> tuple[Group, bool]:
    """Return the group of this rank, and whether it is a trainer: the first ``trainers`` are."""
    ranks = range(dist.get_world_size())
    groups = [dist.new_group(list(ranks)[:trainers]), dist.new_group(list(ranks)[trainers:])]
    trains = dist.get_rank() < trainers
    return groups[not trains], trains


def train_and_follow(uri: str, stored: str, layout: str, versions: int) -> list[Any]:
    """Publish versions on two ranks, and follow with another layout on the others. Return whether
    each version arrived, and whether it was read from an anchor."""
    group, trains = split(2)
    found: list[Any] = []
    make = LAYOUTS[stored if trains else layout]
    if trains:
        state = make(weights(0), group)
        with holdfast.publish(uri, anchor=3, process_group=group) as publisher:
            for version in range(versions):
                fill(state, make(weights(version), group))
                publisher.push(version, {"model": state}).wait()
                dist.barrier()  # published
                dist.barrier()  # compared
        return found
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}
    state = make(zeros, group)
    with holdfast.subscribe(uri, {"model": state}, process_group=group) as subscriber:
        for version in range(versions):
            dist.barrier()
            update = subscriber.update(30)
            same = equal(state, make(weights(version), group))
            found.append((same, update.version == version, update.anchored_chunks > 0))
            dist.barrier()
    return found


def outcome(work: Callable[[], Any]) -> Any:
    """Return the result of ``work``, or the type, rank and text of its error."""
    try:
        return work()
    except holdfast.HoldfastError as error:
        return type(error).__name__, error.rank, str(error)


class Bad:
    """An object without weights."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}


def push_with_one_bad(uri: str, bad: str, rank: int) -> list[Any]:
    """Publish three versions; the second one fails on ``rank``. Return the outcomes."""
    mine = dist.get_rank() == rank
    state: dict[str, Any] = {"model": _ep(weights(0), None)}
    found: list[Any] = []
    with holdfast.publish(uri, dtype="bf16") as publisher:
        for version in range(5):
            fill(state["model"], _ep(weights(version), None))
            pushed: dict[str, Any] = state
            number = version
            undo: Callable[[], Any] = bool
            if version in (1, 3) and mine:
                if bad == "state":
                    pushed = {**state, "bad": Bad()}
                elif bad == "version":
                    number = 90 + version
                elif bad == "storage":
                    undo = refuse_writes()
            found.append(
                outcome(
                    lambda pushed=pushed, number=number: (
                        publisher.push(number, pushed).wait() and publisher.newest
                    )
                )
            )
            undo()
    return found


def refuse_writes() -> Callable[[], None]:
    """Make this process find the disk full; return a function that undoes that."""
    from holdfast.drivers.local.driver import LocalDriver

    create = LocalDriver.create

    async def full(self: Any, key: str, nbytes: int) -> Any:
        raise holdfast.FullError("no room left", uri=self.uri, key=key)

    LocalDriver.create = full  # type: ignore[method-assign]

    def undo() -> None:
        LocalDriver.create = create  # type: ignore[method-assign]

    return undo


def update_with_one_bad(uri: str, bad: str, rank: int) -> list[Any]:
    """Update on several ranks. One of them finds its version damaged, or has another layout. Return
    the outcome of each update, and the version of this rank's weights."""
    mine = dist.get_rank() == rank
    whole = weights(0)
    state = LAYOUTS["pp"]({name: torch.zeros_like(whole[name]) for name in whole}, None)
    if bad == "fit" and mine:
        state["unknown"] = torch.zeros(3)
    found: list[Any] = []
    with (
        holdfast.publish(uri) as publisher,
        holdfast.subscribe(uri, {"model": state}) as subscriber,
    ):
        for version in range(5):
            publisher.push(version, {"model": LAYOUTS["pp"](weights(version), None)}).wait()
            if bad == "damage" and version == 2 and mine:
                damage(Path(uri), 3, rank)
            dist.barrier()
            got = outcome(lambda: subscriber.update().version)
            state.pop("unknown", None)
            same = [n for n in range(5) if equal(state, LAYOUTS["pp"](weights(n), None))]
            found.append((got, subscriber.version, same))
            dist.barrier()
    return found


def damage(uri: Path, sequence: int, rank: int) -> None:
    """Damage the patches of a version that a rank has published."""
    (path,) = (uri / f"{sequence:08d}").rglob(f"{rank}.safetensors.patch")
    data = bytearray(path.read_bytes())
    data[8] ^= 1
    path.write_bytes(data)


def publish_once(uri: str, layout: str, version: int, anew: bool) -> Any:
    """Start a trainer, publish one version and end. ``anew``: with one more tensor."""
    group = dist.group.WORLD
    state = LAYOUTS[layout](weights(version), group)
    tree = {"model": state} | ({"more": torch.ones(5)} if anew else {})
    with holdfast.publish(uri) as publisher:
        report = publisher.push(version, tree).wait()
        return publisher.newest, report.stored_nbytes


def changing_state(uri: str) -> list[bool]:
    """Publish states that gain and lose tensors; return whether each arrives."""
    found = []
    with (
        holdfast.publish(uri) as publisher,
        holdfast.subscribe(uri, process_group="self") as subscriber,
    ):
        for version, names in enumerate(["ab", "abc", "abc", "bc", "bc", "abcd"]):
            state = {name: torch.full((1000,), version + ord(name)) for name in names}
            publisher.push(version, state).wait()
            dist.barrier()
            subscriber.update(10)
            got = dict(subscriber.weights())
            found.append(
                list(got) == list(state) and all(torch.equal(got[n], state[n]) for n in state)
            )
            dist.barrier()
    return found


def pushed(publisher: holdfast.Publisher, version: int) -> int | None:
    """Publish a version; return the newest one."""
    publisher.push(version, {"w": torch.full((99,), version)}).wait()
    return publisher.newest


def two_trainers(uri: str) -> list[Any]:
    """Publish to one channel from two jobs of two ranks in turn. Return each rank's outcomes."""
    group, first = split(2)
    found: list[Any] = []
    for turn in range(5):
        if turn == (not first):
            publisher = holdfast.publish(uri, process_group=group)
        if first == (turn in (0, 2, 3)):
            found.append(outcome(partial(pushed, publisher, turn)))
        dist.barrier()
    publisher.close()
    return found


def dying_job(uri: str, what: str) -> Any:
    """Publish and follow a version on two ranks; then kill rank 1 in a push or an update. Return
    rank 0's outcome and version."""
    state = LAYOUTS["pp"]({name: tensor * 0 for name, tensor in weights(0).items()}, None)
    options: Any = {"deadline_s": 2.0}
    publisher = holdfast.publish(uri, **options)
    subscriber = holdfast.subscribe(uri, {"model": state}, **options)
    publisher.push(0, {"model": LAYOUTS["pp"](weights(0), None)}).wait()
    subscriber.update(10)
    if what == "push" and dist.get_rank() == 1:
        die_in("create")
    found = outcome(
        lambda: publisher.push(1, {"model": LAYOUTS["pp"](weights(1), None)}).wait() and 1
    )
    if what == "update":
        if dist.get_rank() == 1:
            die_in("read")
        found = outcome(subscriber.update)
    return found, subscriber.version, equal(state, LAYOUTS["pp"](weights(0), None))


def die_in(method: str) -> None:
    """Kill this process at its next request of a kind to local storage."""
    from holdfast.drivers.local.driver import LocalDriver

    async def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(LocalDriver, method, die)
