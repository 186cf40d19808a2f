"""Read an adapter folder as PEFT writes it: its scales, its tensor file (unparsed), and a digest of both.

A configuration field that asks for more than adding B A to W, or is unknown here, is refused by name.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from blake3 import blake3

from keepsight.errors import CheckpointError
from keepsight.json_fields import JsonFields, read_json_object
from keepsight.requests import Adapter

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_BYTES = 2**32
T = TypeVar("T")
# Matches at least the encoder tensors of all families. A false positive costs only a separate encoding of pictures.
_OF_ENCODER = re.compile(rb"(tower|visual|multi_modal_projector)\.")
# Fields that do not affect the arithmetic, or that repeat what the tensors show.
_HARMLESS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules"),
        *("inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version"),
        *("qalora_group_size", "revision", "runtime_config", "target_modules", "target_parameters", "task_type"),
    }
)
_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"})
# All other initializations subtract something from the model's own weights.
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class AdapterScales:
    rank: int
    alpha: float
    # Scale by alpha / sqrt(rank), not alpha / rank.
    is_by_root: bool
    # Overrides for modules whose names end in a match of these regular expressions; the first match counts.
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        return _find(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return _find(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.is_by_root else rank)

    def to_digest_text(self) -> str:
        """Return the scales as text for the digest; patterns keep the order in which they are tried."""
        return json.dumps([self.rank, self.alpha, self.is_by_root, [*self.ranks.items()], [*self.alphas.items()]])


def _find(patterns: Mapping[str, T], module: str, default: T) -> T:
    return next((value for key, value in patterns.items() if re.match(_ending(key), module)), default)


def _ending(pattern: str) -> str:
    """Return the regular expression that PEFT matches for `pattern`."""
    return rf"(.*\.)?({pattern})$"


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    path: Path
    scales: AdapterScales
    # The whole tensor file.
    content: bytes

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the folder at `path`. Raise CheckpointError if it is not a usable adapter."""
        config = path / CONFIG_FILE
        if not config.is_file():
            raise CheckpointError(path, f"is not an adapter folder as saved by PEFT: it has no {CONFIG_FILE}")
        return cls(path, _read_scales(config), _read_content(path / TENSOR_FILE))

    def as_adapter(self, name: str) -> Adapter:
        """Return the adapter as requests name it, with a digest of everything that its results depend on."""
        scales = self.scales.to_digest_text().encode()
        digest = blake3(len(scales).to_bytes(8, "little") + scales, max_threads=blake3.AUTO).update(self.content)
        return Adapter(name, digest.hexdigest(), self.changes_encoder)

    @property
    def changes_encoder(self) -> bool:
        """True if the file's header names tensors of a tower or a projector."""
        size = int.from_bytes(self.content[:8], "little")
        return _OF_ENCODER.search(self.content, 8, min(8 + size, len(self.content))) is not None


def _read_content(path: Path) -> bytes:
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise CheckpointError(path, f"has {size} bytes; an adapter may have at most {MAX_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error


def _read_scales(path: Path) -> AdapterScales:
    values = read_json_object(path)
    fields = JsonFields(path, values)
    fields.choice("peft_type", ("LORA",))
    for name, value in values.items():
        says_nothing = value in (None, False, "none") or value in ([], {})
        if name not in _HARMLESS | _READ and not says_nothing:
            raise fields.refuse(name, f"{value!r:.80} is not supported")
    if values.get("init_lora_weights") not in _PLAIN_BEGINNINGS:
        reason = f"{values['init_lora_weights']!r} also changes the model's weights; save it converted to plain LoRA"
        raise fields.refuse("init_lora_weights", reason)
    ranks, alphas = fields.section("rank_pattern"), fields.section("alpha_pattern")
    return AdapterScales(
        rank=fields.integer("r"),
        alpha=fields.number("lora_alpha"),
        is_by_root=fields.flag("use_rslora", False),
        ranks={name: ranks.integer(name) for name in _patterns_of(ranks)},
        alphas={name: alphas.number(name) for name in _patterns_of(alphas)},
    )


def _patterns_of(fields: JsonFields) -> list[str]:
    for name in fields.names():
        try:
            re.compile(_ending(name))
        except (re.error, OverflowError, RecursionError) as error:
            raise fields.refuse(name, f"is not a regular expression: {error}") from error
    return fields.names()
