"""The time that a new picture takes on this CPU, compared to the least time that its arithmetic can take.

    PYTHONPATH=. python benchmarks/cold_time.py [--threads 2] [--runs 5]

Measured in turn, so that a busy machine slows all of them alike: Keepsight's encoder and prefill of one 896x896 picture
with a 12-layer, 576-wide tower and a 12-layer, 640-wide decoder; transformers' on the same weights; and the bare matrix
products and attention at those shapes in torch, with nothing between them.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from benchmarks.in_turn import time_in_turn
from keepsight.media import TokenSpan
from keepsight.models.attention import AttentionBatch, RequestSlice
from keepsight.models.block_table import BlockTable
from keepsight.models.gemma3.model import Gemma3
from keepsight.models.layers import Placement
from keepsight.models.paged_attention import PagedAttention
from keepsight.runner.kv_block_store import KvBlockStore

VOCAB_SIZE, IMAGE_TOKEN, NUM_WORDS, BLOCK_SIZE = 8192, 8191, 24, 16
QKV = "attention.qkv.weight"
VISION = {
    "hidden_size": 576, "intermediate_size": 2152, "num_hidden_layers": 12, "num_attention_heads": 8,
    "image_size": 896, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
TEXT = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256,
    "sliding_window": 512, "max_position_embeddings": 4096,
}  # fmt: skip


class Contest:
    """One picture in the middle of a prompt, and three ways to compute its first token's logits."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = Gemma3Config(
            text_config=TEXT, vision_config=VISION, mm_tokens_per_image=256,
            image_token_index=IMAGE_TOKEN, boi_token_index=VOCAB_SIZE - 2, eoi_token_index=VOCAB_SIZE - 3,
        )  # fmt: skip
        self.reference = _make_reference(config)
        with tempfile.TemporaryDirectory() as directory:
            self.reference.save_pretrained(directory)
            place = Placement(torch.device("cpu"), torch.float32)
            self.model = Gemma3.from_checkpoint(Path(directory), place)
        assert self.model.tower is not None
        # Weights in the model's shapes; its own have been replaced by packed ones for the kernels.
        self.embedding = torch.rand(576, 588)
        self.head = torch.rand(VOCAB_SIZE, 640)
        self.tower_products = [_make_products(layer) for layer in self.model.tower.layers]
        self.decoder_products = [_make_products(layer) for layer in self.model.decoder.layers]
        words = torch.randint(10, VOCAB_SIZE - 10, (2, NUM_WORDS // 2))
        self.token_ids = torch.cat((words[0], torch.full((256,), IMAGE_TOKEN), words[1]))
        self.span = TokenSpan(NUM_WORDS // 2, 256)
        self.pixels = torch.rand(1, 896, 896, 3) * 2 - 1
        num_blocks = -(-len(self.token_ids) // BLOCK_SIZE)
        self.blocks = BlockTable(BLOCK_SIZE, range(num_blocks))
        self.store = KvBlockStore(self.model.shape, num_blocks, BLOCK_SIZE, place)

    def keepsight(self) -> Tensor:
        encoded = self.encode()
        embeddings = self.model.embed_tokens(self.token_ids)
        embeddings[self.span.start : self.span.end] = encoded[0]
        piece = RequestSlice(0, len(self.token_ids), self.blocks, (self.span,))
        batch = AttentionBatch([piece], "cpu", read=[0])
        hidden = self.model.compute(embeddings, PagedAttention(), self.store.layers, batch)
        return self.model.logits(hidden)

    def encode(self) -> Tensor:
        return self.model.encode_images(self.pixels)

    def transformers(self) -> Tensor:
        output: Any = self.reference(
            input_ids=self.token_ids[None],
            pixel_values=self.pixels.permute(0, 3, 1, 2),
            token_type_ids=(self.token_ids == IMAGE_TOKEN).long()[None],
            logits_to_keep=1,
            use_cache=True,
        )
        return output.logits[0]  # type: ignore[no-any-return]

    def bare(self) -> None:
        """Compute the products alone, each layer with weights of its own, so that none stay in the CPU's caches."""
        self.bare_encoder()
        num_tokens = len(self.token_ids)
        inputs = {width: torch.ones(num_tokens, width) for width in (640, 1024, 2048)}
        heads = torch.ones(1, 4, num_tokens, 256)
        for number, matrices in enumerate(self.decoder_products, start=1):
            # The last layer needs all tokens' keys and values, but all else only for the last token.
            needed = slice(-1, None) if number == len(self.decoder_products) else slice(None)
            for name, matrix in matrices.items():
                F.linear(inputs[matrix.shape[1]][slice(None) if name == QKV else needed], matrix)
            F.scaled_dot_product_attention(heads[:, :, needed], heads, heads)
        F.linear(inputs[640][-1:], self.head)

    def bare_encoder(self) -> None:
        inputs = {width: torch.ones(1, 4096, width) for width in (588, 576, 2152)}
        heads = torch.ones(1, 8, 4096, 72)
        F.linear(inputs[588], self.embedding)
        for matrices in self.tower_products:
            for matrix in matrices.values():
                F.linear(inputs[matrix.shape[1]], matrix)
            F.scaled_dot_product_attention(heads, heads, heads)


def _make_products(layer: torch.nn.Module) -> dict[str, Tensor]:
    return {name: torch.rand(weight.shape) for name, weight in layer.named_parameters() if weight.ndim == 2}


def _make_reference(config: Gemma3Config) -> Any:
    """Draw all weights: transformers leaves the projector at zero, which would make the arithmetic unrealistic."""
    model = Gemma3ForConditionalGeneration(config)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.normal_(0, weight[0].numel() ** -0.5)
    return model


def paired_ratio(times: dict[str, list[float]], one: str, other: str) -> float:
    """Return the median of the ratios within each round: both times are from the same minute of a shared machine."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        contest = Contest()
        error = (contest.keepsight() - contest.transformers()).abs().max().item()
        contest.bare()
        ways: dict[str, Callable[[int], object]] = {
            "keepsight: encoder and prefill": lambda _: contest.keepsight(),
            "transformers: encoder and prefill": lambda _: contest.transformers(),
            "bare products and attention": lambda _: contest.bare(),
            "keepsight: encoder": lambda _: contest.encode(),
            "bare encoder": lambda _: contest.bare_encoder(),
        }
        times = time_in_turn(ways, range(arguments.runs))
    print(f"{arguments.threads} threads, medians of {arguments.runs}, float32; logits differ by {error:.1e}")
    for name, taken in times.items():
        print(f"{name:36s} {statistics.median(taken) * 1000:9.0f} ms, least {min(taken) * 1000:.0f}")
    whole, encoder = "keepsight: encoder and prefill", "keepsight: encoder"
    ratios = {
        "keepsight / bare": (whole, "bare products and attention"),
        "keepsight / bare, encoder": (encoder, "bare encoder"),
        "keepsight / transformers": (whole, "transformers: encoder and prefill"),
    }
    for name, (one, other) in ratios.items():
        least = min(times[one]) / min(times[other])
        print(f"{name:26s}{paired_ratio(times, one, other):.3f}, of the least times {least:.3f}")


if __name__ == "__main__":
    main()
