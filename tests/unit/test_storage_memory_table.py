"""Where tensors lie in memory, asked of all at once."""

from __future__ import annotations

import torch

from holdfast.storage.state.filling.memory_table import MemoryTable


def test_rows_are_what_each_tensor_says_of_itself() -> None:
    """Address, size, dtype and order of elements, in the order of the tensors."""
    whole = torch.arange(12, dtype=torch.float32).view(3, 4)
    tensors = [whole, whole.t(), whole[1], torch.empty(0), torch.ones(2, dtype=torch.int8)]
    table = MemoryTable.of(tensors)
    assert table.address.tolist() == [tensor.data_ptr() for tensor in tensors]
    assert table.nbytes.tolist() == [48, 48, 16, 0, 2]
    assert table.dtype_id.tolist() == [id(tensor.dtype) for tensor in tensors]
    assert table.is_contiguous.tolist() == [True, False, True, True, True]
    assert table.on_host.all()


def test_only_bits_in_row_major_order_on_the_host_are_as_stored() -> None:
    """Transposed tensors, lazy conjugates and negations, and tensors elsewhere have to be copied
    element by element."""
    numbers = torch.ones(2, 2, dtype=torch.complex64)
    tensors = [
        numbers,
        numbers.t(),
        numbers.conj(),
        numbers.conj().imag,
        torch.ones(2, device="meta"),
    ]
    assert tensors[3].is_neg()
    table = MemoryTable.of(tensors)
    assert table.as_stored.tolist() == [True, False, False, False, False]
    assert table.on_host.tolist() == [True, True, True, True, False]


def test_a_state_without_tensors_has_no_rows() -> None:
    """There is nothing to ask."""
    table = MemoryTable.of([])
    assert table.address.shape == table.as_stored.shape == (0,)
