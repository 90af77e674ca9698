"""Parameter groups: hyperparameters go by the names of parameters, in whatever order groups are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bits import fresh_uri, saved
from torch import nn

import holdfast


class Net(nn.Module):
    """Three layers, of two parameters each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)


Groups = list[tuple[list[str], dict[str, Any]]]
DECAY: Groups = [
    (["a.weight", "b.weight"], {"lr": 1.0, "weight_decay": 0.1}),
    (["a.bias", "b.bias"], {"lr": 2.0}),
]
REST: Groups = [(["c.weight", "c.bias"], {"lr": 3.0, "betas": (0.5, 0.6)})]


def grouped(
    groups: Groups, net: nn.Module | None = None, *, named: bool = False
) -> tuple[nn.Module, torch.optim.AdamW]:
    """Return a module, and an optimizer whose groups have these parameters and hyperparameters."""
    net = net or Net()
    of = dict(net.named_parameters())
    made = [
        {"params": [(n, of[n]) if named else of[n] for n in names], **hyperparameters}
        for names, hyperparameters in groups
    ]
    return net, torch.optim.AdamW(made, lr=9.0, weight_decay=0.0)


def hyperparameters(net: nn.Module, optim: torch.optim.Optimizer) -> dict[str, tuple[Any, ...]]:
    """Return learning rate, weight decay, betas and first moment of each parameter."""
    name = {p: n for n, p in net.named_parameters()}
    return {
        name[p]: (g["lr"], g["weight_decay"], g["betas"], optim.state[p]["exp_avg"].tolist())
        for g in optim.param_groups
        for p in g["params"]
    }


def trained(groups: Groups, **how: Any) -> tuple[nn.Module, torch.optim.AdamW]:
    """Return a module and its optimizer after a step."""
    net, optim = grouped(groups, **how)
    for i, p in enumerate(net.parameters()):
        p.grad = torch.full_like(p, float(i + 1))
    optim.step()
    return net, optim


def stored(groups: Groups, **how: Any) -> tuple[nn.Module, torch.optim.AdamW, str]:
    """Return a trained module, its optimizer, and the URI of their checkpoint."""
    net, optim = trained(groups, **how)
    uri = saved({"net": net, "optim": optim})
    return net, optim, uri


def loaded(
    uri: str, groups: Groups, *, named: bool = False, **options: Any
) -> tuple[nn.Module, torch.optim.AdamW]:
    """Load into a new module and an optimizer with these groups; return them."""
    net, optim = grouped(groups, named=named)
    holdfast.load(uri, into={"net": net, "optim": optim}, **options)
    return net, optim


def split(groups: Groups) -> Groups:
    """Split groups into groups of one parameter, the last first, with other hyperparameters."""
    return [([name], {"lr": 7.0}) for names, _ in groups[::-1] for name in names[::-1]]


@pytest.mark.parametrize(
    "arranged",
    [
        pytest.param(
            lambda groups: [(names, {"lr": 7.0}) for names, _ in groups], id="as they were"
        ),
        pytest.param(lambda groups: groups[::-1], id="the other way round"),
        pytest.param(
            lambda groups: [(names[::-1], h) for names, h in groups],
            id="their parameters the other way round",
        ),
        pytest.param(split, id="split"),
        pytest.param(lambda groups: [([], {"lr": 8.0}), *groups[::-1]], id="with an empty one"),
    ],
)
def test_hyperparameters_are_given_back_by_the_names_of_parameters(
    arranged: Callable[[Groups], Groups],
) -> None:
    """However groups are ordered or split, each parameter keeps its hyperparameters."""
    net, optim, uri = stored(DECAY + REST)
    other, into = loaded(uri, arranged(copy.deepcopy(DECAY + REST)))
    assert hyperparameters(other, into) == hyperparameters(net, optim)


def test_groups_that_agree_may_be_joined() -> None:
    """Equal groups may be merged; groups that differ are an error that says in what."""
    alike: Groups = [(["a.weight"], {"lr": 1.0}), (["a.bias"], {"lr": 1.0})]
    net, optim, uri = stored(alike)
    other, into = loaded(uri, [(["a.bias", "a.weight"], {})])
    assert hyperparameters(other, into) == hyperparameters(net, optim)
    net, optim, uri = stored(DECAY)
    other, into = grouped([(["a.bias", "a.weight", "b.bias", "b.weight"], {})])
    before = hyperparameters_alone(into)
    for strict in (True, False):
        with pytest.raises(
            holdfast.MismatchError, match="which differ in lr, weight_decay"
        ) as caught:
            holdfast.load(uri, into={"net": other, "optim": into}, strict=strict)
        assert 'state["optim"]: parameter group 0 has parameters of groups' in str(caught.value)
    assert hyperparameters_alone(into) == before


def hyperparameters_alone(optim: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups without their parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optim.param_groups]


def test_a_group_that_is_not_stored_is_said_and_keeps_what_it_has() -> None:
    """An unknown parameter is an error, or its group stays as it is."""
    _, _, uri = stored(DECAY)
    other, into = grouped(REST + DECAY[::-1])
    with pytest.raises(
        holdfast.MismatchError,
        match=r"group 0: no group of the checkpoint has .*'c\.weight', 'c\.bias'",
    ):
        holdfast.load(uri, into={"net": other, "optim": into})
    holdfast.load(uri, into={"net": other, "optim": into}, strict=False)
    assert [group["lr"] for group in into.param_groups] == [3.0, 2.0, 1.0]
    assert into.param_groups[0]["betas"] == (0.5, 0.6)
    other, into = grouped([DECAY[0], REST[0]])  # as many groups as are stored
    holdfast.load(uri, into={"net": other, "optim": into}, strict=False)
    assert [group["lr"] for group in into.param_groups] == [1.0, 3.0]


def test_empty_groups_have_their_hyperparameters_back() -> None:
    """They are matched by position if the other groups are in place, or else by order."""
    net, optim, uri = stored([([], {"lr": 5.0}), *DECAY, ([], {"lr": 6.0})])
    for groups in ([([], {}), *DECAY, ([], {})], [*DECAY[::-1], ([], {}), ([], {})]):
        other, into = loaded(uri, groups)
        assert hyperparameters(other, into) == hyperparameters(net, optim)
        assert [group["lr"] for group in into.param_groups if not group["params"]] == [5.0, 6.0]


def test_keys_of_the_users_own_and_of_schedulers_are_taken_over() -> None:
    """They do not make it an optimizer of another kind."""
    net, optim = trained([(names, h | {"name": str(h["lr"])}) for names, h in DECAY])
    torch.optim.lr_scheduler.OneCycleLR(optim, 0.1, 10)
    uri = saved({"net": net, "optim": optim})
    other, into = grouped(DECAY[::-1])
    into.defaults["of a later release"] = True
    with pytest.raises(
        holdfast.MismatchError, match=r"it has name, and AdamW has of a later release"
    ):
        holdfast.load(uri, into={"net": other, "optim": into})
    del into.defaults["of a later release"]
    holdfast.load(uri, into={"net": other, "optim": into})
    assert [(group["name"], "max_lr" in group) for group in into.param_groups] == [
        ("2.0", True),
        ("1.0", True),
    ]


def test_names_that_torch_has_given_stay_those_of_the_job_that_loads() -> None:
    """``param_names`` of a group match its parameters, in their order."""
    net, optim, uri = stored(DECAY, named=True)
    other, into = grouped([(names[::-1], h) for names, h in DECAY[::-1]], named=True)
    names = [group["param_names"] for group in into.param_groups]
    holdfast.load(uri, into={"net": other, "optim": into})
    assert [group["param_names"] for group in into.param_groups] == names
    assert hyperparameters(other, into) == hyperparameters(net, optim)


def test_without_a_module_names_of_torch_tell_parameters_apart() -> None:
    """A state by number is given back by ``param_names`` where both optimizers have them."""
    net, optim = trained(DECAY, named=True)
    uri = saved({"optim": optim})
    other, into = grouped([(names[::-1], {}) for names, _ in DECAY[::-1]], named=True)
    holdfast.load(uri, into={"optim": into})
    assert hyperparameters(other, into) == hyperparameters(net, optim)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            [*DECAY[:1], (["a.bias"], {}), (["b.bias"], {})],
            r"in groups of \[2, 2\]; the optimizer's groups have \[2, 1, 1\]",
        ),
        (
            [(["a.weight"], {}), (["b.weight", "a.bias", "b.bias"], {})],
            r"in groups of \[2, 2\]; .* have \[1, 3\]",
        ),
    ],
)
def test_a_state_by_number_wants_the_same_groups(groups: Groups, said: str) -> None:
    """Numbers alone do not say which parameter is which."""
    _, optim = trained(DECAY)
    uri = saved({"optim": optim})
    _, into = grouped(groups)
    with pytest.raises(holdfast.MismatchError, match=said):
        holdfast.load(uri, into={"optim": into})


def test_a_module_on_one_side_only_is_said() -> None:
    """A state by name does not fit an optimizer whose module is not there, nor the other way round."""
    net, optim = trained(DECAY)
    named, numbered = fresh_uri(), fresh_uri()
    holdfast.save(named, {"net": net, "optim": optim})
    holdfast.save(numbered, {"optim": optim})
    other, into = grouped(DECAY)
    with pytest.raises(holdfast.MismatchError, match="put the module into the state too"):
        holdfast.load(named, into={"optim": into}, strict=True)
    with pytest.raises(holdfast.MismatchError, match="stored by number, without their module"):
        holdfast.load(numbered, into={"net": other, "optim": into}, strict=True)


def test_tied_parameters_are_found_by_any_of_their_names() -> None:
    """Modules that register them in another order give them another first name."""

    class Tied(nn.Module):
        def __init__(self, names: tuple[str, str]) -> None:
            super().__init__()
            shared = nn.Parameter(torch.ones(2, 2))
            for name in names:
                self.register_parameter(name, shared)

    nets = [Tied(("x", "y")), Tied(("y", "x"))]
    optim, into = [
        torch.optim.SGD(net.parameters(), lr, momentum=0.9)
        for net, lr in zip(nets, (0.1, 0.2), strict=True)
    ]
    optim.state[nets[0].x]["momentum_buffer"] = torch.full((2, 2), 4.0)
    uri = saved({"net": nets[0], "optim": optim})
    holdfast.load(uri, into={"net": nets[1], "optim": into})
    assert into.param_groups[0]["lr"] == 0.1
    assert torch.equal(into.state[nets[1].x]["momentum_buffer"], torch.full((2, 2), 4.0))


def test_another_kind_of_optimizer_is_said() -> None:
    """A checkpoint of AdamW does not fit SGD; the error lists the hyperparameters of both."""
    _, _, uri = stored(DECAY)
    other = Net()
    into = torch.optim.SGD(
        [p for n, p in other.named_parameters() if n[0] != "c"], 0.1, momentum=0.9
    )
    with pytest.raises(
        holdfast.MismatchError,
        match=r"another kind of optimizer: it has .*betas.*and SGD has .*momentum",
    ):
        holdfast.load(uri, into={"net": other, "optim": into})


def test_a_learning_rate_that_is_a_tensor_follows_its_group() -> None:
    """This also holds if groups are in another order."""
    rates: Groups = [
        (names, {"lr": torch.tensor(float(i + 1))}) for i, (names, _) in enumerate(DECAY + REST)
    ]
    net, optim = grouped(rates)
    uri = saved({"net": net, "optim": optim})
    _, into = loaded(uri, [(names, {"lr": torch.tensor(0.0)}) for names, _ in rates[::-1]])
    assert [group["lr"].item() for group in into.param_groups] == [3.0, 2.0, 1.0]


def test_a_stored_parameter_that_the_optimizer_has_not_is_not_read() -> None:
    """Its state has no place. That is an error in strict mode; otherwise it is ignored."""
    net, optim, uri = stored(DECAY)
    other, into = grouped([(["a.weight"], {}), (["a.bias"], {})])
    with pytest.raises(
        holdfast.MismatchError,
        match=r"tensor 'optim\.state\.b\.weight\.exp_avg' of the checkpoint: the state has no place",
    ):
        holdfast.load(uri, into={"net": other, "optim": into})
    reports: list[holdfast.LoadReport] = []
    holdfast.load(uri, into={"net": other, "optim": into}, strict="state", on_report=reports.append)
    assert reports[0].bytes_wanted == 4 * (18 + 2 * 6 + 2)
    assert hyperparameters(other, into) == {
        k: v for k, v in hyperparameters(net, optim).items() if k[0] == "a"
    }
