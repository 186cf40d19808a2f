"""Observes a decoder's shape from the inputs of its attention: which layers attend, the number and size of heads.

A run over two tokens is enough.  A decoder of an unsupported kind is refused here by what it does, not by its name.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from keepsight.errors import CheckpointConfigError
from keepsight.models.borrowed.attention import HeadsOfLayer, LayerRule, attend_at_once, attending
from keepsight.models.borrowed.picture_masks import find_causal_layers
from keepsight.models.borrowed.picture_places import arguments_of_kinds, uses_mrope
from keepsight.models.layers import Placement
from keepsight.models.model import KvHeads

_NUM_TOKENS = 2


class DecoderShape(NamedTuple):
    kv_heads: tuple[KvHeads, ...]
    # One for each layer, like the others below.
    rules: tuple[LayerRule, ...]
    windows: tuple[int | None, ...]
    layers: tuple[nn.Module, ...]
    # None: unlimited.
    max_positions: int | None


def observe_shape(model: Any, place: Placement, path: Path) -> DecoderShape:
    """Return the shape of transformers' model, whose decoder must call our attention."""
    seen: list[HeadsOfLayer] = []

    def attend(heads: HeadsOfLayer) -> Tensor:
        seen.append(heads)
        return attend_at_once(heads)

    config = model.config.get_text_config(decoder=True)
    token_ids = torch.arange(_NUM_TOKENS, device=place.device)[None]
    try:
        with attending(attend):
            model.base_model(input_ids=token_ids, position_ids=token_ids, use_cache=False)
    except TypeError as error:
        if config.pad_token_id is not None:
            raise
        told = f"pad_token_id: is null, with which transformers' {type(model).__name__} may not compute"
        raise CheckpointConfigError(path, f"{told} ({str(error).splitlines()[0]})") from error
    _check_layers([heads.layer for heads in seen], config.num_hidden_layers, path)
    for key, value in {(heads.key.shape[1:], heads.value.shape[1:]) for heads in seen}:
        if key[0] != value[0] or key[1] < value[1]:
            told = f"its keys have the shape {list(key)}, its values {list(value)}"
            raise _refuse(path, f"{told}: there must be as many of both, and values no wider than keys")
    seen.sort(key=lambda heads: heads.layer)
    # The tensors are all still held, so two at one address are the same.
    addresses = [(heads.key.data_ptr(), heads.value.data_ptr()) for heads in seen]
    stored = {address: KvHeads(*heads.key.shape[1:]) for address, heads in zip(addresses, seen, strict=True)}
    windows = tuple(heads.window for heads in seen)
    _check_windows(windows, config, path)
    layers = _layers_around([heads.module for heads in seen], model.base_model)
    are_causal = _find_causal_layers(model, windows, path)
    caches = list(map(list(stored).index, addresses))
    rules = tuple(map(LayerRule, caches, _are_first(caches), are_causal))
    return DecoderShape(tuple(stored.values()), rules, windows, layers, count_positions(config))


def _find_causal_layers(model: Any, windows: tuple[int | None, ...], path: Path) -> tuple[bool, ...]:
    body = model.base_model
    # Bodies that rotate pictures by row and column take the kinds of tokens for that reason.
    may_see_pictures_whole = hasattr(body, "get_image_features") and arguments_of_kinds(body) and not uses_mrope(body)
    return find_causal_layers(model, windows, path) if may_see_pictures_whole else (True,) * len(windows)


def _are_first(caches: list[int]) -> list[bool]:
    return [cache not in caches[:layer] for layer, cache in enumerate(caches)]


def count_positions(config: Any) -> int | None:
    """Return the number of positions that may be used; None if unlimited.

    A request beyond them would change the rotation of all others in its batch ("dynamic", "longrope").  The engine's
    context ends there (`ModelLimits`), so none goes beyond.
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    # One for all layers, or one per layer type.
    each = (ropes, *(rope for rope in ropes.values() if isinstance(rope, dict)))
    ends = [rope["original_max_position_embeddings"] for rope in each if rope.get("rope_type") == "longrope"]
    longest = getattr(config, "max_position_embeddings", None)
    return min(ends if longest is None else [*ends, longest], default=None)


def _layers_around(attentions: list[nn.Module], body: nn.Module) -> tuple[nn.Module, ...]:
    """Return the layers that contain these attentions: a layer's path ends with the first number in the module path."""
    ways = {module: name for name, module in body.named_modules()}
    return tuple(body.get_submodule(re.sub(r"(\.\d+)\..*", r"\1", ways[each])) for each in attentions)


def _check_layers(layers: list[int], num_layers: int, path: Path) -> None:
    if sorted(layers) != list(range(num_layers)):
        raise _refuse(path, f"of its {num_layers} layers, {layers} attend: each must attend once")


def _check_windows(windows: tuple[int | None, ...], config: Any, path: Path) -> None:
    """Check the windows against the configuration, as the prompts of `prove` may be too short to reach them.

    A window as wide as the context hides nothing and needs no check.
    """
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * len(windows)
    window, end = getattr(config, "sliding_window", None), count_positions(config)
    for layer, (given, layer_type) in enumerate(zip(windows, types, strict=True)):
        expected = window if layer_type == "sliding_attention" else None
        leaves_out = [each is not None and (end is None or each < end) for each in (given, expected)]
        if given != expected and any(leaves_out):
            raise _refuse(
                path, f"layer {layer} sees {given or 'all'} positions, a {layer_type} of {window} was expected"
            )


def _refuse(path: Path, why: str) -> CheckpointConfigError:
    return CheckpointConfigError(path, f"this kind of decoder is not supported: {why}")
