"""The demo model: transformers' own Gemma 3 classes at a very small size, and how training runs them.

Training shifts the tower's position embeddings cyclically, picture by picture. That equals shifting the picture before
the tower and its patches back after it, so the tower learns what lies where *relative* to a patch, and only the order
of a picture's tokens says where a patch lies.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoProcessor,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GenerationConfig,
    SiglipVisionConfig,
)

from packed_conversations import NO_LABEL, TOKENS_PER_PICTURE, Batch
from patch_labels import GRID, NOUN_CLASSES, PATCH_CLASSES, SLOT_CLASSES, UNKNOWN, PatchLabels

BOS_ID, EOS_ID, PAD_ID = 2, 1, 0
# Of the decoder's six layers, the early ones locate things in the picture and the late ones answer.
EARLY_LAYERS = 2
LATE_LAYERS = 4
FOREGROUND_WEIGHT, BACKGROUND_WEIGHT = 1.0, 0.2


# transformers' classes take and return too much for their annotations: they are Any here.
def load_model(checkpoint: Path, dtype: torch.dtype) -> Any:
    return Gemma3ForConditionalGeneration.from_pretrained(checkpoint, dtype=dtype)


def load_processor(checkpoint: Path) -> Any:
    from_pretrained: Any = AutoProcessor.from_pretrained
    return from_pretrained(checkpoint)


def build_model(token_ids: dict[str, int], vocab_size: int) -> Any:
    """Build the model with random weights. `token_ids` names the special tokens."""
    end_of_turn = token_ids["<end_of_turn>"]
    make_text_config: Any = Gemma3TextConfig
    text = make_text_config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=64,
        sliding_window_pattern=3,
        max_position_embeddings=2048,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    vision = SiglipVisionConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=112,
        patch_size=14,
        vision_use_head=False,
    )
    make_config: Any = Gemma3Config
    config = make_config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=16,
        boi_token_index=token_ids["<start_of_image>"],
        eoi_token_index=token_ids["<end_of_image>"],
        image_token_index=token_ids["<image_soft_token>"],
        eos_token_id=[EOS_ID, end_of_turn],
    )
    config.architectures = ["Gemma3ForConditionalGeneration"]
    model: Any = Gemma3ForConditionalGeneration(config)
    _initialise(model)
    make_generation_config: Any = GenerationConfig
    model.generation_config = make_generation_config(
        bos_token_id=BOS_ID, eos_token_id=[EOS_ID, end_of_turn], pad_token_id=PAD_ID, do_sample=False
    )
    return model


def _initialise(model: Any) -> None:
    """transformers leaves the projection at zero, so that no gradient would reach the tower at first, and embeddings
    at 0.02. Here both enter the residual stream with a root mean square of one."""
    with torch.no_grad():
        projection = model.model.multi_modal_projector.mm_input_projection_weight
        projection.normal_(0, projection.shape[0] ** -0.5)
        embedding = model.model.language_model.embed_tokens.weight
        embedding.normal_(0, embedding.shape[1] ** -0.5)
        embedding[PAD_ID].zero_()


def save_checkpoint(model: Any, directory: Path) -> None:
    """Save the model in bfloat16, with the config keys that older readers look for."""
    weights = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(directory, state_dict=weights)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = config["torch_dtype"] = "bfloat16"
    text, vision = config["text_config"], config["vision_config"]
    for part in (text, vision):
        part.pop("dtype", None)
    text.setdefault("rope_theta", 1_000_000.0)
    text.setdefault("rope_local_base_freq", 10_000.0)
    text.setdefault("sliding_window_pattern", 3)
    path.write_text(json.dumps(config, indent=2) + "\n")
    for file in directory.iterdir():
        file.chmod(0o644)


class PatchHead(nn.Module):
    """Predicts from each patch of the tower what lies under it. Discarded after training."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, sum(PATCH_CLASSES) + 2)

    def forward(self, features: Tensor, labels: PatchLabels) -> tuple[Tensor, list[float]]:
        """The loss, and the accuracy of each kind of label on covered patches."""
        *logits, offsets = self.linear(features).split((*PATCH_CLASSES, 2), dim=-1)
        is_covered = labels.is_covered
        loss, accuracies = _classify(logits, labels.classes, is_covered)
        return loss + F.smooth_l1_loss(offsets[is_covered], labels.offsets[is_covered], beta=0.3), accuracies


class NounHead(nn.Module):
    """Predicts, at the name of a shape in a question, what the picture shows of it. Discarded after training."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, sum(NOUN_CLASSES))

    def forward(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, list[float]]:
        """Return the loss, and the accuracy of each label where it is known. `hidden` and `labels` are [nouns, ...]."""
        logits = self.linear(F.rms_norm(hidden, hidden.shape[-1:])).split(NOUN_CLASSES, dim=-1)
        total = hidden.sum() * 0
        accuracies = []
        for index, one in enumerate(logits):
            is_known = labels[:, index] != UNKNOWN
            if is_known.any():
                total = total + F.cross_entropy(one[is_known], labels[is_known, index])
                accuracies.append((one.argmax(-1) == labels[:, index])[is_known].float().mean().item())
        return total, accuracies


class SlotHead(nn.Module):
    """Predicts from each soft token, after the early decoder layers, what has its center there and in which of the
    nine cells. Later layers can then rely on finding things there. Discarded after training."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, sum(SLOT_CLASSES))

    def forward(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, list[float]]:
        """`hidden` and `labels` are [pictures, soft tokens, ...]."""
        logits = self.linear(F.rms_norm(hidden, hidden.shape[-1:])).split(SLOT_CLASSES, dim=-1)
        return _classify(logits, labels, labels[..., 1] + labels[..., 3] > 0)


def _classify(logits: Sequence[Tensor], labels: Tensor, is_covered: Tensor) -> tuple[Tensor, list[float]]:
    """The sum of the losses of all kinds of label, and the accuracy of each where something is."""
    total = torch.zeros(())
    accuracies = []
    for index, one in enumerate(logits):
        target = labels[..., index]
        losses = F.cross_entropy(one.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
        total = total + FOREGROUND_WEIGHT * losses[is_covered].mean() + BACKGROUND_WEIGHT * losses[~is_covered].mean()
        accuracies.append((one.argmax(-1) == target)[is_covered].float().mean().item())
    return total, accuracies


def usual_position_rows(num_pictures: int) -> Tensor:
    """For each picture the row of the position embedding for each patch: [pictures, patches]."""
    return torch.arange(GRID * GRID).expand(num_pictures, -1)


def shifted_position_rows(num_pictures: int) -> Tensor:
    """Shift each picture's rows at random: all 64 shifts, including none, are equally likely."""
    shifts = torch.randint(GRID, (num_pictures, 2))
    patches = torch.arange(GRID * GRID)
    rows = (patches // GRID + shifts[:, :1]) % GRID
    columns = (patches % GRID + shifts[:, 1:]) % GRID
    return rows * GRID + columns


def encode_patches(model: Any, pixels: Tensor, position_rows: Tensor) -> Tensor:
    """Run the vision tower with the given position embeddings. Return [pictures, patches, hidden]."""
    tower = model.model.vision_tower
    normalised = pixels.float().div(127.5).sub(1.0)
    patches = tower.embeddings.patch_embedding(normalised).flatten(2).transpose(1, 2)
    hidden = patches + tower.embeddings.position_embedding(position_rows)
    encoded = tower.encoder(inputs_embeds=hidden).last_hidden_state
    features: Tensor = tower.post_layernorm(encoded)
    return features


@dataclass(frozen=True)
class Decoded:
    logits: Tensor  # [labels, vocabulary]
    targets: Tensor  # [labels]
    early_slots: Tensor | None  # [slots, soft tokens, hidden] after the first EARLY_LAYERS layers
    late_nouns: Tensor  # [nouns, hidden] after LATE_LAYERS layers
    noun_labels: Tensor  # [nouns, len(NOUN_CLASSES)]


def decode(model: Any, batch: Batch, features: Tensor | None) -> Decoded:
    """Run the decoder as transformers does, and keep its hidden states at soft tokens half way."""
    decoder = model.model.language_model
    hidden = decoder.embed_tokens(batch.token_ids)
    is_soft = torch.eq(batch.token_ids, model.config.image_token_index)
    if features is not None:
        soft_tokens = model.model.multi_modal_projector(features)[batch.slot_pictures]
        hidden = hidden.masked_scatter(is_soft[..., None], soft_tokens)
    kinds = decoder.config.layer_types
    rotary = {kind: decoder.rotary_emb(hidden, batch.positions, kind) for kind in set(kinds)}
    is_noun = batch.nouns[..., 0] != UNKNOWN
    early_slots = None
    for index, (layer, kind) in enumerate(zip(decoder.layers, kinds, strict=True)):
        hidden = layer(
            hidden,
            attention_mask=batch.masks[kind],
            position_embeddings=rotary[kind],
            position_ids=batch.positions,
            past_key_values=None,
        )
        if features is not None and index + 1 == EARLY_LAYERS:
            early_slots = hidden[is_soft].view(len(batch.slot_pictures), TOKENS_PER_PICTURE, -1)
        if index + 1 == LATE_LAYERS:
            late_nouns = hidden[is_noun]
    is_labelled = batch.labels != NO_LABEL
    logits = model.lm_head(decoder.norm(hidden[is_labelled]))
    return Decoded(logits, batch.labels[is_labelled], early_slots, late_nouns, batch.nouns[is_noun])
