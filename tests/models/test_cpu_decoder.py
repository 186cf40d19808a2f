"""A decoder's layers in one call equal layers called one by one, and each token gets the same result in any batch."""

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from keepsight.models.attention import AttentionBatch, LayerCache, RequestSlice
from keepsight.models.block_table import BlockTable
from keepsight.models.decoder import Decoder
from keepsight.models.decoder_config import DecoderConfig, LayerConfig, RotaryConfig
from keepsight.models.layers import Linear, Placement
from keepsight.models.mixture import Mixture
from keepsight.models.paged_attention import PagedAttention
from tests.models.conftest import BUILDS_THAT_ROUND
from tests.models.reference_attention import ReferenceAttention

pytestmark = pytest.mark.usefixtures("build", "threads")
CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 16, 120
FAR, NEAR = RotaryConfig(1e6, 8.0), RotaryConfig(1e4)
CONFIG = DecoderConfig(
    vocab_size=50,
    hidden_size=72,
    intermediate_size=130,  # not a whole number of panels
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    layers=(LayerConfig(NEAR, 20), LayerConfig(FAR, None), LayerConfig(NEAR, 700)),
    rms_norm_eps=1e-6,
    attention_scale=0.2,
    qkv_bias=False,
    out_bias=False,
    attention_softcap=None,
    final_softcap=None,
    activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    embedding_scale=72**0.5,
    norms_results=True,
    norms_add_one=True,
)
CONFIGS = {
    "usual": CONFIG,
    "one key head": dataclasses.replace(CONFIG, num_kv_heads=1, head_dim=40, hidden_size=33, intermediate_size=7),
    "as many key heads": dataclasses.replace(CONFIG, num_kv_heads=4, head_dim=8, qkv_bias=True, out_bias=True),
    "one layer": dataclasses.replace(CONFIG, layers=CONFIG.layers[:1]),
    "no norms behind, SiLU": dataclasses.replace(CONFIG, norms_results=False, norms_add_one=False, activation="silu"),
    "no norms of heads": dataclasses.replace(CONFIG, norms_results=False, norms_heads=False, qkv_bias=True),
    "no norms, one layer": dataclasses.replace(CONFIG, norms_results=False, layers=CONFIG.layers[:1]),
}
FLOAT32 = Placement(CPU, torch.float32)
ROUNDED = Placement(CPU, torch.float32, torch.bfloat16, rounds=True, halves_kv=True)
HALVED = ROUNDED._replace(rounds=False)
QUANTIZED = FLOAT32._replace(decoder_matrix_dtype=torch.int8).for_decoder()

of_each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def make_decoder(config: DecoderConfig, place: Placement = FLOAT32) -> Decoder:
    decoder = Decoder(config, place)
    for slot in decoder.slots():
        slot.fill(torch.randn(slot.shape) / (slot.shape[-1] ** 0.5 if len(slot.shape) > 1 else 10))
    for part in decoder.modules():
        if isinstance(part, Linear | Mixture):
            part.pack()
    decoder.pack()
    return decoder


def make_caches(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> list[LayerCache]:
    shape = (NUM_BLOCKS * BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    return [LayerCache(*torch.full((2, *shape), torch.nan, dtype=dtype)) for _ in config.layers]


def slices(*pieces: tuple[int, int]) -> list[RequestSlice]:
    """Return one [start, end) slice per request, with separate pages."""
    pages = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()
    each = NUM_BLOCKS // len(pieces)
    tables = [BlockTable(BLOCK_SIZE, pages[index * each : (index + 1) * each], CPU) for index in range(len(pieces))]
    return [RequestSlice(start, end - start, table) for (start, end), table in zip(pieces, tables, strict=True)]


def compute(
    decoder: Decoder,
    hidden: Tensor,
    pieces: Sequence[RequestSlice],
    caches: Sequence[LayerCache],
    read: Sequence[int] | None = None,
) -> Tensor:
    output: Tensor = decoder(hidden, PagedAttention(), caches, AttentionBatch(pieces, CPU, read))
    return output


@of_each_config
@pytest.mark.parametrize(
    ("ends", "read"),
    [
        *itertools.product([(1,), (40,)], ["all", "the last"]),
        *itertools.product([(1, 1, 1), (30, 1, 560)], ["all", "the ends of all", "the last"]),
    ],
    ids=str,
)
def test_all_layers_at_once_give_what_they_give_one_after_another(
    config: DecoderConfig, ends: tuple[int, ...], read: str
) -> None:
    decoder, pieces = make_decoder(config), slices(*((0, end) for end in ends))
    all_ends = range(len(ends))
    batch = AttentionBatch(pieces, CPU, {"all": None, "the ends of all": all_ends, "the last": all_ends[-1:]}[read])
    hidden = torch.randn(batch.num_tokens, config.hidden_size)
    given, caches, others = hidden.clone(), make_caches(config), make_caches(config)
    at_once = decoder(hidden, PagedAttention(), caches, batch)
    in_turn = decoder(hidden, ReferenceAttention(), others, batch)
    torch.testing.assert_close(at_once, in_turn, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(caches, others, strict=True):
        # Slots of other tokens are left alone.
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-3, atol=1e-4, equal_nan=True)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-3, atol=1e-4, equal_nan=True)
    assert torch.equal(hidden, given)


def assert_same_in_whatever_company(decoder: Decoder, dtype: torch.dtype) -> None:
    """Compare whole, in pieces, beside others, and with only the last row read."""
    config, whole = decoder.config, slices((0, 600), (0, 5))
    hidden, of_other = torch.randn(600, config.hidden_size), torch.randn(5, config.hidden_size)
    caches = make_caches(config, dtype)
    expected = compute(decoder, hidden, whole[:1], caches)
    others = make_caches(config, dtype)
    for start, end in itertools.pairwise([0, 127, 300, 301, 599, 600]):
        pieces = [RequestSlice(start, end - start, whole[0].table), whole[1]]
        beside = compute(decoder, torch.cat((hidden[start:end], of_other)), pieces, others)
        assert torch.equal(beside[: end - start], expected[start:end])
        read = compute(decoder, torch.cat((hidden[start:end], of_other)), pieces, others, read=[0])
        assert torch.equal(read, expected[end - 1 : end])


@of_each_config
def test_a_token_has_the_same_numbers_in_whatever_company(config: DecoderConfig) -> None:
    assert_same_in_whatever_company(make_decoder(config), torch.float32)


@of_each_config
def test_a_token_has_the_same_numbers_with_quantized_weights(config: DecoderConfig) -> None:
    assert_same_in_whatever_company(make_decoder(config, QUANTIZED), torch.float32)


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize("build", BUILDS_THAT_ROUND, indirect=True)
@pytest.mark.parametrize("place", [ROUNDED, HALVED], ids=["products", "attention alone"])
@of_each_config
def test_a_token_has_the_same_numbers_where_something_rounds(config: DecoderConfig, place: Placement) -> None:
    assert_same_in_whatever_company(make_decoder(config, place), torch.bfloat16)


def test_keys_and_values_are_kept_in_the_precision_of_their_slots() -> None:
    decoder, hidden = make_decoder(CONFIGS["one layer"]), torch.randn(40, CONFIG.hidden_size)
    exact, kept = make_caches(decoder.config), make_caches(decoder.config, torch.bfloat16)
    for caches in (exact, kept):
        compute(decoder, hidden, slices((0, 40)), caches)
    torch.testing.assert_close(exact[0].keys.bfloat16(), kept[0].keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(exact[0].values.bfloat16(), kept[0].values, rtol=0, atol=0, equal_nan=True)


def test_a_watcher_sees_each_layer_s_output() -> None:
    decoder, hidden = make_decoder(CONFIG), torch.randn(40, CONFIG.hidden_size)
    batch, seen = AttentionBatch(slices((0, 30), (0, 10)), CPU, read=[1]), list[Tensor]()
    watched = decoder(
        hidden, PagedAttention(), make_caches(CONFIG), batch, lambda _, output: seen.append(output.clone())
    )
    assert [len(each) for each in seen] == [40, 40, 1]
    assert torch.equal(watched, decoder.norm(seen[-1]))
    assert torch.equal(watched, decoder(hidden, PagedAttention(), make_caches(CONFIG), batch))


def test_in_a_step_without_read_rows_the_last_layer_only_keeps_keys_and_values() -> None:
    decoder, hidden, outputs = make_decoder(CONFIG), torch.randn(40, CONFIG.hidden_size), list[Tensor]()
    batch, caches, others = AttentionBatch(slices((0, 40)), CPU, read=[]), make_caches(CONFIG), make_caches(CONFIG)
    held: list[Tensor] = []

    def watch(_: int, output: Tensor) -> None:
        held.append(output)
        outputs.append(output.clone())

    assert decoder(hidden, PagedAttention(), caches, batch, watch).shape == (0, CONFIG.hidden_size)
    # The last layer computes where the layer before left its output.
    assert torch.equal(held[-2], outputs[-2])
    compute(decoder, hidden, batch.slices, others)
    for ours, theirs in zip(caches, others, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(ours.values, theirs.values, rtol=0, atol=0, equal_nan=True)


def test_arguments_that_the_kernel_would_misread_are_refused() -> None:
    decoder, batch, hidden = make_decoder(CONFIG), AttentionBatch(slices((0, 40)), CPU), torch.ones(40, 72)
    for other in (hidden.double(), hidden.bfloat16(), hidden[:39], hidden[:, :71], torch.ones(40, 73), hidden[:, None]):
        with pytest.raises(AssertionError):
            decoder(other, PagedAttention(), make_caches(CONFIG), batch)


@pytest.mark.parametrize(
    "changed",
    [{"attention_softcap": 2.0}, {"head_dim": 12}, {"num_heads": 33, "num_kv_heads": 1}],
    ids=str,
)
def test_a_model_that_no_kernel_takes_is_computed_one_layer_after_another(changed: dict[str, float]) -> None:
    config = dataclasses.replace(CONFIG, **changed)  # type: ignore[arg-type]
    decoder, hidden, batch = make_decoder(config), torch.randn(40, 72), AttentionBatch(slices((0, 40)), CPU)
    outputs = [decoder(hidden, each, make_caches(config), batch) for each in (PagedAttention(), ReferenceAttention())]
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)
