"""A borrowed model's matrix products by our CPU kernels: a row's results do not depend on the rest of the batch.

The modules stay as they are: their weights are replaced by tensors that override `F.linear`, those of routers and of a
mixture's experts included, and tables of tokens, if they lose nothing by it, by tensors in bfloat16 that override
`F.embedding`. On a GPU nothing is replaced.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepsight.models.cpu_products import Panels
from keepsight.models.layers import Placement, is_read_in_panels, without_memory
from keepsight.models.quantize_rows import quantize_rows

# Rows of a table to convert at once.
_ROWS_AT_ONCE = 4096


class _Replacement(nn.Parameter):
    """A parameter that shows the shape and dtype of a weight, and overrides the operations that read the weight."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return cls._compute(func, args, kwargs or {})

    @classmethod
    def _compute(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return func(*args, **kwargs)


class PackedWeight(_Replacement):
    """The weight of a product [outputs, inputs], or of several [products, outputs, inputs], selected by index."""

    _panels: Sequence[Panels]
    # The dtype in which it is kept for multiplication; `dtype` itself is what modules cast their inputs to.
    kept_in: torch.dtype

    @classmethod
    def of(cls, shown: Tensor, panels: Sequence[Panels], kept_in: torch.dtype) -> Self:
        """`shown`: the tensor that all other operations see."""
        made = cls(shown, requires_grad=False)
        made._panels, made.kept_in = panels, kept_in
        return made

    @classmethod
    def _compute(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is F.linear and isinstance(args[1], cls):
            return args[1]._multiply(*args[:1], *args[2:], **kwargs)
        if func is Tensor.__getitem__ and args[0].dim() == 3:
            return args[0]._take(args[1])
        return super()._compute(func, args, kwargs)

    def _multiply(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., inputs] -> [..., outputs]"""
        [panels] = self._panels
        out = panels.multiply(hidden)
        return out if bias is None else out.add_(bias)

    def _take(self, index: int | Tensor) -> "PackedWeight":
        return PackedWeight.of(self.data[index], [self._panels[int(index)]], self.kept_in)


class PackedTable(_Replacement):
    """The weight of a table of tokens, kept in bfloat16; its rows are exact in float32."""

    _table: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        made = cls(without_memory(weight).data, requires_grad=False)
        made._table = weight.data.bfloat16()
        return made

    @classmethod
    def _compute(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is F.embedding and isinstance(args[1], cls):
            return func(args[0], args[1]._table, *args[2:], **kwargs).float()
        if func is Tensor.__getitem__:
            return args[0]._table[args[1]].float()
        return super()._compute(func, args, kwargs)


def _is_exact_in_bfloat16(weight: Tensor) -> bool:
    return all(torch.equal(rows, rows.bfloat16().float()) for rows in torch.split(weight, _ROWS_AT_ONCE))


def pack_products(modules: Any, place: Placement) -> None:
    """Pack the weights of transformers' model, one after another, so that little is in memory twice."""
    if not is_read_in_panels(modules.get_input_embeddings().weight, place):
        assert place.decoder_matrix_dtype is None
        return
    # Experts one by one: batched implementations do not call `F.linear`.
    modules.set_experts_implementation("eager")
    _turn_products(modules)
    decoder = modules.base_model.get_decoder()
    of_decoder = {*decoder.modules(), modules.get_output_embeddings()}
    # A product with as many outputs is a router, or as small as one.
    numbers_of_experts = count_experts(decoder)
    for module in modules.modules():
        its_place = place.for_decoder() if module in of_decoder else place
        for name, weight in _find_weights(module):
            is_router = type(module) is not nn.Linear or (module in of_decoder and len(weight) in numbers_of_experts)
            setattr(module, name, _pack(weight, its_place, is_router=is_router))
    # Other tables are small, and some modules compute with all rows (GLM-4V's tower interpolates positions).
    for table in (modules.get_input_embeddings(), getattr(decoder, "embed_tokens_per_layer", None)):
        if isinstance(table, nn.Embedding) and _is_exact_in_bfloat16(table.weight):
            table.weight = PackedTable.of(table.weight)


def count_experts(decoder: nn.Module) -> set[int]:
    """Return the numbers of experts of its mixtures, whose weights are stacked."""
    modules = (module for module in decoder.modules() if not isinstance(module, nn.Conv1d))
    weights = (weight for module in modules for weight in module.parameters(recurse=False))
    return {len(weight) for weight in weights if weight.dim() == 3}


def _turn_products(modules: nn.Module) -> None:
    """Replace GPT-2's Conv1D modules, whose weights have inputs first, by `nn.Linear`."""
    from transformers.pytorch_utils import Conv1D

    for parent in list(modules.modules()):
        for name, child in parent.named_children():
            if isinstance(child, Conv1D):
                inputs, outputs = child.weight.shape
                linear = nn.Linear(inputs, outputs, device="meta")
                linear.weight, linear.bias = nn.Parameter(child.weight.T, requires_grad=False), child.bias
                setattr(parent, name, linear)


def _find_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and weights that the module passes to `F.linear`."""
    own = dict(module.named_parameters(recurse=False))
    if getattr(module, "is_transposed", True) is False:  # transformers marks experts with weights [outputs, inputs]
        yield from ((name, own[name]) for name in ("gate_up_proj", "up_proj", "down_proj") if name in own)
    elif "weight" in own and own["weight"].dim() == 2 and not isinstance(module, nn.Embedding):
        yield "weight", own["weight"]


def _pack(weight: Tensor, place: Placement, *, is_router: bool) -> PackedWeight:
    if weight.dim() == 2 and is_router:
        # Rounding weights or rows would sometimes choose other experts.
        return PackedWeight.of(weight.data, [Panels(weight.data, None)], weight.dtype)
    products = weight.data if weight.dim() == 3 else weight.data[None]
    kept_in = place.matrix_dtype or place.dtype
    packed = [_make_panels(each, kept_in, rounds_rows=place.rounds) for each in products]
    return PackedWeight.of(without_memory(weight).data, packed, kept_in)


def _make_panels(weight: Tensor, kept_in: torch.dtype, *, rounds_rows: bool) -> Panels:
    if kept_in is not torch.int8:
        return Panels(weight.to(kept_in), None, rounds_rows=rounds_rows)
    quantized, scales = torch.empty_like(weight, dtype=kept_in), weight.new_empty(len(weight))
    quantize_rows(quantized, scales, weight)
    return Panels(quantized, None, scales=scales, rounds_rows=rounds_rows)
