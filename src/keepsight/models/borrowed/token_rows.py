"""Makes the rows that a borrowed decoder computes from: the embeddings of tokens.

In decoders whose layers also read the tokens themselves (Gemma 3n, the smaller Gemma 4) a row is wider: behind its
embedding it has the token's id, in digits that are exact in any dtype. So whatever carries rows (caches of pictures,
recorded steps) carries ids too, and knows nothing of them.
"""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keepsight.errors import CheckpointConfigError
from keepsight.models.borrowed.attention import attend_at_once, attending
from keepsight.models.borrowed.media_tokens import find_media_tokens

# bfloat16 holds integers up to 256 exactly.
_BASE, _NUM_DIGITS = 256, 3


class TokenRows:
    def __init__(self, body: Any) -> None:
        """`body`: transformers' model without its head."""
        decoder = body.get_decoder()
        self._embedding: nn.Embedding = body.get_input_embeddings()
        self.hidden_size = self._embedding.embedding_dim
        self.have_tokens = _reads_tokens(decoder)
        self.width = self.hidden_size + _NUM_DIGITS * self.have_tokens
        self._look_up = _tokens_alone(decoder.get_per_layer_inputs) if self.have_tokens else None
        self._num_read = decoder.config.vocab_size_per_layer_input if self.have_tokens else 0
        self._padding, self._read_as_padding = decoder.config.pad_token_id, _find_read_as_padding(body)

    def make(self, token_ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, width]"""
        for token_id in self._read_as_padding:
            token_ids = token_ids.masked_fill(token_ids == token_id, self._padding)
        # The picture token lies outside the embedding tables of some models.
        embeddings: Tensor = self._embedding(token_ids.clamp(max=self._embedding.num_embeddings - 1))
        if self._look_up is None:
            return embeddings
        # transformers' Gemma 3n looks these up as token 0.
        token_ids = token_ids.masked_fill(token_ids >= self._num_read, 0)
        digits = [token_ids // _BASE**place % _BASE for place in range(_NUM_DIGITS)]
        return torch.cat((embeddings, torch.stack(digits, dim=1).to(embeddings.dtype)), dim=1)

    def overwrite(self, embeddings: Tensor, rows: Tensor, where: Tensor) -> None:
        """Overwrite the embeddings of the rows that `where` marks, but not their ids."""
        rows[where, : self.hidden_size] = embeddings.to(rows.dtype)

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """[tokens, width] -> arguments of the body"""
        if self._look_up is None:
            return {"inputs_embeds": rows[None]}
        embeddings, digits = torch.split(rows, [self.hidden_size, _NUM_DIGITS], dim=1)
        token_ids = sum(digit.long() * _BASE**place for place, digit in enumerate(digits.unbind(1)))
        embeddings = embeddings.contiguous()[None]
        return {"inputs_embeds": embeddings, "per_layer_inputs": self._look_up(token_ids[None])}


def check_all_are_read(body: Any, path: Path) -> None:
    """Raise CheckpointConfigError if transformers' body (with or without weights) has tokens its layers cannot read."""
    decoder, num_tokens = body.get_decoder(), body.get_input_embeddings().num_embeddings
    if not _reads_tokens(decoder):
        return
    table, media_tokens = decoder.embed_tokens_per_layer, find_media_tokens(body.config)
    last = next(each for each in reversed(range(num_tokens)) if each not in media_tokens)

    def check(_module: nn.Module, inputs: tuple[Tensor]) -> None:
        if int(inputs[0]) >= table.num_embeddings:
            told = f"layers can read only {table.num_embeddings} of {num_tokens} tokens"
            raise CheckpointConfigError(path, f"vocab_size_per_layer_input: {told}")

    # Gemma 3n's looks up another token instead, and may have fewer.
    with table.register_forward_pre_hook(check):
        _tokens_alone(decoder.get_per_layer_inputs)(torch.tensor([[last]]))


def _find_read_as_padding(body: Any) -> tuple[int, ...]:
    """Return the tokens of media that the body computes as padding where no media are (Gemma 4's does so)."""
    padding, table = body.get_decoder().config.pad_token_id, body.get_input_embeddings()
    known = sorted(each for each in find_media_tokens(body.config) if 0 <= each < table.num_embeddings)
    if padding is None or not 0 <= padding < table.num_embeddings or not known:
        return ()
    seen: list[Tensor] = []
    with table.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].flatten())):
        token_ids = torch.tensor([known], device=table.weight.device)
        positions = torch.arange(len(known), device=table.weight.device)[None]
        with attending(attend_at_once):
            body(input_ids=token_ids, position_ids=positions, use_cache=False)
    looked_up = next((each.tolist() for each in seen if len(each) == len(known)), known)
    return tuple(token_id for token_id, found in zip(known, looked_up, strict=True) if found == padding != token_id)


def _tokens_alone(look_up: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function without its argument for embeddings, which some versions of transformers require."""
    has_more = "inputs_embeds" in inspect.signature(look_up).parameters
    return partial(look_up, inputs_embeds=None) if has_more else look_up


def _reads_tokens(decoder: Any) -> bool:
    """Return whether the decoder's layers read the tokens themselves, which it can be told."""
    can_be_told = "per_layer_inputs" in inspect.signature(decoder.forward).parameters
    return can_be_told and bool(decoder.config.hidden_size_per_layer_input)
