"""Observes in which layers a picture's tokens see each other, by the masks that a prompt of two pictures gets.

Supported are layers in which they do so as in our own models (`AttentionBatch.visible`), and those in which they see
only what is before them.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keepsight.errors import CheckpointConfigError
from keepsight.media import find_runs
from keepsight.models.attention import AttentionBatch, RequestSlice, View
from keepsight.models.block_table import BlockTable
from keepsight.models.borrowed.media_tokens import find_media_token
from keepsight.models.borrowed.picture_places import mark_pictures

# Its name in transformers.
NAME = "keepsight_masks"
# Words (0) and two pictures (1).
KINDS = (0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0)

_masks: ContextVar[dict[int, Tensor | None]] = ContextVar("masks")


def find_causal_layers(model: Any, windows: Mapping[int, int | None], path: Path) -> Mapping[int, bool]:
    """Return whether the pictures' tokens see only what is before them, for each layer of transformers' model."""
    masks = _observe_masks(model)
    pictures = tuple(find_runs(KINDS, 1))
    batch = AttentionBatch([RequestSlice(0, len(KINDS), BlockTable(len(KINDS), [0]), pictures)], "cpu")
    found = {}
    for layer, window in windows.items():
        mask = masks.get(layer)
        fitting = [
            is_causal
            for is_causal in (False, True)
            if mask is not None and torch.equal(mask, _make_mask(batch, View(window, is_causal)))
        ]
        if not fitting:
            why = f"transformers' {type(model).__name__} shows tokens of pictures to each other in an unsupported way"
            raise CheckpointConfigError(path, f"architectures: {why} (layer {layer})")
        found[layer] = fitting[0]
    return found


def _make_mask(batch: AttentionBatch, view: View) -> Tensor:
    """Return whether each token [tokens, 1] sees each position [1, tokens]."""
    begin, end = batch.visible(view)
    positions = torch.arange(batch.num_tokens)
    return (positions >= begin[:, None]) & (positions < end[:, None])


def _observe_masks(model: Any) -> dict[int, Tensor | None]:
    """Return for each layer whether each token sees each position."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, _note_mask)
    AttentionMaskInterface.register(NAME, eager_mask)
    body, decoder = model.base_model, model.base_model.get_decoder()
    kinds, picture_token = torch.tensor(KINDS, device=model.device), find_media_token(model.config, "image")
    assert picture_token is not None
    used, noted = decoder.config._attn_implementation, _masks.set({})
    decoder.set_attn_implementation(NAME)
    try:
        token_ids = kinds * picture_token
        body(input_ids=token_ids[None], use_cache=False, **mark_pictures(body, kinds == 1))
        return _masks.get()
    finally:
        decoder.set_attn_implementation(used)
        _masks.reset(noted)


def _note_mask(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    if isinstance(layer := getattr(module, "layer_idx", None), int):
        _masks.get()[layer] = None if attention_mask is None else (attention_mask[0, 0] == 0).cpu()
    heads = query.shape[1] // value.shape[1]
    return value.repeat_interleave(heads, dim=1).transpose(1, 2).contiguous(), None
