"""All layers of a decoder on a CPU in one call: cpu_decoder.c.

With few tokens, separate calls for the parts of a layer take longer than the computation.
"""

from collections.abc import Callable, Sequence
from ctypes import POINTER, Array, Structure, c_float, c_long, c_void_p, pointer
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from keepsight.models.adapter_weights import PRODUCTS, AdaptedRows, AdapterWeights, LowRank
from keepsight.models.attention import LayerCache
from keepsight.models.cpu_kernels import AttentionWork, Sight
from keepsight.models.cpu_library import call, number
from keepsight.models.cpu_products import Panels, ProductWork

_NORMS = ("before_attention", "after_attention", "before_feed_forward", "after_feed_forward")


class _Layer(Structure):
    _fields_ = (
        *((name, c_void_p) for name in (*_NORMS, "of_heads")),
        ("products", ProductWork * len(PRODUCTS)),
        ("base", c_long),
    )


class _LowRank(Structure):
    _fields_ = (("down", ProductWork), ("up", ProductWork))


class _AdaptedRows(Structure):
    _fields_ = (("first", c_long), ("end", c_long), ("products", POINTER(_LowRank)))


class _Adapted(Structure):
    _fields_ = (("each", POINTER(_AdaptedRows)), ("count", c_long))


class _Decoder(Structure):
    _fields_ = (
        ("hidden", c_void_p),
        ("layers", POINTER(_Layer)),
        *((name, POINTER(c_void_p)) for name in ("keys", "values")),
        ("sights", POINTER(POINTER(AttentionWork))),
        *((name, c_void_p) for name in ("cos", "sin", "slots", "read", "normed", "projected", "query", "gate", "up")),
        *((name, c_long) for name in ("num_read", "first", "end", "num_layers", "tokens", "size")),
        *((name, c_long) for name in ("heads", "kv_heads", "dim", "is_rounded")),
        ("eps", c_float),
        *((name, _Adapted) for name in ("of_all", "of_read")),
        ("narrow", c_void_p),
    )


class LayerWeights(NamedTuple):
    norms: Sequence[Tensor | None]  # scales, in the order of `_NORMS`; None where the layer has no such norm
    of_heads: Tensor | None  # [heads + kv_heads, head_dim]: norm scales; None if queries and keys have no norm
    products: Sequence[Panels]  # in the order of `PRODUCTS`
    activation: str  # of the gate
    base: int  # index of its rotary base

    def arguments(self) -> _Layer:
        scales = (None if each is None else each.data_ptr() for each in (*self.norms, self.of_heads))
        activations = {"gate": self.activation}
        works = (each.arguments(activations.get(name)) for name, each in zip(PRODUCTS, self.products, strict=True))
        return _Layer(*scales, (ProductWork * len(PRODUCTS))(*works), self.base)


class CpuDecoder:
    def __init__(self, layers: Sequence[LayerWeights], attention_scale: float, eps: float) -> None:
        self._weights = tuple(layers)  # keeps them alive: the kernel gets only their addresses
        self._layers = (_Layer * len(layers))(*(each.arguments() for each in layers))
        self._attention_scale, self._eps = attention_scale, eps
        assert number("products_of_layer") == len(PRODUCTS)
        # The C structs of each adapter, for as long as the adapter is alive.
        self._adapter_arguments: WeakKeyDictionary[AdapterWeights, Array[_LowRank]] = WeakKeyDictionary()

    def compute(
        self,
        hidden: Tensor,  # [tokens, size]
        angles: tuple[Tensor, Tensor],  # [bases, tokens, 1, head_dim]; the first half of the sines is negated
        caches: Sequence[LayerCache],
        sights: Sequence[Sight],  # of each layer
        slots: Tensor,  # [tokens]
        read_rows: Tensor | None,  # ascending; None: all
        adapted: tuple[Sequence[AdaptedRows], Sequence[AdaptedRows]],  # among all rows, and among those that are read
        watch_layer: Callable[[int, Tensor], None] | None,
    ) -> Tensor:
        """[tokens, size] -> [read, size]; also writes keys and values of all tokens to their slots."""
        hidden = hidden.clone(memory_format=torch.contiguous_format)
        buffers = self._allocate_buffers(hidden)
        work = self._work(hidden, angles, caches, sights, slots, read_rows, buffers)
        if of_all := adapted[0]:
            work.of_all, work.of_read = map(self._adapted_arguments, adapted)
            buffers.append(hidden.new_empty(len(hidden), max(each.weights.rank for each in of_all)))
            work.narrow = buffers[-1].data_ptr()
        at_once = 1 if watch_layer else work.num_layers
        for first in range(0, work.num_layers, at_once):
            work.first, work.end = first, first + at_once
            call("decode", work)
            if work.end == work.num_layers:
                hidden = hidden[: work.num_read]
            if watch_layer:
                watch_layer(first, hidden)
        return hidden

    def _allocate_buffers(self, hidden: Tensor) -> list[Tensor]:
        """Allocate the intermediate buffers of a layer, by torch: if memory runs out a step fails, not the process."""
        qkv, out, gate, up, _ = self._weights[0].products
        rows, wide_rows = len(hidden), min(len(hidden), number("wide_rows"))
        of_all = ((rows, each) for each in (qkv.num_inputs, qkv.num_outputs, out.num_inputs))
        of_some = ((wide_rows, each.num_outputs) for each in (gate, up))
        return [hidden.new_empty(shape) for shape in (*of_all, *of_some)]

    def _adapted_arguments(self, adapted: Sequence[AdaptedRows]) -> _Adapted:
        rows = (_AdaptedRows(first, end, self._arguments_of_adapter(weights)) for first, end, weights in adapted)
        return _Adapted((_AdaptedRows * len(adapted))(*rows), len(adapted))

    def _arguments_of_adapter(self, weights: AdapterWeights) -> Array[_LowRank]:
        if (arguments := self._adapter_arguments.get(weights)) is None:
            each = [_low_rank_arguments(layer.get(name)) for layer in weights.layers for name in PRODUCTS]
            arguments = self._adapter_arguments[weights] = (_LowRank * len(each))(*each)
        return arguments

    def _work(
        self,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        caches: Sequence[LayerCache],
        sights: Sequence[Sight],
        slots: Tensor,
        read_rows: Tensor | None,
        buffers: Sequence[Tensor],
    ) -> _Decoder:
        keys, num_layers = caches[0].keys, len(self._layers)
        _, num_kv_heads, head_dim = keys.shape
        num_heads = self._weights[0].products[PRODUCTS.index("out")].num_inputs // head_dim
        assert all(each.is_contiguous() for each in (*angles, slots, keys))
        assert hidden.dtype is torch.float32
        assert hidden.shape == (len(slots), self._weights[0].products[0].num_inputs)
        assert len(slots) == angles[0].shape[1]
        assert len(caches) == len(sights) == num_layers
        works = {each: pointer(each.arguments(num_heads, keys, self._attention_scale)) for each in set(sights)}
        return _Decoder(
            hidden.data_ptr(),
            self._layers,
            (c_void_p * num_layers)(*(each.keys.data_ptr() for each in caches)),
            (c_void_p * num_layers)(*(each.values.data_ptr() for each in caches)),
            (POINTER(AttentionWork) * num_layers)(*(works[each] for each in sights)),
            *(each.data_ptr() for each in (*angles, slots)),
            None if read_rows is None else read_rows.data_ptr(),
            *(each.data_ptr() for each in buffers),
            len(hidden) if read_rows is None else len(read_rows),
            *(0, 0, num_layers, *hidden.shape, num_heads, num_kv_heads, head_dim),
            keys.dtype is torch.bfloat16,
            self._eps,
        )


def _low_rank_arguments(low_rank: LowRank | None) -> _LowRank:
    if low_rank is None:
        return _LowRank()
    return _LowRank(low_rank.down.packed.arguments(), low_rank.up.packed.arguments())
