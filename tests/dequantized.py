"""Reference for quantized models: the transformers model with weights rounded to their int8 values."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from keepsight.models.layers import Placement

QUANTIZED = Placement(torch.device("cpu"), torch.float32, decoder_matrix_dtype=torch.int8)


def dequantize(weight: Tensor) -> Tensor:
    """Round each row of [..., rows, numbers] to the nearest of 255 multiples of its absolute maximum / 127."""
    step = weight.abs().amax(dim=-1, keepdim=True) / 127
    return torch.round(weight / step) * step


def dequantize_products(*modules: nn.Module) -> None:
    """Dequantize all linear layers of transformers modules, except a mixture's routers.

    A tied head becomes separate from its embedding table.
    """
    from transformers.pytorch_utils import Conv1D

    with torch.no_grad():
        for module in itertools.chain.from_iterable(each.modules() for each in modules):
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(dequantize(module.weight))
            elif isinstance(module, Conv1D):  # its weight is [inputs, outputs]
                module.weight = nn.Parameter(dequantize(module.weight.T).T)
            for parameter in module.parameters(recurse=False):
                if parameter.dim() == 3:  # experts
                    parameter.copy_(dequantize(parameter))


def dequantize_decoder(reference: Any) -> None:
    """Dequantize the decoder's matrices, head and embedding table, except a mixture's routers."""
    of_decoder = ("language_model.", "lm_head.")
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if weight.dim() > 1 and any(each in name for each in of_decoder) and not name.endswith("mlp.gate.weight"):
                weight.copy_(dequantize(weight))
