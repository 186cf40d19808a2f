"""The building blocks that models share, each of which declares the checkpoint tensors it needs.

Parameters are created empty on their final device and filled by `load_weights`. Nothing here initializes them, except
the bias of fused projections that have none. The target of a `WeightSlot` may be a view of a larger parameter: that is
how separate checkpoint tensors become one fused product.
"""

import functools
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepsight.models import cpu_kernels
from keepsight.models.cpu_kernels import takes_kernels
from keepsight.models.cpu_products import Panels, takes_panels
from keepsight.models.gpu_library import kernels_for
from keepsight.models.quantize_rows import quantize_rows

P = TypeVar("P", bound="Part")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Placement(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    # The dtype of weight matrices where the CPU's kernels multiply: it may be narrower than that of their inputs.
    matrix_dtype: torch.dtype | None = None
    # Whether the inputs of products are rounded to that dtype, too, which may be faster.
    rounds: bool = False
    # Whether cached keys and values are bfloat16, and what they multiply is rounded to it.
    halves_kv: bool = False
    # The library whose modules compute, if not ours.
    modules: str = ""
    # The dtype of the decoder's matrices if they are quantized: int8, with a scale for each output.
    decoder_matrix_dtype: torch.dtype | None = None

    def for_decoder(self) -> "Placement":
        return self._replace(matrix_dtype=self.decoder_matrix_dtype or self.matrix_dtype)

    def for_router(self) -> "Placement":
        """Return a placement that neither rounds inputs nor quantizes: either would sometimes choose other experts."""
        return self._replace(rounds=False, matrix_dtype=None if self.decoder_matrix_dtype else self.matrix_dtype)

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of cached keys and values."""
        return torch.bfloat16 if self.halves_kv else self.dtype

    @property
    def is_exact(self) -> bool:
        """Whether nothing is rounded to less than float32, except weights."""
        return self.dtype is torch.float32 and not self.rounds and not self.halves_kv

    @property
    def arithmetic(self) -> str:
        """A description of what numeric results depend on; part of the keys of stored results."""
        # Rounding matrices changes results even if the rows they multiply are not rounded.
        rounded = "products" if self.rounds else "matrices and attention" if self.halves_kv else "matrices"
        matrix_dtype = f", {rounded} of {name_of(self.matrix_dtype)}" if self.matrix_dtype else ""
        by = f" by {self.modules}" if self.modules else ""
        return f"{name_of(self.dtype)}{matrix_dtype} on {self.device.type}{by}"

    @property
    def arithmetic_of_decoder(self) -> str:
        quantized = f", quantized to {name_of(self.decoder_matrix_dtype)}" if self.decoder_matrix_dtype else ""
        return self.arithmetic + quantized


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The destination of one checkpoint tensor: its name and shape in the checkpoint, and the memory it fills."""

    name: str
    shape: tuple[int, ...]
    target: Tensor
    convert: Callable[[Tensor], Tensor]
    # Whether some checkpoints have its last two dimensions transposed.
    may_be_transposed: bool = False
    # The output of the product that it is the matrix of, if any.
    output: "Output | None" = None
    # The scales of its rows, if it is quantized.
    scales: Tensor | None = None

    def takes(self, shape: tuple[int, ...]) -> bool:
        transposed = (*self.shape[:-2], *self.shape[:-3:-1])
        return shape == self.shape or (self.may_be_transposed and shape == transposed)

    def fill(self, tensor: Tensor) -> None:
        converted = self.convert(tensor if tensor.shape == self.shape else tensor.mT)
        if self.scales is None:
            self.target.copy_(converted)
        else:
            quantize_rows(self.target, self.scales, converted)

    @property
    def digits(self) -> Tensor:
        """A tensor that is not finite if the tensor it was filled from is not."""
        return self.target if self.scales is None else self.scales


def slot(
    name: str,
    target: Tensor,
    convert: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    *,
    may_be_transposed: bool = False,
    output: "Output | None" = None,
    scales: Tensor | None = None,
) -> WeightSlot:
    return WeightSlot(name, tuple(target.shape), target, convert, may_be_transposed, output, scales)


def under(prefix: str, slots: Iterator[WeightSlot]) -> Iterator[WeightSlot]:
    for inner in slots:
        yield replace(inner, name=prefix + inner.name)


class Part(Protocol):
    def slots(self) -> Iterator[WeightSlot]: ...


class Row(nn.ModuleList, Generic[P]):
    """A sequence of parts of one kind."""

    def __iter__(self) -> Iterator[P]:  # type: ignore[override]
        return super().__iter__()  # type: ignore[return-value]

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for index, part in enumerate(self):
            yield from under(f"{prefix}.{index}.", part.slots())


def empty_parameter(place: Placement, *shape: int) -> nn.Parameter:
    try:
        memory = torch.empty(shape, device=place.device, dtype=place.dtype)
    except RuntimeError as error:  # torch raises OutOfMemoryError for a GPU only, not for a CPU
        raise torch.OutOfMemoryError(str(error)) from error
    return nn.Parameter(memory, requires_grad=False)


def empty_matrices(place: Placement, *shape: int) -> nn.Parameter:
    return empty_parameter(place._replace(dtype=place.matrix_dtype or place.dtype), *shape)


def empty_scales(matrices: Tensor) -> Tensor | None:
    """Return a scale for each row if the matrices are quantized; otherwise None."""
    return torch.empty(matrices.shape[:-1], dtype=torch.float32) if matrices.dtype is torch.int8 else None


def is_read_in_panels(matrices: Tensor, place: Placement) -> bool:
    """Return whether these matrices are multiplied by the CPU's kernels."""
    return takes_panels(matrices) and place.dtype is torch.float32


def without_memory(weight: Tensor) -> nn.Parameter:
    """Return a parameter of the same shape that takes no memory, to replace a weight that was packed."""
    nowhere = weight.new_full([1] * weight.dim(), torch.nan if weight.is_floating_point() else 0)
    return nn.Parameter(nowhere.expand(weight.shape), requires_grad=False)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
}


class Linear(nn.Module):
    """One matrix product for one or several named projections of the same input, stacked."""

    def __init__(
        self,
        place: Placement,
        in_features: int,
        outputs: Mapping[str, int],
        *,
        bias: bool,
        # Names in `outputs` that have no bias although `bias` is set.
        unbiased: Collection[str] = (),
        # The memory of its matrix, if it is part of a larger one.
        weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.outputs, self.unbiased = dict(outputs), unbiased
        self.in_features, self.out_features = in_features, sum(outputs.values())
        if weight is None:
            weight = empty_matrices(place, self.out_features, in_features)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._scales = empty_scales(self.weight)
        self.bias = empty_parameter(place, self.out_features) if bias else None
        for name in unbiased:
            self._biases[name].zero_()
        self._place = place
        self.panels: Panels | None = None  # read by the CPU's kernels instead of `weight`

    def pack(self) -> None:
        """On a CPU, replace the weight by the layout that the kernels read. Call after it is filled."""
        if is_read_in_panels(self.weight, self._place):
            self.panels = Panels(self.weight, self.bias, scales=self._scales, rounds_rows=self._place.rounds)
            self.weight, self._scales = without_memory(self.weight), None

    @property
    def packed(self) -> Panels:
        assert self.panels is not None
        return self.panels

    def forward(self, hidden: Tensor, activation: str | None = None, onto: Tensor | None = None) -> Tensor:
        """Return the product. `onto`: a tensor to which it is added in place, before the activation.

        With an activation use only what is returned: `onto` holds the same by the CPU's kernels, but the sum by torch.
        """
        if self.panels is not None:
            return self.panels.multiply(hidden, activation=activation, onto=onto)
        out = F.linear(hidden, self.weight, self.bias)
        if onto is not None:
            out = onto.add_(out)
        return out if activation is None else ACTIVATIONS[activation](out)

    def rows(self, which: Tensor) -> Tensor:
        """[count] -> [count, in_features]: return the weight's rows of some outputs."""
        return F.embedding(which, self.weight) if self.panels is None else self.panels.rows(which)

    def slots(self) -> Iterator[WeightSlot]:
        sizes = list(self.outputs.values())
        scales = [None] * len(sizes) if self._scales is None else torch.split(self._scales, sizes)
        for name, weight, its_scales in zip(self.outputs, torch.split(self.weight, sizes), scales, strict=True):
            yield slot(f"{name}.weight", weight, output=Output(self, name), scales=its_scales)
        for name, bias in self._biases.items():
            if name not in self.unbiased:
                yield slot(f"{name}.bias", bias)

    @property
    def _biases(self) -> dict[str, Tensor]:
        if self.bias is None:
            return {}
        return dict(zip(self.outputs, torch.split(self.bias, list(self.outputs.values())), strict=True))


def slots_of_convolution(product: Linear, *kernel: int) -> Iterator[WeightSlot]:
    """Yield the slots of a product that is a convolution in checkpoints: channels come first there, last here."""
    weight, *bias = product.slots()
    shape = (product.out_features, *kernel)
    yield WeightSlot(weight.name, shape, weight.target, lambda kernels: kernels.movedim(1, -1).flatten(1))
    yield from bias


class Output(NamedTuple):
    """One output of a product, with a tensor of its own in checkpoints."""

    product: Linear
    name: str


class LayerNorm(nn.Module):
    def __init__(self, place: Placement, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(place, size)
        self.bias = empty_parameter(place, size)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)

    def slots(self) -> Iterator[WeightSlot]:
        yield slot("weight", self.weight)
        yield slot("bias", self.bias)


def norm_by_kernel(hidden: Tensor, scale: Tensor, eps: float) -> Tensor | None:
    """Return what `rms_norm` does; None if there is no kernel for it, or none is wanted."""
    if takes_kernels(hidden):
        return cpu_kernels.norm(hidden.contiguous(), scale, eps)
    kernels = kernels_for(hidden.device)
    return None if kernels is None else kernels.norm(hidden, scale, eps)


def rms_norm(hidden: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return hidden / rms(hidden) * scale over the last dimension, computed in float32 for every dtype.

    The scale may have more dimensions than that one.
    """
    by_kernel = norm_by_kernel(hidden, scale, eps) if scale.dim() == 1 else None
    if by_kernel is not None:
        return by_kernel
    return (F.rms_norm(hidden.float(), hidden.shape[-1:], eps=eps) * scale).to(hidden.dtype)


def scale_by(*, adds_one: bool) -> Callable[[Tensor], Tensor]:
    """Return the conversion of a norm's weight to its scale: Gemma stores scale - 1."""
    return (lambda weight: 1.0 + weight.float()) if adds_one else torch.Tensor.float


class RMSNorm(nn.Module):
    """RMS norm, computed in float32 whatever the model's dtype."""

    def __init__(self, place: Placement, size: int, eps: float, *, adds_one: bool) -> None:
        super().__init__()
        self.eps, self._adds_one = eps, adds_one
        self.scale = empty_parameter(Placement(place.device, torch.float32), size)

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.scale, self.eps)

    def slots(self) -> Iterator[WeightSlot]:
        yield slot("weight", self.scale, scale_by(adds_one=self._adds_one))


def add_and_norm(sums: Tensor, result: Tensor, of_result: RMSNorm | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """Add `result`, normed by `of_result` if given, to `sums`. Return the new sums, and those normed by `norm`."""
    assert of_result is None or of_result.eps == norm.eps
    if kernels := kernels_for(sums.device):
        return kernels.add_and_norm(sums, result, None if of_result is None else of_result.scale, norm.scale, norm.eps)
    sums = sums + (result if of_result is None else of_result(result))
    return sums, norm(sums)


# Cosines and sines, each [tokens, 1, head_dim]; the first half of the sines is negated.
Angles = tuple[Tensor, Tensor]


def rotate(heads: Tensor, angles: Angles) -> Tensor:
    """Apply the rotary embedding; a head's first half holds one coordinate of its pairs, the second half the other."""
    cos, sin = angles
    return heads * cos + heads.roll(heads.shape[-1] // 2, dims=-1) * sin


def run_to_end(parts: Generator[None, None, Tensor]) -> Tensor:
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
