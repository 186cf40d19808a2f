"""What a quantized model's answers are judged by: transformers' model with the weights that int8 stands for."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from keepsight.models.layers import Placement

QUANTIZED = Placement(torch.device("cpu"), torch.float32, decoder_matrix_dtype=torch.int8)


def dequantize(weight: Tensor) -> Tensor:
    """[..., rows, numbers]: each row's numbers as the nearest of 255 multiples of its largest one's 127th part."""
    step = weight.abs().amax(dim=-1, keepdim=True) / 127
    return torch.round(weight / step) * step


def dequantize_products(*modules: nn.Module) -> None:
    """Of transformers' modules of whatever family, but for a mixture's routers.  A head is no copy of a table then."""
    from transformers.pytorch_utils import Conv1D

    with torch.no_grad():
        for module in itertools.chain.from_iterable(each.modules() for each in modules):
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(dequantize(module.weight))
            elif isinstance(module, Conv1D):  # whose inputs come first
                module.weight = nn.Parameter(dequantize(module.weight.T).T)
            for parameter in module.parameters(recurse=False):
                if parameter.dim() == 3:  # experts
                    parameter.copy_(dequantize(parameter))


def dequantize_decoder(reference: Any) -> None:
    """Its matrices, head and embedding table, but for a mixture's routers."""
    of_decoder = ("language_model.", "lm_head.")
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if weight.dim() > 1 and any(each in name for each in of_decoder) and not name.endswith("mlp.gate.weight"):
                weight.copy_(dequantize(weight))
