"""Slow tests run in random shares that can be repeated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.nightly import share

COSTS_S = st.dictionaries(st.text(max_size=3), st.floats(0.1, 100))


@given(COSTS_S, st.floats(0, 1000), st.integers(0, 9))
def test_share_fits_the_budget_but_for_its_last_test(
    costs_s: dict[str, float], budget_s: float, seed: int
) -> None:
    """It ends once the budget is used up, and takes all tests if they fit into it."""
    chosen = share(costs_s, budget_s, seed)
    spent_s = sum(costs_s[name] for name in chosen)
    if chosen == set(costs_s):
        assert spent_s - max(costs_s.values(), default=0.0) <= budget_s + 1e-9
    else:
        assert budget_s <= spent_s < budget_s + 100
    assert chosen == share(dict(reversed(costs_s.items())), budget_s, seed)
