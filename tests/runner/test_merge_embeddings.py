"""Media embeddings replace those of their tokens; wider ones are added after layers, on the device that computes."""

import torch

from keepsight.runner.gather_embeddings import MediaRows
from keepsight.runner.merge_embeddings import merge_embeddings


def test_embeddings_wider_than_a_token_s_are_split_by_layers() -> None:
    embeddings, rows = torch.zeros(6, 4), torch.arange(24.0).view(2, 12)
    [(first, deep)] = merge_embeddings(embeddings, [MediaRows(3, rows)])
    assert torch.equal(embeddings[3:5], rows[:, :4])
    assert not embeddings[[0, 1, 2, 5]].any()
    assert (first, deep.shape) == (3, (2, 2, 4))
    assert torch.equal(deep.flatten(1), rows[:, 4:])
    assert merge_embeddings(embeddings, [MediaRows(0, rows[:, :4])]) == []


def test_embeddings_kept_on_the_host_are_added_on_the_device() -> None:
    embeddings = torch.zeros(6, 4, device="meta")
    [(_, deep)] = merge_embeddings(embeddings, [MediaRows(3, torch.zeros(2, 12))])
    assert deep.device == embeddings.device
