"""Which checkpoints are computed by transformers' own modules, and prepared by its processors: those that are not ours.

Knows only what config.json calls itself.
"""

from pathlib import Path

from keepsight.json_fields import JsonFields

# Of which the package has a model of its own; `models/registry.py` holds them.
OWN_ARCHITECTURES = (
    "Gemma3ForConditionalGeneration",
    "Gemma3ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)


def is_borrowed(directory: Path, model_impl: str = "auto") -> bool:
    """`model_impl`: as vLLM has it: whose modules are used; "auto": ours where there are any."""
    if model_impl != "auto":
        return model_impl == "transformers"
    architectures = JsonFields.read(directory / "config.json").strings("architectures")
    return not any(name in OWN_ARCHITECTURES for name in architectures)
