"""Stored embeddings equal the encoded ones bit for bit."""

from dataclasses import replace

import pytest
import torch

from keepsight.runner.stored_tensors import from_stored, to_stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embeddings_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    embeddings = torch.randn(5, 7).to(dtype)
    stored = to_stored(embeddings, 0.5)
    assert stored.is_whole
    assert (stored.shape, stored.seconds) == ((5, 7), 0.5)
    back = from_stored(stored)
    assert back.dtype == dtype
    assert torch.equal(back, embeddings)


def test_on_a_cpu_arrays_and_tensors_share_memory() -> None:
    embeddings = torch.randn(5, 7)
    assert from_stored(to_stored(embeddings, 0)).data_ptr() == embeddings.data_ptr()


def test_a_part_of_a_batch_is_kept_alone() -> None:
    batch = torch.randn(3, 5, 7)
    assert to_stored(batch[:, 2], 0).num_bytes == 3 * 7 * 4
    assert torch.equal(from_stored(to_stored(batch[:, 2], 0)), batch[:, 2])


@pytest.mark.filterwarnings("error")
def test_read_only_memory_causes_no_warning() -> None:
    """Torch warns once per process: a warning here would hide a later one that matters."""
    stored = to_stored(torch.randn(5, 7), 0)
    read_only = replace(stored, payload=memoryview(bytes(stored.payload)))
    torch.set_warn_always(True)
    try:
        assert torch.equal(from_stored(read_only), from_stored(stored))
    finally:
        torch.set_warn_always(False)
