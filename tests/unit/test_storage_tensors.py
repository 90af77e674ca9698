"""Tensors of every dtype and layout come back bit for bit."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.bits import difference, fresh_uri, random_bits
from support.layouts import Halves
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast.planner.box import Box
from holdfast.storage.state.adapters import tensors
from holdfast.storage.state.flattening.flatten import flatten
from holdfast.storage.state.plan import plan_image


def dtypes() -> list[torch.dtype]:
    """Every dtype of this torch that is not quantized."""
    found = {value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)}
    return sorted((d for d in found if "qint" not in str(d) and "quint" not in str(d)), key=str)


@pytest.fixture(autouse=True)
def _quiet() -> object:
    """torch warns that complex32 is experimental."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        yield


def test_every_dtype_comes_back_bit_for_bit(rng: np.random.Generator) -> None:
    """Random bits of any dtype, in 0 to 3 dimensions, survive a save and both kinds of load."""
    shapes = [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (3, 0, 2)]
    assert {torch.float8_e5m2, torch.complex32, torch.uint64, torch.bfloat16} <= set(dtypes())
    state = {
        f"{dtype} {shape}": random_bits(rng, dtype, shape) for dtype in dtypes() for shape in shapes
    }
    into = {name: random_bits(rng, t.dtype, tuple(t.shape)) for name, t in state.items()}
    uri = fresh_uri()
    holdfast.save(uri, state)
    assert difference(state, holdfast.load(uri)) is None
    targets = dict(into)
    assert holdfast.load(uri, into=into) is into
    assert difference(state, into) is None
    assert all(into[name] is target for name, target in targets.items())


def views() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Ways to look at a tensor of 4 dimensions that leave it not contiguous, or lazily changed."""
    return {
        "transposed": lambda t: t.transpose(0, 3),
        "permuted": lambda t: t.permute(2, 0, 3, 1),
        "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
        "stepped": lambda t: t[::2, 1:, :, ::3],
        "narrow": lambda t: t[:, :, 1:2, :],
        "offset": lambda t: t[1:, 2:],
        "expanded": lambda t: t[:1].expand(3, *t.shape[1:]),
        "expanded scalar": lambda t: t[0, 0, 0, 0].expand(2, 5),
        "diagonal": lambda t: t.diagonal(dim1=1, dim2=3),
        "overlapping windows": lambda t: t.reshape(-1).unfold(0, 5, 2),
        "one element": lambda t: t[1, 2, 3, 1],
        "empty": lambda t: t[:, :0].transpose(0, 3),
        "bits": lambda t: t.view(torch.uint8),
    }


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.complex64],
    ids=str,
)
def test_views_are_stored_as_what_they_show(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Views of one memory come back with their own elements, loaded anew and into such views."""

    def make() -> dict[str, torch.Tensor]:
        whole = random_bits(rng, dtype, (4, 3, 5, 6))
        return {"whole": whole} | {name: view(whole) for name, view in views().items()}

    state, into = make(), make()
    uri = fresh_uri()
    holdfast.save(uri, state)
    assert difference(state, holdfast.load(uri)) is None
    for name in ("expanded", "expanded scalar", "overlapping windows"):  # these cannot be filled
        into[name] = torch.empty_like(state[name], memory_format=torch.contiguous_format)
    holdfast.load(uri, into=into)
    assert difference(state, into) is None


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_lazy_conjugates_and_negatives_are_stored_as_what_they_mean(
    dtype: torch.dtype, rng: np.random.Generator
) -> None:
    """torch marks such views with a bit; their memory holds other numbers than they show."""

    def make() -> list[torch.Tensor]:
        some = [rng.normal(size=(3, 4)) + 1j * rng.normal(size=(3, 4)) for _ in range(4)]
        a, b, c, d = (torch.from_numpy(z).to(dtype) for z in some)
        return [a.conj(), b.conj().imag, torch._neg_view(c.conj()), d.t().conj()]

    state, into = make(), make()
    assert all(tensor.is_conj() or tensor.is_neg() for tensor in state)
    uri = fresh_uri()
    holdfast.save(uri, state)
    assert difference(state, holdfast.load(uri)) is None
    holdfast.load(uri, into=into)
    assert difference(state, into) is None


def test_a_tied_tensor_is_stored_once_and_comes_back_as_one() -> None:
    """One tensor at two paths is stored once, built as one object, and fills both targets."""
    w = torch.arange(3000.0)
    uri, single = fresh_uri(), fresh_uri()
    tied, alone = (
        holdfast.save(uri, {"head": w, "embed": {"w": w}}),
        holdfast.save(single, {"head": w}),
    )
    assert tied.nbytes == alone.nbytes
    built = holdfast.load(uri)
    assert built["head"] is built["embed"]["w"]
    assert torch.equal(built["head"], w)
    into = {"head": torch.zeros(3000), "embed": {"w": torch.zeros(3000)}}
    holdfast.load(uri, into=into)
    assert torch.equal(into["head"], w)
    assert torch.equal(into["embed"]["w"], w)
    with holdfast.open(uri) as c:
        assert {info.alias_of for info in c.tensors.values()} == {None, "embed.w"}


def test_parameters_and_tensors_in_a_graph_are_stored_as_values() -> None:
    """Tensors that require gradients are saved without, and filled without disturbing autograd."""
    parameter = torch.nn.Parameter(torch.arange(4.0))
    uri = fresh_uri()
    holdfast.save(uri, {"p": parameter, "y": parameter * 2})
    loaded = holdfast.load(uri)
    assert not loaded["p"].requires_grad
    assert torch.equal(loaded["y"], torch.tensor([0.0, 2.0, 4.0, 6.0]))
    target = torch.nn.Parameter(torch.zeros(4))
    holdfast.load(uri, into={"p": target, "y": torch.zeros(4)})
    assert target.requires_grad
    assert target.is_leaf
    assert torch.equal(target.detach(), torch.arange(4.0))


@pytest.mark.nightly(24)
@pytest.mark.timeout(300)
def test_a_tensor_of_more_than_two_to_the_31_elements_comes_back(tmp_path: Path) -> None:
    """Offsets beyond 2^31 and 2^32 bits are no smaller than they are."""
    n = (1 << 31) + 5
    uri = tmp_path / "c"
    big = torch.zeros(n, dtype=torch.uint8)
    marks = torch.tensor(
        [0, 1, 4095, (1 << 24) - 1, 1 << 24, (1 << 30) + 7, (1 << 31) - 1, 1 << 31, n - 1]
    )
    big[marks] = torch.arange(1, len(marks) + 1, dtype=torch.uint8)
    holdfast.save(uri, {"big": big})
    with holdfast.open(uri) as c:
        assert c.tensors["big"].shape == (n,)
        assert c.read("big", slice(n - 3, n)).tolist() == [0, 0, len(marks)]
    big.zero_()
    holdfast.load(uri, into={"big": big})
    shutil.rmtree(uri)  # pytest keeps the folders of its last runs
    assert torch.equal(torch.nonzero(big).flatten(), marks)
    assert big[marks].tolist() == list(range(1, len(marks) + 1))


@pytest.mark.parametrize("kind", [tuple, list], ids=["tuple", "list"])
def test_a_mesh_may_name_its_coordinate_in_either_way(
    kind: Callable[[list[int]], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases of torch return a mesh's coordinate as a tuple or as a list."""
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), _init_backend=False, _rank=1)
    monkeypatch.setattr(DeviceMesh, "get_coordinate", lambda _: kind([0, 1]))
    tensor = DTensor.from_local(
        torch.zeros(2, 3),
        mesh,
        [Shard(0), Shard(1)],
        run_check=False,
        shape=torch.Size((4, 6)),
        stride=(6, 1),
    )
    (layout,) = flatten({"w": tensor}).layouts
    assert layout.pieces[0].box == Box((0, 3), (2, 3))


def test_a_new_type_of_tensor_needs_only_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of an unknown type is saved box by box, once its adapter is registered."""
    monkeypatch.setitem(tensors.ADAPTERS, Halves, Halves.Adapter)
    flat = flatten({"w": Halves(torch.arange(6.0).reshape(2, 3), rows=4, at=2)})
    assert flat.shapes == [(4, 3)]
    plan = plan_image(flat, 0, None)
    assert (plan.held.offsets.tolist(), plan.held.lengths.tolist()) == ([[2, 0]], [[2, 3]])
