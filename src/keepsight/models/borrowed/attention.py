"""The attention function that transformers' modules call instead of their own; it forwards to the current step.

The current step is a context variable, set for one call on one thread, so two threads may compute at once. Invariant:
an argument that would change the result and is not passed on is refused, never ignored.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepsight.models.attention import Attention, AttentionBatch, LayerCache, View, attend_plainly, write_cache
from keepsight.models.borrowed.delta_net import DeltaNet
from keepsight.models.model import LayerWatcher

# Its name in transformers.
NAME = "keepsight"
# Keyword arguments that only describe what the modules have done already, or do themselves.
_OF_NO_EFFECT = frozenset({"position_ids", "cache_position", "position_embeddings", "use_cache"})
# User-facing names of keyword arguments.
_KNOWN_AS = {"s_aux": "attention sinks (s_aux)"}


class HeadsOfLayer(NamedTuple):
    """The inputs of a layer's attention."""

    module: nn.Module
    layer: int
    query: Tensor  # [tokens, heads, head_dim]
    key: Tensor  # [tokens, kv_heads, head_dim]
    value: Tensor  # [tokens, kv_heads, value_dim]
    scale: float
    window: int | None
    softcap: float | None


class LayerRule(NamedTuple):
    """How a layer attends to pages."""

    # Index of its keys and values among all caches; unless it writes them, an earlier layer of the same step does.
    cache: int
    writes: bool
    # Whether a picture's tokens see only what is before them.
    is_causal: bool = True


# -> [tokens, heads, value_dim]
Attend = Callable[[HeadsOfLayer], Tensor]


class RecurrentModule(NamedTuple):
    """How to compute a recurrent module."""

    module: nn.Module
    layer: int
    # (hidden states [slices, tokens, width], transformers' cache) -> [slices, tokens, width]
    compute: Callable[[Tensor, Any], Tensor]
    # None if it is no such module.
    delta_net: DeltaNet | None


# Computes one for all slices of a step: [1, tokens, width] -> [1, tokens, width]
Recur = Callable[[RecurrentModule, Tensor], Tensor]


class _Step(NamedTuple):
    attend: Attend
    watch_layer: LayerWatcher | None
    # None: recurrent modules begin with empty states and keep none.
    recur: Recur | None


_step: ContextVar[_Step] = ContextVar("step")


class UnsupportedDecoderError(Exception):
    """A decoder is not of the kind that we compute, or one of its modules requests what a step does not support."""


def register_attention() -> None:
    """Register our attention with transformers, which then creates no masks for it. May be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend_for_module)


@contextmanager
def attending(attend: Attend, watch_layer: LayerWatcher | None = None, recur: Recur | None = None) -> Iterator[None]:
    token = _step.set(_Step(attend, watch_layer, recur))
    try:
        yield
    finally:
        _step.reset(token)


def recur_now() -> Recur | None:
    """Return how the current step computes recurrent modules; None: as transformers does without a cache."""
    step = _step.get(None)
    return None if step is None else step.recur


def watch_layers(layers: Sequence[nn.Module]) -> None:
    """Add hooks that call the step's watcher after each of these layers."""

    def watch(index: int, output: Any) -> None:
        step = _step.get(None)
        if step is not None and step.watch_layer is not None:
            hidden = output if isinstance(output, Tensor) else output[0]
            step.watch_layer(index, hidden[0])

    for index, layer in enumerate(layers):
        layer.register_forward_hook(lambda _module, _inputs, output, index=index: watch(index, output))


def attend_to_pages(
    attention: Attention, caches: Sequence[LayerCache], batch: AttentionBatch, rules: Mapping[int, LayerRule]
) -> Attend:
    def attend(heads: HeadsOfLayer) -> Tensor:
        rule = rules[heads.layer]
        cache, view = caches[rule.cache], View(heads.window, rule.is_causal)
        if rule.writes:
            write_cache(heads.key, _as_wide_as_keys(heads), cache, batch.slots)
        seen = attention(heads.query, cache, batch, scale=heads.scale, view=view, softcap=heads.softcap)
        return seen[..., : heads.value.shape[-1]]

    return attend


def _as_wide_as_keys(heads: HeadsOfLayer) -> Tensor:
    """Return values padded with zeros to the width of keys, as pages store them; attention's output is padded alike."""
    narrower = heads.key.shape[-1] - heads.value.shape[-1]
    return F.pad(heads.value, (0, narrower)) if narrower else heads.value


def attend_at_once(heads: HeadsOfLayer) -> Tensor:
    """Compute the attention of a whole prompt by itself, without a cache."""
    positions = torch.arange(len(heads.query), device=heads.query.device)
    behind = positions[:, None] - positions
    mask = behind >= 0 if heads.window is None else (behind >= 0) & (behind < heads.window)
    return attend_plainly(heads.query, heads.key, heads.value, mask, heads.scale, heads.softcap)


def _attend_for_module(
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, head_dim]
    key: Tensor,  # [1, kv_heads, tokens, head_dim]
    value: Tensor,  # [1, kv_heads, tokens, value_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    if attention_mask is not None:
        raise UnsupportedDecoderError("its attention uses its own mask")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedDecoderError("its attention sees later tokens")
    for name, given in {**others, "dropout": dropout}.items():
        if not has_no_effect(name, given):
            raise UnsupportedDecoderError(f"its attention is given {_KNOWN_AS.get(name, name)}")
    heads = HeadsOfLayer(
        module=module,
        layer=_layer_of(module),
        query=_flat(query),
        key=_flat(key),
        value=_flat(value),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    # Some modules view the result as one row per token, which needs contiguous memory.
    return _step.get().attend(heads)[None].contiguous(), None


def has_no_effect(name: str, given: Any) -> bool:
    """Return whether an argument of a module changes nothing."""
    return name in _OF_NO_EFFECT or given is None or (isinstance(given, bool | int | float) and given == 0)


def _layer_of(module: nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedDecoderError("its attention does not give its layer's number")
    return layer


def _flat(heads: Tensor) -> Tensor:
    """[1, heads, tokens, head_dim] -> [tokens, heads, head_dim]"""
    return heads[0].transpose(0, 1).contiguous()
