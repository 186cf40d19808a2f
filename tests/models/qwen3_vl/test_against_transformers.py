"""Every stage of Qwen3-VL equals transformers' on random small configurations that vary everything."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.models import patches, vision_layer
from keepsight.models.attention import Attention
from keepsight.models.layers import Placement
from keepsight.models.paged_attention import PagedAttention
from keepsight.models.qwen3_vl.model import Qwen3VL
from keepsight.models.qwen_model import QwenModel
from tests.models.judged import CASES, DEVICES, MAX_ERROR, NUM_PICTURES, assert_close, judging, name_of_case
from tests.models.qwen3_vl import reference as ref
from tests.models.reference_attention import ReferenceAttention


@dataclass
class Pair:
    arguments: dict[str, Any]
    seed: int
    device: str
    reference: Any
    model: QwenModel
    # Consecutive moments of one film.
    most_moments: int = 1

    def prompt(self, num_pictures: int) -> ref.Prompt:
        return ref.draw_prompt(self.arguments, num_pictures, self.seed, most_moments=self.most_moments)

    def inputs(self, prompt: ref.Prompt) -> dict[str, Any]:
        return ref.reference_inputs(prompt, self.arguments, self.device)


@pytest.fixture(scope="module", params=CASES, ids=name_of_case)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    seed, device, has_kernels = request.param
    arguments = ref.draw_config(seed)
    reference = ref.make_reference(arguments, seed)
    directory = ref.save_checkpoint(reference, tmp_path_factory.mktemp("checkpoint"))
    with judging(has_kernels=has_kernels):
        model = Qwen3VL.from_checkpoint(directory, Placement(torch.device(device), torch.float32))
        yield Pair(arguments, seed, device, reference.to(device), model)


def test_the_tower_gives_the_reference_s_embeddings_and_what_is_added_behind_layers(pair: Pair) -> None:
    prompt = pair.prompt(3)
    theirs = reference_features(pair, pair.inputs(prompt))
    for item, pixels in zip(prompt.media, prompt.pixels, strict=True):
        [ours] = pair.model.encode_images(pixels[None].to(pair.device))
        assert_close(ours, next(theirs[item.modality]))


def reference_features(pair: Pair, inputs: dict[str, Any]) -> dict[str, Iterator[Tensor]]:
    """Yield features of the pictures and of the films' moments, in order."""
    features = dict[str, Iterator[Tensor]]()
    model = pair.reference.model
    if "pixel_values" in inputs:
        grids = inputs["image_grid_thw"]
        features["image"] = joined(model.get_image_features(inputs["pixel_values"], grids), grids)
    if "pixel_values_videos" in inputs:
        grids = inputs["video_grid_thw"]
        features["video"] = joined(model.get_video_features(inputs["pixel_values_videos"], grids), grids)
    return features


def joined(theirs: Any, grids: Tensor) -> Iterator[Tensor]:
    lengths = list(map(len, theirs.pooler_output))
    # Each layer's features of all pictures, which transformers 5.17 concatenates.
    layers = [
        torch.split(each, lengths) if isinstance(each, Tensor) else each
        for each in getattr(theirs, "deepstack_features", ())
    ]
    for index, output in enumerate(theirs.pooler_output):
        deep = (features[index] for features in layers)
        yield from torch.cat([output, *deep], dim=-1).chunk(int(grids[index, 0]))


def test_pictures_of_one_size_may_be_encoded_together_and_some_patches_at_a_time(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels, *_ = pair.prompt(1).pixels
    both = torch.stack([pixels, pixels.flip(0, 1)]).to(pair.device)
    alone = torch.cat([pair.model.encode_images(each[None]) for each in both])
    monkeypatch.setattr(vision_layer, "ROWS_PER_CPU_GROUP", 3)
    monkeypatch.setattr(vision_layer, "ROWS_OF_ATTENTION", 2)
    assert_close(pair.model.encode_images(both), alone)


def test_embedding_and_merging_are_cut_into_parts_as_layers_are(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    side = pair.model.shape.patch_size * ref.MERGE_SIZE
    pixels = torch.zeros(1, 6 * side, 4 * side, 3, device=pair.device)
    monkeypatch.setattr(vision_layer, "ROWS_PER_CPU_GROUP", 4 * ref.MERGE_SIZE**2)
    patched = [hidden.shape[1] for hidden in watch_rows(pair, monkeypatch, pixels)]
    assert set(patched) == ({4 * ref.MERGE_SIZE**2} if pair.device == "cpu" else {24 * ref.MERGE_SIZE**2})


def watch_rows(pair: Pair, monkeypatch: pytest.MonkeyPatch, pixels: Tensor) -> list[Tensor]:
    """Record the output of the patch embedding and the inputs of the mergers."""
    seen: list[Tensor] = []
    embed, merge = patches.PatchEmbedding.forward, patches.PatchMerger.forward

    def watch_embedding(self: patches.PatchEmbedding, pixels: Tensor) -> Tensor:
        seen.append(embed(self, pixels))
        return seen[-1]

    def watch_merger(self: patches.PatchMerger, given: Tensor) -> Tensor:
        seen.append(given)
        return merge(self, given)

    monkeypatch.setattr(patches.PatchEmbedding, "forward", watch_embedding)
    monkeypatch.setattr(patches.PatchMerger, "forward", watch_merger)
    pair.model.encode_images(pixels)
    return seen


def reference_stages(pair: Pair, prompt: ref.Prompt) -> tuple[list[Tensor], Tensor]:
    """Return each layer's input and the final norm's output; and the logits of all positions."""
    given: list[Tensor] = []
    decoder = pair.reference.model.language_model
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: given.append(args[0][0].clone())) for layer in decoder.layers
    ]
    output = pair.reference.model(**pair.inputs(prompt))
    for hook in hooks:
        hook.remove()
    return [*given, output.last_hidden_state[0]], pair.reference.lm_head(output.last_hidden_state)[0]


@pytest.mark.parametrize("attention", [ReferenceAttention(), PagedAttention()], ids=["reference", "paged"])
@pytest.mark.parametrize("num_pictures", NUM_PICTURES)
def test_every_decoder_layer_and_the_logits_equal(pair: Pair, num_pictures: int, attention: Attention) -> None:
    prompt = pair.prompt(num_pictures)
    states, their_logits = reference_stages(pair, prompt)
    embeddings, _ = ref.merged_embeddings(pair.model, prompt)
    assert_close(embeddings, states[0])
    layers, logits = ref.run_together(pair.model, [prompt], attention)
    for ours, theirs in zip(layers[:-1], states[1:-1], strict=True):
        assert_close(ours, theirs)
    assert_close(pair.model.decoder.norm(layers[-1]), states[-1])
    assert_close(logits, their_logits)


@pytest.mark.parametrize("attention", [ReferenceAttention(), PagedAttention()], ids=["reference", "paged"])
@pytest.mark.parametrize("read", [[], [1], [0, 2], [0, 1, 2]], ids=str)
def test_the_ends_that_are_read_are_what_they_are_when_all_is_read(
    pair: Pair, read: list[int], attention: Attention
) -> None:
    prompts = [pair.prompt(num_pictures) for num_pictures in (0, 1, 2)]
    ends = [ref.run_together(pair.model, [prompt], PagedAttention())[1][-1] for prompt in prompts]
    layers, logits = ref.run_together(pair.model, prompts, attention, read)
    assert len(logits) == len(layers[-1]) == len(read) < len(layers[-2])
    for row, index in zip(logits, read, strict=True):
        torch.testing.assert_close(row, ends[index], rtol=0, atol=MAX_ERROR)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE HERE: equality was shown on the CPU alone")
def test_all_of_the_above_ran_on_cuda_as_well() -> None:
    assert "cuda" in DEVICES
