"""Observes a decoder's shape: which layers attend, the number and size of heads, and what recurrent layers keep.

Runs over two tokens are enough. A decoder of an unsupported kind is refused here by what it does, not by its name.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from keepsight.errors import CheckpointConfigError
from keepsight.models.borrowed.attention import (
    HeadsOfLayer,
    LayerRule,
    RecurrentModule,
    UnsupportedDecoderError,
    attend_at_once,
    attending,
)
from keepsight.models.borrowed.check_config import ALONE_TYPES
from keepsight.models.borrowed.picture_masks import find_causal_layers
from keepsight.models.borrowed.picture_places import arguments_of_kinds, uses_mrope
from keepsight.models.borrowed.recurrence import StateName, StateProbe, unwrap, wrap_recurrent
from keepsight.models.layers import Placement
from keepsight.models.model import KvHeads, StateShape

_NUM_TOKENS = 2


class DecoderShape(NamedTuple):
    kv_heads: tuple[KvHeads, ...]
    # Of each layer that attends.
    rules: Mapping[int, LayerRule]
    windows: Mapping[int, int | None]
    # What recurrent layers keep.
    states: Mapping[StateName, StateShape]
    # The modules that keep them.
    recurrent: tuple[RecurrentModule, ...]
    layers: tuple[nn.Module, ...]
    # None: unlimited.
    max_positions: int | None


def observe_shape(model: Any, place: Placement, path: Path) -> DecoderShape:
    """Return the shape of transformers' model, whose decoder must call our attention.

    Raises UnsupportedDecoderError, and CheckpointConfigError where a field of the configuration is at fault.
    """
    config, body = model.config.get_text_config(decoder=True), model.base_model
    compute = partial(_compute_tokens, model, place, path)
    seen = _observe_attention(compute)
    recurrent = wrap_recurrent(body.get_decoder(), {heads.module for heads in seen})
    states = _observe_states(compute, recurrent) if recurrent else {}
    layers = _layers_around([*(heads.module for heads in seen), *(each.module for each in recurrent)], body)
    recurrent = [each for each in recurrent if each.layer in {name.layer for name in states}]
    _check_layers([heads.layer for heads in seen], {name.layer for name in states}, config)
    _check_heads(seen)
    # The tensors are all still held, so two at one address are the same.
    addresses = [(heads.key.data_ptr(), heads.value.data_ptr()) for heads in seen]
    stored = {address: KvHeads(*heads.key.shape[1:]) for address, heads in zip(addresses, seen, strict=True)}
    windows = {heads.layer: heads.window for heads in seen}
    _check_windows(windows, config)
    are_causal = _find_causal_layers(model, windows, path)
    caches = list(map(list(stored).index, addresses))
    are_first = [cache not in caches[:layer] for layer, cache in enumerate(caches)]
    rules = dict(zip(windows, map(LayerRule, caches, are_first, are_causal.values()), strict=True))
    return DecoderShape(
        tuple(stored.values()), rules, windows, states, tuple(recurrent), layers, count_positions(config)
    )


def _compute_tokens(model: Any, place: Placement, path: Path) -> None:
    token_ids = torch.arange(_NUM_TOKENS, device=place.device)[None]
    try:
        model.base_model(input_ids=token_ids, position_ids=token_ids, use_cache=False)
    except TypeError as error:
        if model.config.get_text_config(decoder=True).pad_token_id is not None:
            raise
        reason = f"pad_token_id: is null, with which transformers' {type(model).__name__} may not compute"
        raise CheckpointConfigError(path, f"{reason} ({str(error).splitlines()[0]})") from error


def _observe_attention(compute: Callable[[], None]) -> list[HeadsOfLayer]:
    """Return the inputs of the attention of each layer that attends, in order."""
    seen: list[HeadsOfLayer] = []

    def attend(heads: HeadsOfLayer) -> Tensor:
        seen.append(heads)
        return attend_at_once(heads)

    with attending(attend):
        compute()
    return sorted(seen, key=lambda heads: heads.layer)


def _observe_states(compute: Callable[[], None], modules: Iterable[RecurrentModule]) -> dict[StateName, StateShape]:
    """Return the states of these modules; unwrap those that have none."""
    probe = StateProbe()
    with attending(attend_at_once, recur=probe.recur):
        compute()
    layers = {name.layer for name in probe.shapes}
    for module in modules:
        if module.layer not in layers:
            unwrap(module)
    return dict(sorted(probe.shapes.items()))


def _check_heads(seen: Iterable[HeadsOfLayer]) -> None:
    for key, value in {(heads.key.shape[1:], heads.value.shape[1:]) for heads in seen}:
        if key[0] != value[0] or key[1] < value[1]:
            shapes = f"its keys have the shape {list(key)}, its values {list(value)}"
            raise UnsupportedDecoderError(f"{shapes}: there must be as many of both, and values no wider than keys")


def _find_causal_layers(model: Any, windows: Mapping[int, int | None], path: Path) -> Mapping[int, bool]:
    body = model.base_model
    # Bodies that rotate pictures by row and column take the kinds of tokens for that reason.
    may_see_pictures_whole = hasattr(body, "get_image_features") and arguments_of_kinds(body) and not uses_mrope(body)
    return find_causal_layers(model, windows, path) if may_see_pictures_whole else dict.fromkeys(windows, True)


def count_positions(config: Any) -> int | None:
    """Return the number of positions that may be used; None if unlimited.

    A request beyond them would change the rotation of all others in its batch ("dynamic", "longrope"). The engine's
    context ends there (`ModelLimits`), so none goes beyond.
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    # One for all layers, or one per layer type.
    each = (ropes, *(rope for rope in ropes.values() if isinstance(rope, dict)))
    ends = [rope["original_max_position_embeddings"] for rope in each if rope.get("rope_type") == "longrope"]
    longest = getattr(config, "max_position_embeddings", None)
    return min(ends if longest is None else [*ends, longest], default=None)


def _layers_around(modules: Iterable[Any], body: nn.Module) -> tuple[nn.Module, ...]:
    """Return the layers that contain these modules: a layer's path ends with the first number in the module path."""
    paths = {module: name for name, module in body.named_modules()}
    by_number = {module.layer_idx: re.sub(r"(\.\d+)\..*", r"\1", paths[module]) for module in modules}
    return tuple(body.get_submodule(layer) for _, layer in sorted(by_number.items()))


def _check_layers(attending: list[int], recurrent: Set[int], config: Any) -> None:
    types = getattr(config, "layer_types", None) or ()
    alone = {layer for layer, layer_type in enumerate(types) if layer_type in ALONE_TYPES}
    is_complete = {*attending, *recurrent, *alone} == set(range(config.num_hidden_layers))
    if not (attending and is_complete and len(set(attending)) == len(attending)):
        others = f" and {sorted(recurrent)} are recurrent" if recurrent else ""
        why = "each must attend once or be recurrent, and one must attend" if others else "each must attend once"
        raise UnsupportedDecoderError(f"of its {config.num_hidden_layers} layers, {attending} attend{others}: {why}")


def _check_windows(windows: Mapping[int, int | None], config: Any) -> None:
    """Check the windows against the configuration, as the prompts of `prove` may be too short to reach them.

    A window as wide as the context hides nothing and needs no check.
    """
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    window, end = getattr(config, "sliding_window", None), count_positions(config)
    for layer, given in windows.items():
        layer_type = types[layer]
        expected = window if layer_type == "sliding_attention" else None
        leaves_out = [each is not None and (end is None or each < end) for each in (given, expected)]
        if given != expected and any(leaves_out):
            seen = f"layer {layer} sees {given or 'all'} positions"
            raise UnsupportedDecoderError(f"{seen}, a {layer_type} of {window} was expected")
