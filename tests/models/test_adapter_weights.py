"""Rows of adapters equal those of merged weights, and no row's bits depend on which rows are computed with it."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from keepsight.models.adapter_weights import AdapterWeights, LowRank, stack
from keepsight.models.attention import Attention, AttentionBatch, RequestSlice
from keepsight.models.block_table import BlockTable
from keepsight.models.decoder import Decoder
from keepsight.models.decoder_config import DecoderConfig
from keepsight.models.layers import Linear, Placement
from keepsight.models.paged_attention import PagedAttention
from tests.models.conftest import BUILDS_THAT_ROUND
from tests.models.reference_attention import ReferenceAttention
from tests.models.test_cpu_decoder import (
    BLOCK_SIZE,
    CONFIG,
    CONFIGS,
    CPU,
    FLOAT32,
    NUM_BLOCKS,
    QUANTIZED,
    ROUNDED,
    make_caches,
    make_decoder,
    slices,
)

pytestmark = pytest.mark.usefixtures("build")
EVERYTHING = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
of_some_configs = pytest.mark.parametrize("name", ["usual", "no norms of heads"])


Pairs = dict[str, tuple[Tensor, Tensor]]


def draw_pairs(decoder: Decoder, seed: int, outputs: Sequence[str] = EVERYTHING) -> list[dict[str, Pairs]]:
    """Draw low-rank pairs of rank 1 to 5 for each layer and product, for some of its outputs."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        drawn: Tensor = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        return drawn

    def pairs(linear: Linear) -> Pairs:
        ranks = {name: int(torch.randint(1, 6, (), generator=generator)) for name in linear.outputs if name in outputs}
        sizes = linear.outputs
        return {name: (draw(rank, linear.in_features), draw(sizes[name], rank)) for name, rank in ranks.items()}

    return [{name: pairs(linear) for name, linear in products.items()} for products in decoder.products()]


def as_weights(decoder: Decoder, pairs: list[dict[str, Pairs]], place: Placement) -> AdapterWeights:
    return AdapterWeights(
        [
            {name: LowRank(place, *stack(linear.outputs, own[name])) for name, linear in products.items() if own[name]}
            for products, own in zip(decoder.products(), pairs, strict=True)
        ]
    )


def merged(config: DecoderConfig, pairs: list[dict[str, Pairs]]) -> Decoder:
    """Return the decoder that `make_decoder` gave, with the adapter merged into its weights."""
    torch.manual_seed(0)
    decoder = make_decoder(config)
    torch.manual_seed(0)
    changed = {
        f"layers.{index}.{'mlp' if name in ('gate', 'up', 'down') else 'self_attn'}.{output}.weight": up @ down
        for index, products in enumerate(pairs)
        for name, own in products.items()
        for output, (down, up) in own.items()
    }
    other = Decoder(config, FLOAT32)
    for slot in other.slots():
        drawn = torch.randn(slot.shape) / (slot.shape[-1] ** 0.5 if len(slot.shape) > 1 else 10)
        slot.fill(drawn + changed.pop(slot.name, 0))
    assert not changed
    assert torch.equal(other.norm.scale, decoder.norm.scale)
    return other


def first_decoder(config: DecoderConfig, place: Placement = FLOAT32) -> Decoder:
    torch.manual_seed(0)
    return make_decoder(config, place)


def compute(
    decoder: Decoder,
    hidden: Sequence[Tensor],
    adapters: Sequence[AdapterWeights | None],
    attention: Attention,
    read: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Compute several whole requests in one batch. Return the rows that are read of each."""
    pages, pieces = iter(range(NUM_BLOCKS)), list[RequestSlice]()
    for own, adapter in zip(hidden, adapters, strict=True):
        table = BlockTable(BLOCK_SIZE, list(itertools.islice(pages, -(-len(own) // BLOCK_SIZE))), CPU)
        pieces.append(RequestSlice(0, len(own), table, adapter=adapter))
    batch = AttentionBatch(pieces, CPU, read)
    output = decoder(torch.cat(list(hidden)), attention, make_caches(decoder.config, dtype), batch)
    return list(output if read is not None else torch.split(output, [len(own) for own in hidden]))


@of_some_configs
@pytest.mark.parametrize("attention", [PagedAttention(), ReferenceAttention()], ids=["at once", "in turn"])
def test_rows_of_an_adapter_are_those_of_merged_weights(name: str, attention: Attention) -> None:
    config = CONFIGS[name]
    decoder = first_decoder(config)
    both = [draw_pairs(decoder, 1), draw_pairs(decoder, 2, ("k_proj", "v_proj", "down_proj"))]
    torch.manual_seed(1)
    hidden = [torch.randn(length, config.hidden_size) for length in (5, 1, 520, 3)]
    adapters = [None, *(as_weights(decoder, each, FLOAT32) for each in both)]
    ours = compute(decoder, hidden, [adapters[1], None, adapters[2], adapters[1]], attention)
    judges = [merged(config, both[0]), merged(config, []), merged(config, both[1]), merged(config, both[0])]
    for own, given, judge in zip(ours, hidden, judges, strict=True):
        [theirs] = compute(judge, [given], [None], ReferenceAttention())
        torch.testing.assert_close(own, theirs, rtol=1e-3, atol=2e-4)


def assert_same_in_whatever_company(decoder: Decoder, place: Placement) -> None:
    adapters = [
        None,
        as_weights(decoder, draw_pairs(decoder, 1), place),
        as_weights(decoder, draw_pairs(decoder, 2, ("q_proj", "up_proj")), place),
    ]
    size, dtype, attention = decoder.config.hidden_size, place.kv_dtype, PagedAttention()
    hidden = [torch.randn(length, size) for length in (7, 1, 520, 1, 40, 1)]
    of_each = [adapters[index] for index in (1, 0, 0, 2, 2, 1)]
    alone = [
        compute(decoder, [own], [its], attention, dtype=dtype)[0] for own, its in zip(hidden, of_each, strict=True)
    ]
    together = compute(decoder, hidden, of_each, attention, dtype=dtype)
    for own, expected in zip(together, alone, strict=True):
        assert torch.equal(own, expected)
    read = [0, 1, 3, 5]
    for own, index in zip(compute(decoder, hidden, of_each, attention, read, dtype), read, strict=True):
        assert torch.equal(own, alone[index][-1])


@of_some_configs
@pytest.mark.parametrize("place", [FLOAT32, QUANTIZED], ids=["float32", "int8"])
def test_no_row_depends_on_whose_rows_are_computed_with_it(name: str, place: Placement) -> None:
    assert_same_in_whatever_company(first_decoder(CONFIGS[name], place), place)


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize("build", BUILDS_THAT_ROUND, indirect=True)
def test_no_row_depends_on_others_where_products_round() -> None:
    assert_same_in_whatever_company(first_decoder(CONFIG, ROUNDED), ROUNDED)


def test_neighbours_of_one_adapter_are_computed_as_one() -> None:
    decoder = first_decoder(CONFIG)
    weights, of_tower = as_weights(decoder, draw_pairs(decoder, 1), FLOAT32), AdapterWeights([{}])
    pieces = [
        RequestSlice(0, 2, piece.table, adapter=its)
        for piece, its in zip(slices(*[(0, 2)] * 4), [None, weights, weights, of_tower], strict=True)
    ]
    batch = AttentionBatch(pieces, CPU, [0, 2])
    assert batch.adapted == [(2, 6, weights)]
    assert batch.read_part.adapted == [(1, 2, weights)]
