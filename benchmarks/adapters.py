"""The cost of adapters in a step of a random decoder on this machine's CPU, compared to the same step without.

    PYTHONPATH=. python benchmarks/adapters.py

Rank 16 for every product, the weights in bfloat16, one thread; the fastest of many steps.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from keepsight.models.adapter_weights import AdapterWeights, LowRank, stack
from keepsight.models.attention import AttentionBatch, LayerCache, RequestSlice
from keepsight.models.block_table import BlockTable
from keepsight.models.decoder import Decoder
from keepsight.models.decoder_config import DecoderConfig, LayerConfig, RotaryConfig
from keepsight.models.layers import Linear, Placement
from keepsight.models.paged_attention import PagedAttention

BLOCK_SIZE, HEAD_DIM, NUM_LAYERS, RANK = 16, 64, 8, 16
CPU = torch.device("cpu")
PLACE = Placement(CPU, torch.float32, torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024], help="of hidden states")
    torch.set_num_threads(1)
    print("size   1 token  adapted   8 tokens  of one  of four   512 tokens  adapted   (ms)")
    for size in parser.parse_args().sizes:
        decoder = make_decoder(size)
        one, *others = (draw_adapter(decoder) for _ in range(4))
        steps: list[list[AdapterWeights | None]] = [[None], [one], [None] * 8, [one] * 8, [one, *others] * 2]
        times = [measure(decoder, adapters, start=100, length=1) for adapters in steps]
        times += [measure(decoder, adapters, start=0, length=512) for adapters in steps[:2]]
        print(f"{size:4}", *(f"{each * 1000:9.2f}" for each in times))


def make_decoder(size: int) -> Decoder:
    config = DecoderConfig(
        vocab_size=64,
        hidden_size=size,
        intermediate_size=3 * size,
        num_heads=size // HEAD_DIM,
        num_kv_heads=max(1, size // HEAD_DIM // 4),
        head_dim=HEAD_DIM,
        layers=(LayerConfig(RotaryConfig(1e4), None),) * NUM_LAYERS,
        rms_norm_eps=1e-6,
        attention_scale=HEAD_DIM**-0.5,
        qkv_bias=False,
        out_bias=False,
        attention_softcap=None,
        final_softcap=None,
        activation="silu",
        tie_word_embeddings=True,
        embedding_scale=1.0,
        norms_results=False,
        norms_add_one=False,
    )
    decoder = Decoder(config, PLACE)
    for slot in decoder.slots():
        slot.fill(draw(*slot.shape))
    for part in decoder.modules():
        if isinstance(part, Linear):
            part.pack()
    decoder.pack()
    return decoder


def draw(*shape: int) -> Tensor:
    return torch.randn(shape) * 0.02


def draw_adapter(decoder: Decoder) -> AdapterWeights:
    def pairs(linear: Linear) -> dict[str, tuple[Tensor, Tensor]]:
        return {name: (draw(RANK, linear.in_features), draw(size, RANK)) for name, size in linear.outputs.items()}

    return AdapterWeights(
        [
            {name: LowRank(PLACE, *stack(linear.outputs, pairs(linear))) for name, linear in products.items()}
            for products in decoder.products()
        ]
    )


@torch.inference_mode()
def measure(decoder: Decoder, adapters: Sequence[AdapterWeights | None], start: int, length: int) -> float:
    """Return the seconds of the fastest step that has one slice for each adapter."""
    config, num_blocks = decoder.config, -(-(start + length) // BLOCK_SIZE)
    shape = (len(adapters) * num_blocks * BLOCK_SIZE, config.num_kv_heads, HEAD_DIM)
    caches = [LayerCache(*torch.zeros(2, *shape)) for _ in config.layers]
    tables = [BlockTable(BLOCK_SIZE, range(n * num_blocks, (n + 1) * num_blocks), CPU) for n in range(len(adapters))]
    pieces = [RequestSlice(start, length, table, adapter=each) for table, each in zip(tables, adapters, strict=True)]
    hidden, attention, times = draw(len(pieces) * length, config.hidden_size), PagedAttention(), list[float]()
    for _ in range(200 if length == 1 else 5):
        began = time.perf_counter()
        decoder(hidden, attention, caches, AttentionBatch(pieces, CPU, range(len(pieces))))
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    main()
