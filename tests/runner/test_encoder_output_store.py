"""Entries own their memory and are computed once."""

import pytest
import torch

from keepsight.runner.encoder_output_store import EncoderOutputStore


def test_an_entry_is_not_a_view_of_the_batch_it_came_from() -> None:
    store = EncoderOutputStore("cpu")
    batch = torch.ones(4, 3, 5)
    held = store.put("a", batch[2])
    batch.zero_()
    assert torch.equal(store.get("a"), torch.ones(3, 5))
    assert held.untyped_storage().nbytes() == 3 * 5 * 4


def test_held_entries_are_not_computed_again() -> None:
    store = EncoderOutputStore("cpu")
    first = store.get_or_put("a", lambda: torch.ones(2, 2))
    assert store.get_or_put("a", lambda: pytest.fail("computed twice")) is first
    assert len(store) == 1


def test_dropped_entries_are_absent_and_may_be_put_again() -> None:
    store = EncoderOutputStore("cpu")
    store.put("a", torch.ones(2, 2))
    store.drop("a")
    store.drop("a")
    assert "a" not in store
    with pytest.raises(AssertionError, match="no embeddings"):
        store.get("a")
    assert torch.equal(store.put("a", torch.zeros(1, 2)), torch.zeros(1, 2))
