"""Weights as AutoAWQ, GPTQModel and compressed-tensors pack them, with the values they represent."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PLAIN = {4: (0, 1, 2, 3, 4, 5, 6, 7), 8: (0, 1, 2, 3)}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Drawn:
    num_bits: int
    numbers: Tensor  # [outputs, inputs]
    zeros: Tensor  # [outputs, groups]
    scales: Tensor  # [outputs, groups]
    groups: Tensor  # [inputs]

    @property
    def whole(self) -> Tensor:
        return torch.stack(
            [
                (self.numbers[:, each] - self.zeros[:, group]).float() * self.scales[:, group].float()
                for each, group in enumerate(self.groups.tolist())
            ],
            dim=1,
        )


def draw(
    outputs: int, inputs: int, group_size: int | None, num_bits: int = 4, seed: int = 0, *, symmetric: bool = False,
    in_order: bool = True,
) -> Drawn:  # fmt: skip
    """Draw a weight whose products are of order one; its zero points cover the whole range."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(inputs) // (group_size or inputs)
    if not in_order:
        groups = groups[torch.randperm(inputs, generator=generator)]
    shape, largest = (outputs, int(groups.max()) + 1), 2**num_bits
    zeros = torch.randint(largest, shape, generator=generator)
    if symmetric:
        zeros = torch.full(shape, largest // 2)
    scales = (0.5 + torch.rand(shape, generator=generator)) * 2 / (largest * inputs**0.5)
    numbers = torch.randint(largest, (outputs, inputs), generator=generator)
    return Drawn(num_bits, numbers, zeros, scales.half(), groups.int())


def to_words(numbers: Tensor, num_bits: int, order: Sequence[int]) -> Tensor:
    """Pack [rows, unsigned numbers] into [rows, words].

    `order[place]` is the index of the number stored at that place of a word, from the lowest bits up.
    """
    rows = []
    for row in numbers.tolist():
        padded = row + [0] * (-len(row) % len(order))
        starts = range(0, len(padded), len(order))
        words = (sum(padded[start + each] << num_bits * place for place, each in enumerate(order)) for start in starts)
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def to_awq(drawn: Drawn) -> dict[str, Tensor]:
    return {
        "qweight": to_words(drawn.numbers.T, 4, AWQ_ORDER),
        "qzeros": to_words(drawn.zeros.T, 4, AWQ_ORDER),
        "scales": drawn.scales.T.contiguous(),
    }


def to_gptq(drawn: Drawn, checkpoint_format: str = "gptq") -> dict[str, Tensor]:
    zeros = to_words(drawn.zeros.T, drawn.num_bits, PLAIN[drawn.num_bits])
    if checkpoint_format == "gptq":
        # The "gptq" format stores zero - 1. GPTQModel subtracts on whole words.
        zeros = zeros - {4: 0x11111111, 8: 0x01010101}[drawn.num_bits]
    return {
        "qweight": to_words(drawn.numbers, drawn.num_bits, PLAIN[drawn.num_bits]).T.contiguous(),
        "qzeros": zeros,
        "scales": drawn.scales.T.contiguous(),
        "g_idx": drawn.groups,
    }


def to_compressed(drawn: Drawn, *, symmetric: bool = False) -> dict[str, Tensor]:
    order = PLAIN[drawn.num_bits]
    packed = {
        "weight_packed": to_words(drawn.numbers, drawn.num_bits, order),
        "weight_scale": drawn.scales,
        "weight_zero_point": to_words(drawn.zeros.T, drawn.num_bits, order).T.contiguous(),
        "weight_g_idx": drawn.groups,
        "weight_shape": torch.tensor(drawn.numbers.shape),
    }
    if symmetric:
        del packed["weight_zero_point"]
    return packed


AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 8,
    "version": "gemm",
    "zero_point": True,
    "modules_to_not_convert": ["visual"],
}
GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 8,
    "desc_act": True,
    "sym": False,
    "checkpoint_format": "gptq",
}


def compressed_config(**weights: Any) -> dict[str, Any]:
    scheme = {
        "num_bits": 4,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": 8,
        "actorder": "group",
    }
    group = {"targets": ["Linear"], "weights": scheme | weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


# The quantization config of a checkpoint, and the function that packs accordingly.
METHODS: dict[str, tuple[dict[str, Any], Callable[[Drawn], dict[str, Tensor]]]] = {
    "awq": (AWQ, to_awq),
    "gptq": (GPTQ, to_gptq),
    "gptq_v2-8": (GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}, partial(to_gptq, checkpoint_format="gptq_v2")),
    "compressed": (compressed_config(), to_compressed),
    "compressed-8": (compressed_config(num_bits=8, symmetric=True), partial(to_compressed, symmetric=True)),
}


def draw_as(method: str, outputs: int, inputs: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return an unpacked weight and the tensors that represent it."""
    _, pack = METHODS[method]
    drawn = draw(
        outputs, inputs, 8, 8 if method.endswith("-8") else 4, seed,
        symmetric=method == "compressed-8", in_order=method == "awq",
    )  # fmt: skip
    return drawn.whole, pack(drawn)


def pack_layers(reference: Any, saved: Path, packed: Path, method: str) -> None:
    """Redraw the layers' weights of `reference`, and write a copy of its checkpoint with these weights packed."""
    shutil.copytree(saved, packed)
    tensors = load_file(packed / "model.safetensors")
    stored = {_name_of_layer(name): name for name in tensors}
    layers = [each for each in reference.named_modules() if "layers." in each[0] and isinstance(each[1], nn.Linear)]
    for seed, (name, module) in enumerate(layers):
        outputs, inputs = module.weight.shape
        whole, parts = draw_as(method, outputs, inputs, seed)
        module.weight.data.copy_(whole)
        prefix = stored[_name_of_layer(f"{name}.weight")].removesuffix("weight")
        del tensors[f"{prefix}weight"]
        tensors |= {prefix + part: tensor for part, tensor in parts.items()}
    save_file(tensors, packed / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": METHODS[method][0]}))


def _name_of_layer(name: str) -> str:
    """Strip the prefixes in which names in files and names of modules differ."""
    return re.sub(r"\w*model\.", "", name)
