"""Tensors of every dtype and layout come back bit for bit, also if they share memory."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import difference, flip, fresh_uri, image_in, random_bits, saved
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast.planner.box import Box
from holdfast.planner.layout import MeshLayout, Piece
from holdfast.storage.state.adapters import tensors
from holdfast.storage.state.flattening.flatten import flatten
from holdfast.storage.state.plan import plan_image


def dtypes() -> list[torch.dtype]:
    """Return every dtype of this torch that is not quantized."""
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
    uri = saved(state)
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
    """Views of one memory come back with their own elements, in new tensors and in such views."""

    def make() -> dict[str, torch.Tensor]:
        whole = random_bits(rng, dtype, (4, 3, 5, 6))
        return {"whole": whole} | {name: view(whole) for name, view in views().items()}

    state, into = make(), make()
    uri = saved(state)
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
    uri = saved(state)
    assert difference(state, holdfast.load(uri)) is None
    holdfast.load(uri, into=into)
    assert difference(state, into) is None


def test_a_tied_tensor_is_stored_once_and_comes_back_as_one() -> None:
    """One tensor at two paths is stored once, built as one object, and fills both targets."""
    w = torch.arange(3000.0)
    uri, single = fresh_uri(), fresh_uri()
    tied = holdfast.save(uri, {"head": w, "embed": {"w": w}})
    alone = holdfast.save(single, {"head": w})
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
    uri = saved({"p": parameter, "y": parameter * 2})
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


class LM(nn.Module):
    """An embedding and a head, tied or not; of two chunks each where it matters."""

    def __init__(self, tied: bool, rows: int = 9000, columns: int = 1024) -> None:
        super().__init__()
        self.emb = nn.Embedding(rows, columns)
        self.head = nn.Linear(columns, rows, bias=False)
        if tied:
            self.head.weight = self.emb.weight


def array(values: Any) -> np.ndarray:
    """Return a tensor or an array as an array."""
    return values.resolve_neg().numpy() if isinstance(values, torch.Tensor) else values


def untied(first: float, second: float) -> tuple[str, LM]:
    """Save a checkpoint of two tensors, each of one value."""
    model, uri = LM(False), fresh_uri()
    with torch.no_grad():
        model.emb.weight.fill_(first)
        model.head.weight.fill_(second)
    holdfast.save(uri, {"model": model, "step": 3})
    return uri, model


def test_tied_weights_of_which_two_values_are_stored_are_refused() -> None:
    """The error has both names and a remedy, and comes before anything is filled."""
    uri, _ = untied(1.0, 2.0)
    model = LM(True)
    before = model.emb.weight.detach().clone()
    with pytest.raises(holdfast.MismatchError) as caught:
        holdfast.load(uri, into={"model": model, "step": 0})
    assert "'model.emb.weight', 'model.head.weight' share memory" in str(caught.value)
    assert 'strict="state"' in str(caught.value)
    assert torch.equal(before, model.emb.weight)


def test_values_that_agree_after_a_cast_are_loaded() -> None:
    """Values are compared as the state would hold them."""
    uri = saved({"a": torch.ones(5), "b": torch.ones(5, dtype=torch.float16)})
    tied = torch.zeros(5, dtype=torch.float64)
    holdfast.load(uri, into={"a": tied, "b": tied}, cast=True)
    assert tied.tolist() == [1.0] * 5


LAYOUTS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "whole and part": lambda base: (base, base[10:30]),
    "part and whole": lambda base: (base[10:30], base),
    "overlapping slices": lambda base: (base[:40], base[20:60]),
    "a matrix and its columns": lambda base: (base.view(8, 8), base.view(8, 8)[:, 2:5]),
    "transposed": lambda base: (base.view(8, 8), base.view(8, 8).t()),
    "another dtype": lambda base: (base, base.view(torch.int32)[5:9]),
    "negated": lambda base: (base, torch._neg_view(base[3:9])),
    "numpy and torch": lambda base: (base, base.numpy()[5:50]),  # type: ignore[dict-item,return-value]
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_views_that_were_stored_as_they_are_come_back(
    layout: Any, rng: np.random.Generator
) -> None:
    """Views that agree when saved agree when loaded, in every mode."""
    base = torch.from_numpy(rng.random(64, np.float32))
    uri = fresh_uri()
    first, second = layout(base)
    holdfast.save(uri, {"a": first, "b": second})
    for strict in (True, "state", False):
        into = torch.zeros(64)
        first, second = layout(into)
        holdfast.load(uri, into={"a": first, "b": second}, strict=strict)
        stored = holdfast.load(uri)
        assert np.array_equal(array(first), array(stored["a"]))
        assert np.array_equal(array(second), array(stored["b"]))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_views_that_contradict_each_other_are_refused_or_the_last_one_is_whole(layout: Any) -> None:
    """This holds for any overlap."""
    uri = fresh_uri()
    first, _ = layout(torch.full((64,), 7.0))
    _, second = layout(torch.full((64,), 9.0))
    holdfast.save(
        uri,
        {
            "a": first.clone(),
            "b": second.copy() if isinstance(second, np.ndarray) else second.clone(),
        },
    )
    into = torch.zeros(64)
    first, second = layout(into)
    with pytest.raises(holdfast.MismatchError, match="'a', 'b' share memory"):
        holdfast.load(uri, into={"a": first, "b": second})
    assert into.tolist() == [0.0] * 64
    holdfast.load(uri, into={"a": first, "b": second}, strict="state")
    assert np.array_equal(array(second), array(holdfast.load(uri)["b"]))
    covered = into[:60] if first.numel() == 40 else into
    assert set(covered.tolist()) <= {7.0, 9.0, -9.0}


@pytest.mark.parametrize("count", [3, 7])
def test_neighbours_in_one_storage_are_filled_in_place(
    count: int, rng: np.random.Generator
) -> None:
    """Disjoint slices of one storage, also interleaved ones, do not conflict."""
    uri = fresh_uri()
    stored = torch.from_numpy(rng.random((count, 6 * count)))
    for dim in (0, 1):
        holdfast.save(
            uri, {str(i): part.clone() for i, part in enumerate(stored.chunk(count, dim))}
        )
        into = torch.zeros_like(stored)
        holdfast.load(uri, into={str(i): part for i, part in enumerate(into.chunk(count, dim))})
        assert torch.equal(into, stored)


def test_one_tensor_under_many_names() -> None:
    """The last of three names differs, and then the middle one."""
    for values in ([4.0, 4.0, 6.0], [4.0, 6.0, 4.0]):
        uri, tied = fresh_uri(), torch.zeros(3)
        holdfast.save(
            uri, {name: torch.full((3,), value) for name, value in zip("abc", values, strict=True)}
        )
        with pytest.raises(holdfast.MismatchError, match="differ in 1 place"):
            holdfast.load(uri, into=dict.fromkeys("abc", tied))
        holdfast.load(uri, into=dict.fromkeys("abc", tied), strict=False)
        assert tied.tolist() == [values[-1]] * 3


def test_tied_weights_that_are_stored_as_one_are_read_once() -> None:
    """There is no second tensor to compare with."""
    model, uri = LM(True, 100, 8), fresh_uri()
    holdfast.save(uri, {"model": model})
    other, reports = LM(True, 100, 8), list[holdfast.LoadReport]()
    holdfast.load(uri, into={"model": other}, on_report=reports.append)
    assert torch.equal(model.emb.weight, other.emb.weight)
    split = LM(False, 100, 8)
    holdfast.load(uri, into={"model": split})
    assert torch.equal(model.emb.weight, split.head.weight)


def test_a_dict_at_two_places_gets_values_of_one_of_them() -> None:
    """The same holds for small values: refused, or the last."""
    uri = saved(
        {
            "a": {"x": 1, "y": 5, "t": torch.ones(1)},
            "b": {"x": 2, "y": 5, "t": torch.full((1,), 2.0)},
        },
    )
    both = {"x": 0, "y": 0, "t": torch.zeros(1)}
    with pytest.raises(holdfast.MismatchError, match=r"'a\.x' and 'b\.x'"):
        holdfast.load(uri, into={"a": both, "b": both})
    holdfast.load(uri, into={"a": both, "b": both}, strict="state")
    assert both == {"x": 2, "y": 5, "t": torch.full((1,), 2.0)}


def test_what_is_damaged_of_shared_memory_is_said_before_anything_is_filled(tmp_path: Any) -> None:
    """It is read first, so the error comes before."""
    uri = str(tmp_path / "c")
    holdfast.save(uri, {"a": torch.ones(40_000), "b": torch.ones(40_000), "c": torch.ones(4)})
    image = image_in(tmp_path / "c")
    flip(image, image.stat().st_size // 2)
    tied, other = torch.zeros(40_000), torch.zeros(4)
    with pytest.raises(holdfast.DamagedError):
        holdfast.load(uri, into={"a": tied, "b": tied, "c": other})
    assert (tied.unique().tolist(), other.tolist()) == ([0.0], [0.0] * 4)


class Halves(torch.Tensor):
    """Some rows of a larger matrix, from row ``at`` on."""

    rows: int
    at: int

    @staticmethod
    def __new__(cls: Any, data: torch.Tensor, *, rows: int, at: int) -> Any:
        made = data.as_subclass(cls)
        made.rows = rows
        made.at = at
        return made

    class Adapter:
        """Reads them."""

        def local(self, tensor: Halves) -> torch.Tensor:
            return tensor.as_subclass(torch.Tensor)

        def layout(
            self, tensor: Halves, local: torch.Tensor, path: Callable[[], str]
        ) -> MeshLayout:
            columns = local.shape[1]
            piece = Piece(Box((tensor.at, 0), tuple(local.shape)), 0, tuple(local.shape))
            return MeshLayout((tensor.rows, columns), (piece,), tuple(local.shape), (0,), 2)

        def recorded(self, tensor: Halves) -> None:
            return None
