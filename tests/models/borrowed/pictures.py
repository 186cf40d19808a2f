"""Random small models of pictures and text, and the arrays and tokens that their processors make of a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepsight.media import Geometry, MediaItem, TokenSpan, find_runs
from keepsight.pixels import carry_arrays
from keepsight.requests import Pixels
from tests.models.borrowed import reference as ref

IMAGE, BREAK, END = 299, 298, 297
VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
LLAMA, QWEN2, COHERE2 = ({"model_type": name} for name in ("llama", "qwen2", "cohere2"))
MISTRAL = {"model_type": "mistral", "sliding_window": ref.WINDOW}


# A head's frequencies by the axes that rotate it; and the tokens around a picture that such models know.
TURNING = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
MARKERS = {"video_token_id": 296, "vision_start_token_id": BREAK, "vision_end_token_id": END}


class Family(NamedTuple):
    architecture: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    others: Mapping[str, Any]
    # Shape of one picture's processor output.
    pixels_shape: tuple[int, ...]
    arrays: Mapping[str, Tensor]
    # The tokens that stand for it.
    token_ids: list[int]
    # The axis along which the arrays of several pictures are concatenated.
    axis: int = 0
    # Columns of its tokens, where positions have rows and columns.
    columns: int = 0
    # Whether the modules are told which tokens are pictures', as they also are where `columns` are.
    is_told: bool = False

    def make_checkpoint(self, directory: Path) -> Any:
        arguments = {
            "text_config": {**ref.SMALL, **self.text},
            "vision_config": {**VISION, **self.vision},
            "image_token_id": IMAGE,
            **self.others,
        }
        return ref.make_checkpoint(directory, self.architecture, arguments)

    def draw(self, seed: int) -> dict[str, Tensor]:
        """Return the arrays of one picture."""
        values = torch.randn(self.pixels_shape, generator=torch.Generator().manual_seed(seed))
        return {"pixel_values": values, **self.arrays}

    def tell(self, token_ids: Tensor) -> dict[str, Tensor]:
        """Return what else transformers' model needs to know of a prompt."""
        return {"mm_token_type_ids": (token_ids == IMAGE)[None].int()} if self.columns or self.is_told else {}

    def place(self, position: int) -> list[MediaItem]:
        """Return a picture that begins there."""
        span = TokenSpan(position, len(self.token_ids))
        return [MediaItem("a picture", span, Geometry(), columns=self.columns)]

    def find_embeddings(self, position: int) -> tuple[TokenSpan, ...]:
        """Return the spans of a picture's embeddings, if it begins at `position`."""
        return tuple(find_runs(self.token_ids, IMAGE, position))

    def carry(self, seed: int, token_ids: Sequence[int] = ()) -> Pixels:
        told = torch.tensor(token_ids or self.token_ids, dtype=torch.int32)
        return carry_arrays({name: each.numpy() for name, each in {**self.draw(seed), "token_ids": told}.items()})

    def join(self, seeds: Sequence[int]) -> dict[str, Tensor]:
        """Return the arrays of several pictures of one prompt."""
        drawn = [self.draw(seed) for seed in seeds]
        return {name: torch.cat([each[name] for each in drawn], dim=self.axis) for name in (drawn[0] if drawn else ())}


LLAVA = Family(
    "LlavaForConditionalGeneration", LLAMA, {"model_type": "clip_vision_model"}, {}, (1, 3, 32, 32), {}, [IMAGE] * 16
)
# Like Kimi-VL's decoder.
NARROW = {"model_type": "deepseek_v3", **ref.LATENT, "qk_nope_head_dim": 24, **ref.SPARSE_BEHIND_ONE}
LLAVA_OF_NARROW_VALUES = LLAVA._replace(text=NARROW)
IDEFICS3 = Family(
    "Idefics3ForConditionalGeneration", LLAMA, {}, {"scale_factor": 2}, (1, 2, 3, 32, 32),
    {"pixel_attention_mask": torch.ones(1, 2, 32, 32, dtype=torch.int64)},
    [BREAK, *[IMAGE] * 4, BREAK, *[IMAGE] * 4, END], axis=1,
)  # fmt: skip
SMOLVLM = Family(
    "SmolVLMForConditionalGeneration", LLAMA, {}, {"scale_factor": 2}, (1, 3, 3, 32, 32), {},
    [BREAK, *[IMAGE] * 12, END], axis=1,
)  # fmt: skip
INTERNVL = Family(
    "InternVLForConditionalGeneration", QWEN2, {"image_size": [32, 32], "patch_size": [8, 8]}, {}, (2, 3, 32, 32), {},
    [IMAGE] * 8,
)  # fmt: skip
MISTRAL3 = Family(
    "Mistral3ForConditionalGeneration", MISTRAL, {"model_type": "pixtral"}, {"spatial_merge_size": 2}, (1, 3, 32, 48),
    {"image_sizes": torch.tensor([[32, 48]])},
    [IMAGE, IMAGE, IMAGE, BREAK, IMAGE, IMAGE, IMAGE, END],
)  # fmt: skip
AYA = Family(
    "AyaVisionForConditionalGeneration", COHERE2, {"model_type": "siglip_vision_model"}, {}, (2, 3, 32, 32), {},
    [BREAK, *[IMAGE] * 4, END, *[IMAGE] * 4],
)  # fmt: skip
# 4 x 6 patches; each square of four is one token.
GRID = {"image_grid_thw": torch.tensor([[1, 4, 6]])}
QWEN2_VL = Family(
    "Qwen2VLForConditionalGeneration", TURNING,
    {"embed_dim": 32, "hidden_size": 64, "depth": 2, "num_heads": 2, "mlp_ratio": 2}, MARKERS, (24, 384), GRID,
    [IMAGE] * 6, columns=3,
)  # fmt: skip
GLM4V = Family(
    "Glm4vForConditionalGeneration", TURNING, {"depth": 2, "out_hidden_size": 64}, MARKERS, (24, 384), GRID,
    [IMAGE] * 6, columns=3,
)  # fmt: skip
PADDLEOCR = Family(
    "PaddleOCRVLForConditionalGeneration", {"head_dim": 16, **TURNING}, {"spatial_merge_size": 2}, MARKERS,
    (24, 3, 8, 8), GRID, [IMAGE] * 6, columns=3,
)  # fmt: skip
# Layers of which some are recurrent.
QWEN3_5 = Family(
    "Qwen3_5ForConditionalGeneration",
    {"model_type": "qwen3_5_text", **ref.GATED_DELTA, "rope_parameters": ref.TURNING_IN_PART},
    {"num_heads": 2, "depth": 2, "out_hidden_size": 64, "num_position_embeddings": 16},
    MARKERS, (24, 384), GRID, [IMAGE] * 6, columns=3,
)  # fmt: skip
# 4 x 6 patches, and as many as are missing to the most; each square of four is one token.
PATCHES = torch.cartesian_prod(torch.arange(4), torch.arange(6)).flip(1)
PADDED = torch.cat((PATCHES, PATCHES.new_full((8, 2), -1)))[None]
# Like the smaller ones: layers read the tokens, and attend to keys of others.
GEMMA4 = Family(
    "Gemma4ForConditionalGeneration", {"model_type": "gemma4_text", **ref.GEMMA4},
    {"model_type": "gemma4_vision", "pooling_kernel_size": 2, "head_dim": 16, "num_key_value_heads": 2},
    {"boi_token_id": BREAK, "eoi_token_id": END, "video_token_id": 296, "audio_token_id": 295, "audio_config": None},
    (1, 32, 192), {"image_position_ids": PADDED}, [BREAK, *[IMAGE] * 6, END], is_told=True,
)  # fmt: skip
# Like the larger ones: a mixture, whose layers with a window see pictures whole.
GEMMA4_LARGE = GEMMA4._replace(
    text={
        **GEMMA4.text,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    vision={**GEMMA4.vision, "standardize": True},
)
FAMILIES = (
    LLAVA, LLAVA_OF_NARROW_VALUES, IDEFICS3, SMOLVLM, INTERNVL, MISTRAL3, AYA, QWEN2_VL, GLM4V, PADDLEOCR, QWEN3_5,
    GEMMA4, GEMMA4_LARGE,
)  # fmt: skip
