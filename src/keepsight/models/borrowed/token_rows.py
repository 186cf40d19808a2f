"""Rows of embeddings of decoders whose layers also read the tokens themselves (Gemma 3n, the smaller Gemma 4).

Behind its embedding such a row has the token's id, in digits that are exact in any dtype.  So whatever carries rows
(caches of pictures, recorded steps) carries ids too, and knows nothing of them.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

# bfloat16 holds integers up to 256 exactly.
_BASE, _NUM_DIGITS = 256, 3


class TokenRows:
    def __init__(self, body: Any) -> None:
        """`body`: transformers' model without its head."""
        decoder = body.get_decoder()
        self._width = body.get_input_embeddings().embedding_dim
        self.have_tokens = _reads_tokens(decoder)
        self.width = self._width + _NUM_DIGITS * self.have_tokens
        self._look_up = _tokens_alone(decoder.get_per_layer_inputs) if self.have_tokens else None
        # Where a picture is, such layers read the token of padding.
        self._picture_token, self._padding = getattr(body.config, "image_token_id", None), decoder.config.pad_token_id

    def join(self, embeddings: Tensor, token_ids: Tensor) -> Tensor:
        """[tokens, hidden], [tokens] -> [tokens, width]"""
        if self._look_up is None:
            return embeddings
        if self._picture_token is not None:
            token_ids = token_ids.masked_fill(token_ids == self._picture_token, self._padding)
        digits = [token_ids // _BASE**place % _BASE for place in range(_NUM_DIGITS)]
        return torch.cat((embeddings, torch.stack(digits, dim=1).to(embeddings.dtype)), dim=1)

    def place(self, embeddings: Tensor, rows: Tensor, where: Tensor) -> None:
        """Overwrite the embeddings of the rows `where` marks, but not their ids."""
        rows[where, : self._width] = embeddings.to(rows.dtype)

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """[tokens, width] -> arguments of the body"""
        if self._look_up is None:
            return {"inputs_embeds": rows[None]}
        embeddings, digits = torch.split(rows, [self._width, _NUM_DIGITS], dim=1)
        token_ids = sum(digit.long() * _BASE**place for place, digit in enumerate(digits.unbind(1)))
        embeddings = embeddings.contiguous()[None]
        return {"inputs_embeds": embeddings, "per_layer_inputs": self._look_up(token_ids[None])}


def _tokens_alone(look_up: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function without its argument for embeddings, which some versions of transformers require."""
    has_more = "inputs_embeds" in inspect.signature(look_up).parameters
    return partial(look_up, inputs_embeds=None) if has_more else look_up


def _reads_tokens(decoder: Any) -> bool:
    """Return whether the decoder's layers read the tokens themselves, which it can be told."""
    can_be_told = "per_layer_inputs" in inspect.signature(decoder.forward).parameters
    return can_be_told and bool(decoder.config.hidden_size_per_layer_input)
