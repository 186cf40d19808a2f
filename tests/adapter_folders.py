"""Adapter folders as PEFT writes them, with random weights, and transformers models with the adapters merged in."""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

OUTPUTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 6


def draw_adapter(
    reference: nn.Module, seed: int, *outputs: str, rank: int = RANK, within: str = "language_model.layers."
) -> dict[str, Tensor]:
    """Draw A and B under PEFT's names for the decoder's linear layers (or those `within` other modules).

    Only layers named in `outputs`, if any are given.
    """
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, module in reference.named_modules():
        if within not in name or not name.endswith(outputs or OUTPUTS) or not isinstance(module, nn.Linear):
            continue
        for letter, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
            drawn = torch.randn(shape, generator=generator) / shape[1] ** 0.5
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = drawn
    return tensors


def write_adapter(
    directory: Path,
    tensors: Mapping[str, Tensor],
    rename: Callable[[str], str] = lambda name: name,
    **config: Any,
) -> str:
    directory.mkdir(exist_ok=True)
    known = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps({**known, "modules_to_save": None, **config}))
    save_file({rename(name): each for name, each in tensors.items()}, directory / "adapter_model.safetensors")
    return str(directory)


def merge(reference: Any, tensors: Mapping[str, Tensor], scale: float = ALPHA / RANK) -> Any:
    """Return a copy of the model with W + scale * B A in place of each adapted W."""
    merged = copy.deepcopy(reference)
    with torch.no_grad():
        for name, down in tensors.items():
            if ".lora_A." in name:
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                up = tensors[name.replace("lora_A", "lora_B")]
                merged.get_submodule(module).weight += scale * up @ down
    return merged
