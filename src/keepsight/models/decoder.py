"""A decoder: computes hidden states from embeddings, for the flattened tokens of all requests of a step.

Knows positions and pages only through `AttentionBatch`, which decides which tokens see which.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from keepsight.made_once import made_once
from keepsight.models import cpu_kernels
from keepsight.models.adapter_weights import Adaptation
from keepsight.models.attention import Attention, AttentionBatch, LayerCache, View, write_cache
from keepsight.models.cpu_decoder import CpuDecoder, LayerWeights
from keepsight.models.cpu_kernels import fits_tiles, takes_kernels
from keepsight.models.decoder_config import DecoderConfig, LayerConfig, RotaryConfig
from keepsight.models.feed_forward import GatedFeedForward
from keepsight.models.gpu_library import kernels_for
from keepsight.models.layers import (
    Angles,
    Linear,
    Placement,
    RMSNorm,
    Row,
    WeightSlot,
    add_and_norm,
    empty_parameter,
    rms_norm,
    rotate,
    scale_by,
    slot,
    under,
)
from keepsight.models.mixture import Mixture
from keepsight.models.model import DeepRows, LayerWatcher
from keepsight.models.paged_attention import PagedAttention, sight_of


class RotaryTable:
    """The rotary frequencies of all bases: Gemma has two bases, one for each kind of layer."""

    def __init__(self, configs: Iterable[RotaryConfig], head_dim: int, place: Placement) -> None:
        self.configs = tuple(dict.fromkeys(configs))
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=place.device) / head_dim
        frequencies = [1.0 / config.theta**exponents / config.scaling_factor for config in self.configs]
        self.frequencies = torch.stack(frequencies)  # [bases, half of head_dim]
        # Indices of a head's elements rotated by the token's row, and by its column; None: pictures have no rows.
        [shares] = {config.by_row_and_column for config in self.configs}
        half = head_dim // 2
        self._rotated_by = None if shares is None else [_rotated_elements(each, half, place.device) for each in shares]
        self.dtype = place.dtype

    def angles(self, positions: Tensor) -> dict[RotaryConfig, Angles]:
        """Return the angles of every base, computed together: a step has too few tokens for one call per base."""
        cos, sin = self.of_every_base(positions)
        return dict(zip(self.configs, zip(cos.unbind(), sin.unbind(), strict=True), strict=True))

    def of_every_base(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [bases, tokens, 1, head_dim].

        `positions`: [tokens], or [3, tokens] if tokens have a time, a row and a column.
        """
        if positions.dim() == 1:
            return self._angles_of(positions)
        assert self._rotated_by is not None, "pictures have no rows for this decoder"
        (cos, sin), *others = map(self._angles_of, positions)
        for which, (its_cos, its_sin) in zip(self._rotated_by, others, strict=True):
            cos[..., which], sin[..., which] = its_cos[..., which], its_sin[..., which]
        return cos, sin

    def _angles_of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if takes_kernels(self.frequencies) and self.dtype is torch.float32:
            return cpu_kernels.angles(positions, self.frequencies)
        angles = positions[:, None, None].float() * self.frequencies[:, None, None]
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _rotated_elements(frequencies: range, half: int, device: torch.device) -> Tensor:
    """Return the indices of the elements of a head that these frequencies rotate: each rotates a pair."""
    first_halves = torch.tensor(frequencies, dtype=torch.int64, device=device)
    return torch.cat((first_halves, first_halves + half))


class LayerStep(NamedTuple):
    """The inputs of a layer other than hidden states."""

    angles: Angles
    attention: Attention
    cache: LayerCache
    batch: AttentionBatch
    # In the last layer: indices of the tokens whose output is read; None: all tokens.
    rows: Tensor | None
    # For all tokens, and for those that are read.
    adaptation: Adaptation
    adaptation_of_read: Adaptation


class SelfAttention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: LayerConfig, place: Placement) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        dim = config.head_dim
        outputs = {
            "q_proj": config.num_heads * dim,
            "k_proj": config.num_kv_heads * dim,
            "v_proj": config.num_kv_heads * dim,
        }
        self.qkv = Linear(place, config.hidden_size, outputs, bias=config.qkv_bias)
        self.out = Linear(place, config.num_heads * dim, {"o_proj": config.hidden_size}, bias=config.out_bias)
        exact = Placement(place.device, torch.float32)
        self.query_scale = empty_parameter(exact, dim) if config.norms_heads else None
        self.key_scale = empty_parameter(exact, dim) if config.norms_heads else None

    def forward(self, hidden: Tensor, step: LayerStep) -> Tensor:
        """Return the input of `out` for the tokens that are read."""
        config, batch = self.config, step.batch
        query = self._place_heads(step.adaptation.multiply("qkv", self.qkv, hidden), step)
        if step.rows is not None:
            query, batch = query[step.rows], batch.read_part
        output = step.attention(
            query,
            step.cache,
            batch,
            scale=config.attention_scale,
            view=View(self.layer.window),
            softcap=config.attention_softcap,
        )
        return output.flatten(1)

    def _place_heads(self, projected: Tensor, step: LayerStep) -> Tensor:
        """Return the queries, having written keys and values to the cache."""
        config = self.config
        heads = projected.view(step.batch.num_tokens, -1, config.head_dim)
        if kernels := kernels_for(heads.device):
            tensors = (*step.angles, step.cache.keys, step.cache.values, step.batch.slots)
            return kernels.place_heads(heads, self.scales, config.rms_norm_eps, *tensors)
        query_and_key, value = heads.tensor_split([-config.num_kv_heads], dim=1)
        if self.scales is not None:
            query_and_key = rms_norm(query_and_key, self.scales, config.rms_norm_eps)
        rotated = rotate(query_and_key, step.angles)
        query, key = rotated.tensor_split([config.num_heads], dim=1)
        write_cache(key, value, step.cache, step.batch.slots)
        return query

    @made_once
    def scales(self) -> Tensor | None:
        """[heads + kv_heads, head_dim]: queries and keys differ only in their scale, so one call normalizes both."""
        config = self.config
        if self.query_scale is None or self.key_scale is None:
            return None
        rows = (self.query_scale.expand(config.num_heads, -1), self.key_scale.expand(config.num_kv_heads, -1))
        return torch.cat(rows)

    def slots(self) -> Iterator[WeightSlot]:
        yield from self.qkv.slots()
        yield from self.out.slots()
        to_scale = scale_by(adds_one=self.config.norms_add_one)
        for name, scale in (("q_norm", self.query_scale), ("k_norm", self.key_scale)):
            if scale is not None:
                yield slot(f"{name}.weight", scale, to_scale)


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: LayerConfig, place: Placement) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(place, config.hidden_size, config.rms_norm_eps, adds_one=config.norms_add_one)

        self.layer = layer
        self.before_attention, self.before_feed_forward = norm(), norm()
        self.after_attention = norm() if config.norms_results else None
        self.after_feed_forward = norm() if config.norms_results else None
        self.attention = SelfAttention(config, layer, place)
        size, wide, activation = config.hidden_size, config.intermediate_size, config.activation
        self.feed_forward: GatedFeedForward | Mixture
        if layer.mixture is None:
            self.feed_forward = GatedFeedForward(place, size, wide, activation, bias=False)
        else:
            self.feed_forward = Mixture(place, size, layer.mixture, activation)

    def forward(self, hidden: Tensor, normed: Tensor, step: LayerStep, following: RMSNorm) -> tuple[Tensor, Tensor]:
        """Return the residual stream and its norm by `following`, for the tokens that are read.

        `normed` is `hidden` already normed for this layer.
        """
        attended, adaptation = self.attention(normed, step), step.adaptation_of_read
        if step.rows is not None:
            hidden = hidden[step.rows]
        result = adaptation.multiply("out", self.attention.out, attended)
        hidden, normed = add_and_norm(hidden, result, self.after_attention, self.before_feed_forward)
        if isinstance(self.feed_forward, GatedFeedForward):
            result = self.feed_forward(normed, adaptation)
        else:
            result = self.feed_forward(normed)
        return add_and_norm(hidden, result, self.after_feed_forward, following)

    def products(self) -> dict[str, Linear]:
        """The products that an adapter may change, in the order of `PRODUCTS`."""
        found, wide = {"qkv": self.attention.qkv, "out": self.attention.out}, self.feed_forward
        if isinstance(wide, GatedFeedForward):
            found |= {"gate": wide.gate, "up": wide.up, "down": wide.down}
        return found

    def for_cpu(self, rotary: RotaryTable) -> LayerWeights:
        """Return the weights for the CPU's kernel. Call after they are packed."""
        attention = self.attention
        norms = (self.before_attention, self.after_attention, self.before_feed_forward, self.after_feed_forward)
        return LayerWeights(
            norms=[None if each is None else each.scale for each in norms],
            of_heads=attention.scales,
            products=[each.packed for each in self.products().values()],
            activation=attention.config.activation,
            base=rotary.configs.index(self.layer.rotary),
        )

    def slots(self) -> Iterator[WeightSlot]:
        yield from under("input_layernorm.", self.before_attention.slots())
        yield from under("self_attn.", self.attention.slots())
        yield from under("pre_feedforward_layernorm.", self.before_feed_forward.slots())
        yield from under("mlp.", self.feed_forward.slots())
        if self.after_attention is not None:
            yield from under("post_attention_layernorm.", self.after_attention.slots())
        if self.after_feed_forward is not None:
            yield from under("post_feedforward_layernorm.", self.after_feed_forward.slots())


class Decoder(nn.Module):
    def __init__(self, config: DecoderConfig, place: Placement) -> None:
        super().__init__()
        self.config = config
        self.embedding = Linear(place, config.hidden_size, {"embed_tokens": config.vocab_size}, bias=False)
        # Rounded to the model's dtype before multiplying, as in training.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=torch.float32).to(place.dtype).item()
        self.layers = Row[DecoderLayer](DecoderLayer(config, layer, place) for layer in config.layers)
        self.norm = RMSNorm(place, config.hidden_size, config.rms_norm_eps, adds_one=config.norms_add_one)
        self.rotary = RotaryTable((layer.rotary for layer in config.layers), config.head_dim, place)
        # Computes all layers in one call, if the CPU has a kernel for them.
        self._layers_on_cpu: CpuDecoder | None = None

    def embed(self, token_ids: Tensor) -> Tensor:
        rows = self.embedding.rows(token_ids)
        return rows if self.embedding_scale == 1 else rows * self.embedding_scale

    def forward(
        self,
        hidden: Tensor,  # [tokens, hidden]
        attention: Attention,
        caches: Sequence[LayerCache],
        batch: AttentionBatch,
        watch_layer: LayerWatcher | None = None,
        deep: Sequence[DeepRows] = (),
    ) -> Tensor:
        """Return the hidden states of the tokens that are read, after the final norm."""
        if self._layers_on_cpu is not None and isinstance(attention, PagedAttention):
            watch_layer = _adding(deep, watch_layer) if deep else watch_layer
            hidden = self._compute_on_cpu(self._layers_on_cpu, hidden, caches, batch, watch_layer)
            return self.norm(hidden)  # type: ignore[no-any-return]
        angles, layers = self.rotary.angles(batch.rotary_positions), list(self.layers)
        # Each layer also computes the norm that the next one needs, in the same operation as its last addition.
        norms = [layer.before_attention for layer in layers] + [self.norm]
        normed = norms[0](hidden)
        for index, (layer, cache, following) in enumerate(zip(layers, caches, norms[1:], strict=True)):
            rows, read = (batch.read_rows, batch.read_part) if layer is layers[-1] else (None, batch)
            adaptations = (Adaptation(index, each.adapted) for each in (batch, read))
            step = LayerStep(angles[layer.layer.rotary], attention, cache, batch, rows, *adaptations)
            hidden, normed = layer(hidden, normed, step, following)
            if _add_deep(deep, index, hidden):
                normed = following(hidden)
            if watch_layer is not None:
                watch_layer(index, hidden)
        return normed  # type: ignore[no-any-return]

    def _compute_on_cpu(
        self,
        layers: CpuDecoder,
        hidden: Tensor,
        caches: Sequence[LayerCache],
        batch: AttentionBatch,
        watch_layer: LayerWatcher | None,
    ) -> Tensor:
        views = [batch.simplest(View(layer.window)) for layer in self.config.layers]
        batches = [*[batch] * (len(views) - 1), batch.read_part]
        seen = list(zip(batches, views, strict=True))
        sight_by = {each: sight_of(*each) for each in set(seen)}
        sights = [sight_by[each] for each in seen]
        angles = self.rotary.of_every_base(batch.rotary_positions)
        adapted = (batch.adapted, batch.read_part.adapted)
        return layers.compute(hidden, angles, caches, sights, batch.slots, batch.read_rows, adapted, watch_layer)

    def pack(self) -> None:
        """Set up the CPU's kernel for all layers, if it can be used. Call after all weights are packed."""
        config = self.config
        is_plain = config.attention_softcap is None and not any(layer.mixture for layer in config.layers)
        is_on_cpu = self.embedding.panels is not None
        if is_on_cpu and is_plain and fits_tiles(config.num_heads, config.num_kv_heads, config.head_dim):
            weights = [layer.for_cpu(self.rotary) for layer in self.layers]
            self._layers_on_cpu = CpuDecoder(weights, config.attention_scale, config.rms_norm_eps)

    def products(self) -> list[dict[str, Linear]]:
        """For each layer, the products that an adapter may change."""
        return [layer.products() for layer in self.layers]

    def slots(self) -> Iterator[WeightSlot]:
        yield from self.embedding.slots()
        yield from self.layers.slots("layers")
        yield from under("norm.", self.norm.slots())


def _add_deep(deep: Sequence[DeepRows], index: int, hidden: Tensor) -> bool:
    """Add the deep rows of layer `index` to its output in place. Return whether there were any."""
    added = [each for each in deep if index < each[1].shape[1]]
    for first, rows in added:
        hidden[first : first + len(rows)] += rows[:, index]
    return bool(added)


def _adding(deep: Sequence[DeepRows], watch_layer: LayerWatcher | None) -> LayerWatcher:
    def add(index: int, hidden: Tensor) -> None:
        _add_deep(deep, index, hidden)
        if watch_layer is not None:
            watch_layer(index, hidden)

    return add
