"""The fuzzers' targets, by hypothesis. ``make fuzz`` runs them with atheris, which watches code
coverage."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import tried
from support.fuzzed import TARGETS, seeds


@pytest.mark.nightly(3)
@pytest.mark.parametrize("target", TARGETS)
def test_any_bytes_are_refused_or_used(target: str) -> None:
    """Inputs are random bytes, and bytes that are a few steps from valid ones."""
    known = seeds(target)

    @settings(max_examples=tried(300))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        if data.draw(st.booleans()):
            TARGETS[target](data.draw(st.binary(max_size=64)))
            return
        whole = bytearray(data.draw(st.sampled_from(known)))
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, max(0, len(whole) - 1)))
            whole[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        TARGETS[target](bytes(whole))

    run()


@pytest.mark.parametrize("target", TARGETS)
def test_what_the_fuzzers_begin_with_is_used(target: str) -> None:
    """Each target uses some of it. Otherwise fuzzers would have a long way to go."""
    assert any(TARGETS[target](seed) for seed in seeds(target))


FOUND = [("uri", b's://s://"?.=s/b1///://"?./b1/b?\x97\x91t=htx:i:\n//@1po=')]


@pytest.mark.parametrize(("target", "data"), FOUND)
def test_what_a_fuzzer_has_found_stays_mended(target: str, data: bytes) -> None:
    """These inputs once made a target fail."""
    TARGETS[target](data)
