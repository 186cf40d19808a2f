"""Random small Gemma 3 checkpoints, and what transformers computes with them: the reference."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepsight.media import TokenSpan
from keepsight.models.attention import Attention, AttentionBatch, LayerCache, RequestSlice
from keepsight.models.block_table import BlockTable
from keepsight.models.gemma3.model import Gemma3

VOCAB_SIZE = 300
IMAGE_TOKEN, BOI_TOKEN, EOI_TOKEN = 299, 298, 297
BLOCK_SIZE = 16


def draw_config(seed: int) -> dict[str, Any]:
    """Return the keyword arguments of one random configuration; together the seeds vary everything that can vary."""
    rng = random.Random(seed)
    layers = rng.choice([2, 3, 5, 7])
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 4])
    pool, side = rng.choice([(1, 4), (2, 2), (2, 4), (3, 3)])
    patch_size = rng.choice([4, 6, 14])
    vision_heads = rng.choice([1, 2, 3])
    head_dim = rng.choice([8, 16, 32])
    text: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": heads * rng.choice([8, 16, 24]),
        "intermediate_size": rng.choice([40, 96]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "query_pre_attn_scalar": rng.choice([head_dim, 24, 100]),
        # Smaller and larger than a picture, smaller and larger than the prompt.
        "sliding_window": rng.choice([3, 8, 20, 500]),
        "rms_norm_eps": rng.choice([1e-6, 1e-3]),
        "attention_bias": rng.random() < 0.3,
        "hidden_activation": rng.choice(["gelu_pytorch_tanh", "gelu_pytorch_tanh", "silu"]),
        "max_position_embeddings": 4096,
        "eos_token_id": 1,
    }
    if rng.random() < 0.5:
        text["sliding_window_pattern"] = rng.choice([2, 3, 6])
    else:
        text["layer_types"] = [rng.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    if rng.random() < 0.5:
        text["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    if rng.random() < 0.5:
        text["rope_theta"], text["rope_local_base_freq"] = 50_000.0, 500.0
    if rng.random() < 0.5:
        text["final_logit_softcapping"] = 3.0
    vision = {
        "hidden_size": vision_heads * rng.choice([8, 24]),
        "intermediate_size": rng.choice([40, 72]),
        "num_hidden_layers": rng.choice([1, 3]),
        "num_attention_heads": vision_heads,
        "patch_size": patch_size,
        "image_size": pool * side * patch_size,
        "vision_use_head": rng.random() < 0.3,
    }
    return {
        "text_config": text,
        "vision_config": vision,
        "mm_tokens_per_image": side * side,
        "tie_word_embeddings": rng.random() < 0.7,
    }


def make_reference(arguments: dict[str, Any], seed: int, *, text_only: bool = False) -> Any:
    from transformers import Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration, Gemma3TextConfig

    # Otherwise a GPU's float32 convolution would round to ten bits, while ours is exact.
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(seed)
    model: Any
    if text_only:
        text = dict(arguments["text_config"], tie_word_embeddings=arguments["tie_word_embeddings"])
        model = Gemma3ForCausalLM(Gemma3TextConfig(**text))
    else:
        config = Gemma3Config(
            **arguments,
            image_token_index=IMAGE_TOKEN,
            boi_token_index=BOI_TOKEN,
            eoi_token_index=EOI_TOKEN,
        )
        model = Gemma3ForConditionalGeneration(config)
    model.set_attn_implementation("eager")
    randomize(model, seed)
    return model.float().eval()


def randomize(model: Any, seed: int) -> None:
    """Make every weight matter while activations stay of order one: transformers' initial zeros would hide mistakes."""
    generator = torch.Generator(model.device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator, device=model.device)
            is_scale = "norm" in name and name.endswith("weight")
            if is_scale:
                # Gemma scales by 1 + weight, SigLIP by weight.
                weight.copy_(0.1 * noise + (1.0 if "vision_tower" in name else 0.0))
            elif weight.ndim == 1:
                weight.copy_(0.1 * noise)
            elif "embed_tokens" in name:
                # Small beside what the layers add; otherwise every token would predict itself.
                weight.copy_(0.3 * noise / weight.shape[1] ** 0.5)
            elif "embedding" in name:
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(noise / weight[0].numel() ** 0.5)
    model.tie_weights()


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    spans: list[TokenSpan]
    pixels: Tensor  # normalized, [pictures, 3, height, width] as transformers wants it

    @property
    def token_types(self) -> Tensor:
        return (torch.tensor([self.token_ids]) == IMAGE_TOKEN).long()


def draw_prompt(arguments: dict[str, Any], num_pictures: int, seed: int, num_words: int = 11) -> Prompt:
    rng = random.Random(seed)
    token_ids, spans = [2], []

    def say(count: int) -> None:
        token_ids.extend(rng.randrange(3, BOI_TOKEN - 5) for _ in range(count))

    for _ in range(num_pictures):
        say(rng.randrange(4))
        token_ids.append(BOI_TOKEN)
        spans.append(TokenSpan(len(token_ids), arguments["mm_tokens_per_image"]))
        token_ids.extend([IMAGE_TOKEN] * arguments["mm_tokens_per_image"])
        token_ids.append(EOI_TOKEN)
    say(num_words)
    size = arguments["vision_config"]["image_size"]
    generator = torch.Generator().manual_seed(seed)
    return Prompt(token_ids, spans, torch.rand(num_pictures, 3, size, size, generator=generator) * 2 - 1)


def save_checkpoint(reference: Any, directory: Path, **options: Any) -> Path:
    reference.save_pretrained(directory, **options)
    return directory


def reference_inputs(prompt: Prompt, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Any]:
    inputs = {"input_ids": torch.tensor([prompt.token_ids])}
    if prompt.spans:
        inputs |= {"pixel_values": prompt.pixels.to(dtype), "token_type_ids": prompt.token_types}
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def make_caches(model: Gemma3, num_blocks: int) -> list[LayerCache]:
    text = model.config.text
    place = model.place
    shape = (num_blocks * BLOCK_SIZE, text.num_kv_heads, text.head_dim)

    def empty() -> Tensor:
        # Unwritten slots must never be read: a NaN would show in every result.
        return torch.full(shape, float("nan"), dtype=place.dtype, device=place.device)

    return [LayerCache(empty(), empty()) for _ in text.layers]


def whole_prompts(prompts: Sequence[Prompt], device: torch.device | str) -> list[RequestSlice]:
    pieces, first = [], 0
    for prompt in prompts:
        end = first - (-len(prompt.token_ids) // BLOCK_SIZE)
        table = BlockTable(BLOCK_SIZE, range(first, end), device)
        pieces.append(RequestSlice(0, len(prompt.token_ids), table, tuple(prompt.spans)))
        first = end
    return pieces


def merged_embeddings(model: Gemma3, prompt: Prompt) -> Tensor:
    place = model.place
    embeddings = model.embed_tokens(torch.tensor(prompt.token_ids, device=place.device))
    if prompt.spans:
        pixels = prompt.pixels.permute(0, 2, 3, 1).to(place.device, place.dtype)
        for span, picture in zip(prompt.spans, model.encode_images(pixels), strict=True):
            embeddings[span.start : span.end] = picture
    return embeddings


def run_model(model: Gemma3, prompt: Prompt, attention: Attention) -> tuple[list[Tensor], Tensor]:
    """Return every decoder layer's output, and the logits of all positions."""
    return run_together(model, [prompt], attention)


def run_together(
    model: Gemma3, prompts: Sequence[Prompt], attention: Attention, read: Sequence[int] | None = None
) -> tuple[list[Tensor], Tensor]:
    """The same for several prompts in one batch, or the logits of the last position of those that are to be read."""
    layers: list[Tensor] = []
    device = model.place.device
    pieces = whole_prompts(prompts, device)
    caches = make_caches(model, sum(len(piece.table.block_ids) for piece in pieces))
    embeddings = torch.cat([merged_embeddings(model, prompt) for prompt in prompts])
    hidden = model.compute(
        embeddings,
        attention,
        caches,
        AttentionBatch(pieces, device, read),
        watch_layer=lambda _, output: layers.append(output.clone()),
    )
    return layers, model.logits(hidden)
