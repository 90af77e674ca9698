"""States, and tensors, that are alike but for one thing are told apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.storage.state.fingerprint import fingerprint
from holdfast.storage.state.flattening.flatten import flatten
from holdfast.storage.state.flattening.signature import SignatureScan


class One:
    """An object with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes any."""


class Other(One):
    """Another one, with the same state."""


def signature(state: Any) -> object:
    """How a state is laid out."""
    return SignatureScan(lambda: []).signature_of(state)


ZEROS = torch.zeros(8)
PAIRS = {
    "types of keys": ({1: ZEROS}, {True: ZEROS}),
    "lazy negation": ({"x": ZEROS}, {"x": torch._neg_view(ZEROS)}),
    "device": ({"x": ZEROS}, {"x": torch.empty(8, device="meta")}),
    "type of an object": ({"x": One()}, {"x": Other()}),
}


@pytest.mark.parametrize("what", PAIRS)
def test_a_signature_shows_the_difference(what: str) -> None:
    """States that differ in this alone are not taken for one another."""
    a, b = PAIRS[what]
    assert signature(a) == signature(a)
    assert signature(a) != signature(b)


def test_fingerprints_tell_of_dtype_and_shape() -> None:
    """Tensors of the same bytes are not the same tensor."""
    zeros = torch.zeros(8)
    tensors = [zeros, zeros.view(2, 4), zeros.view(torch.int32)]
    digests = {fingerprint(flatten({"x": tensor}), 0) for tensor in tensors}
    assert len(digests) == len(tensors)
