"""Random small Qwen3-VL checkpoints, and what transformers computes with them: the reference."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepsight.media import Geometry, MediaItem, Modality, TokenSpan
from keepsight.models.attention import Attention, AttentionBatch, LayerCache, RequestSlice
from keepsight.models.block_table import BlockTable
from keepsight.models.model import DeepRows
from keepsight.models.mrope_positions import MRopePositions
from keepsight.models.qwen_model import QwenModel
from keepsight.runner.gather_embeddings import MediaRows
from keepsight.runner.merge_embeddings import merge_embeddings

VOCAB_SIZE = 300
IMAGE_TOKEN, VIDEO_TOKEN, BEGIN_TOKEN, END_TOKEN = 299, 298, 297, 296
MERGE_SIZE = 2
BLOCK_SIZE = 16


def draw_config(seed: int) -> dict[str, Any]:
    """Return the keyword arguments of one random configuration; together the seeds vary everything that can vary."""
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 4])
    head_dim = rng.choice([8, 16, 32])
    hidden_size = heads * rng.choice([8, 16, 24])
    half = head_dim // 2
    rows, columns = rng.choice([(half // 3, half // 3), (half // 3, half // 4), (0, half // 3), (half, half)])
    rotary = {
        "rope_type": "default",
        "rope_theta": rng.choice([5e6, 1e4]),
        "mrope_section": [max(0, half - rows - columns), rows, columns],
        "mrope_interleaved": True,
    }
    depth = rng.choice([1, 3, 4])
    deep = sorted(rng.sample(range(depth), rng.randrange(min(3, depth) + 1)))
    vision_heads = rng.choice([1, 2, 3])
    return {
        "text_config": {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": hidden_size,
            "intermediate_size": rng.choice([40, 96]),
            "num_hidden_layers": rng.choice([4, 5]),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": rng.choice([1e-6, 1e-3]),
            "attention_bias": rng.random() < 0.3,
            "hidden_act": rng.choice(["silu", "silu", "silu", "gelu_pytorch_tanh"]),
            "max_position_embeddings": 4096,
            "rope_parameters": rotary,
            "eos_token_id": 1,
        },
        "vision_config": {
            "hidden_size": vision_heads * rng.choice([8, 16, 24]),
            "intermediate_size": rng.choice([40, 72]),
            "depth": depth,
            "num_heads": vision_heads,
            "patch_size": rng.choice([2, 4]),
            "spatial_merge_size": MERGE_SIZE,
            "num_position_embeddings": rng.choice([4, 9, 36]),
            "deepstack_visual_indexes": deep,
            "out_hidden_size": hidden_size,
        },
        "tie_word_embeddings": rng.random() < 0.5,
    }


TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": BEGIN_TOKEN,
    "vision_end_token_id": END_TOKEN,
}


def make_reference(arguments: dict[str, Any], seed: int, tokens: Mapping[str, Any] = TOKENS) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    return settle(Qwen3VLForConditionalGeneration, Qwen3VLConfig(**arguments, **tokens), seed)


def settle(make: Callable[[Any], Any], config: Any, seed: int) -> Any:
    # Otherwise a GPU's float32 convolution would round to ten bits, while ours is exact.
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(seed)
    model = make(config)
    model.set_attn_implementation("eager")
    randomize(model, seed)
    return model.float().eval()


def randomize(model: Any, seed: int) -> None:
    """Make every weight matter while activations stay of order one: transformers' initial zeros would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if ("norm" in name or "ln_q" in name) and name.endswith("weight"):
                weight.copy_(1 + 0.1 * noise)
            elif weight.ndim == 1:
                weight.copy_(0.1 * noise)
            elif "embed_tokens" in name:
                # Small beside what the layers add; otherwise every token would predict itself.
                weight.copy_(0.1 * noise)
            elif "pos_embed" in name or "embed_positions" in name:
                weight.copy_(0.5 * noise)
            elif ".experts." in name:
                weight.copy_(noise / weight.shape[-1] ** 0.5)
            else:
                weight.copy_(noise / weight[0].numel() ** 0.5)
    model.tie_weights()


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    media: list[MediaItem]
    pixels: list[Tensor]  # normalized, each [height, width, 3], or [2, height, width, 3] for a moment
    # How long a moment of each film lasts, where no text gives its time.
    seconds: Sequence[float] = field(default=(), kw_only=True)

    def span_of(self, index: int) -> TokenSpan:
        return self.media[index].span


def draw_prompt(
    arguments: dict[str, Any], num_pictures: int, seed: int, num_words: int = 11, most_moments: int = 1
) -> Prompt:
    """`most_moments`: the largest number of consecutive moments of a film."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    side = arguments["vision_config"]["patch_size"] * MERGE_SIZE
    token_ids, media, pixels, seconds = [2], list[MediaItem](), list[Tensor](), list[float]()

    def say(count: int) -> None:
        token_ids.extend(rng.randrange(3, END_TOKEN) for _ in range(count))

    for _ in range(num_pictures):
        rows, columns, is_film = rng.randrange(1, 6), rng.randrange(1, 6), rng.random() < 0.4
        say(rng.randrange(4))
        token_ids.append(BEGIN_TOKEN)
        modality: Modality = "video" if is_film else "image"
        frames, token = ([2], VIDEO_TOKEN) if is_film else ([], IMAGE_TOKEN)
        seconds += [(0.25, 1.5, 4.0)[seed % 3]] if is_film else []
        for later in _places_of_moments(arguments, seconds, most_moments * is_film):
            span, geometry = TokenSpan(len(token_ids), rows * columns), Geometry(columns * side, rows * side)
            media.append(MediaItem(str(len(media)), span, geometry, modality, later is not None, columns, later))
            token_ids += [token] * span.length
            pixels.append(torch.rand(*frames, rows * side, columns * side, 3, generator=generator) * 2 - 1)
        token_ids.append(END_TOKEN)
    say(num_words)
    return Prompt(token_ids, media, pixels, seconds=seconds)


def _places_of_moments(arguments: dict[str, Any], seconds: Sequence[float], num_moments: int) -> list[int | None]:
    rate = arguments["vision_config"].get("tokens_per_second", 0)
    return [None, *(int(index * rate * seconds[-1]) for index in range(1, num_moments))]


def reference_inputs(prompt: Prompt, arguments: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Return inputs like those of transformers' processor, for pictures that are already resized and normalized."""
    ids, size = torch.tensor([prompt.token_ids]), arguments["vision_config"]["patch_size"]
    inputs = {"input_ids": ids}
    if prompt.pixels:
        inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int()
    for modality, values, grids in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        own = [pixels for item, pixels in zip(prompt.media, prompt.pixels, strict=True) if item.modality == modality]
        if own:
            inputs[values] = torch.cat([as_patches(pixels, size) for pixels in own])
            inputs[grids] = torch.tensor(_grids(prompt, modality, size))
    if "video_grid_thw" in inputs and "tokens_per_second" in arguments["vision_config"]:
        inputs["second_per_grid_ts"] = torch.tensor(prompt.seconds)
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def _grids(prompt: Prompt, modality: str, size: int) -> list[list[int]]:
    """Return one grid for a film without text between its moments, otherwise one for each moment."""
    grids = list[list[int]]()
    for item, pixels in zip(prompt.media, prompt.pixels, strict=True):
        if item.modality == modality and item.rotary_offset is None:
            grids.append([1, pixels.shape[-3] // size, pixels.shape[-2] // size])
        elif item.modality == modality:
            grids[-1][0] += 1
    return grids


def as_patches(pixels: Tensor, size: int) -> Tensor:
    """Return [patches, 3 * 2 * size * size], made by transformers' processors."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    of_picture: Any = Qwen2VLImageProcessorPil.patchify
    of_film: Any = Qwen3VLVideoProcessor.patchify
    if pixels.dim() == 3:
        return torch.from_numpy(of_picture(None, pixels.permute(2, 0, 1).numpy(), size, MERGE_SIZE, 2)[0])
    patches: Tensor = of_film(None, pixels.permute(0, 3, 1, 2)[None], size, MERGE_SIZE, 2)[0][0]
    return patches


def save_checkpoint(reference: Any, directory: Path) -> Path:
    reference.save_pretrained(directory)
    return directory


def run_together(
    model: QwenModel, prompts: Sequence[Prompt], attention: Attention, read: Sequence[int] | None = None
) -> tuple[list[Tensor], Tensor]:
    """Return every decoder layer's output, and the logits of all positions, or of each last position to be read."""
    device, place, shape = model.place.device, model.place, model.shape
    pieces, embeddings, deep, row, first = [], [], list[DeepRows](), 0, 0
    for prompt in prompts:
        length = len(prompt.token_ids)
        end = first + -(-length // BLOCK_SIZE)
        has_rows = any(item.columns for item in prompt.media)
        places = MRopePositions(prompt.media).between(0, length) if has_rows else None
        table = BlockTable(BLOCK_SIZE, range(first, end), device)
        pieces.append(RequestSlice(0, length, table, mrope_positions=places))
        own, its_deep = merged_embeddings(model, prompt)
        embeddings.append(own)
        deep += [DeepRows(row + start, rows) for start, rows in its_deep]
        row, first = row + length, end
    # Unwritten slots must never be read: a NaN would show in every result.
    caches = [
        LayerCache(*torch.full((2, first * BLOCK_SIZE, *heads), float("nan"), dtype=place.dtype, device=device))
        for heads in shape.kv_heads
    ]
    layers: list[Tensor] = []
    hidden = model.compute(
        torch.cat(embeddings),
        attention,
        caches,
        AttentionBatch(pieces, device, read),
        watch_layer=lambda _, output: layers.append(output.clone()),
        deep=deep,
    )
    return layers, model.logits(hidden)


def merged_embeddings(model: QwenModel, prompt: Prompt) -> tuple[Tensor, list[DeepRows]]:
    embeddings = model.embed_tokens(torch.tensor(prompt.token_ids, device=model.place.device))
    rows = []
    for item, pixels in zip(prompt.media, prompt.pixels, strict=True):
        [own] = model.encode_images(pixels[None].to(model.place.device, model.place.dtype))
        rows.append(MediaRows(item.span.start, own))
    return embeddings, merge_embeddings(embeddings, rows)


def end_rows(prompts: Sequence[Prompt]) -> list[int]:
    return [end - 1 for end in itertools.accumulate(len(prompt.token_ids) for prompt in prompts)]
