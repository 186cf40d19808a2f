"""Every stage of Gemma 3 equals transformers' on random small configurations that vary everything."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.models import vision_layer
from keepsight.models.attention import Attention
from keepsight.models.gemma3.model import Gemma3
from keepsight.models.layers import Placement, run_to_end
from keepsight.models.paged_attention import PagedAttention
from tests.models.gemma3 import reference as ref
from tests.models.judged import CASES, DEVICES, MAX_ERROR, NUM_PICTURES, assert_close, judging, name_of_case
from tests.models.reference_attention import ReferenceAttention


def place(device: str, dtype: torch.dtype = torch.float32) -> Placement:
    return Placement(torch.device(device), dtype)


@dataclass
class Pair:
    arguments: dict[str, Any]
    seed: int
    device: str
    reference: Any
    model: Gemma3

    def prompt(self, num_pictures: int) -> ref.Prompt:
        return ref.draw_prompt(self.arguments, num_pictures, self.seed)


@pytest.fixture(scope="module", params=CASES, ids=name_of_case)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    seed, device, has_kernels = request.param
    arguments = ref.draw_config(seed)
    model = ref.make_reference(arguments, seed)
    directory = ref.save_checkpoint(model, tmp_path_factory.mktemp("checkpoint"))
    with judging(has_kernels=has_kernels):
        yield Pair(arguments, seed, device, model.to(device), Gemma3.from_checkpoint(directory, place(device)))


def reference_stages(pair: Pair, prompt: ref.Prompt) -> tuple[list[Tensor], Tensor]:
    """Return hidden states (merged embeddings, then each layer, the last normalized) and logits of all positions."""
    inputs = ref.reference_inputs(prompt, device=pair.device)
    output = pair.reference.model(**inputs, output_hidden_states=True)
    logits = pair.reference.lm_head(output.last_hidden_state)[0]
    # transformers leaves the final cap out of the multimodal class, though it reads it and applies it to text models.
    cap = pair.reference.config.text_config.final_logit_softcapping
    return [state[0] for state in output.hidden_states], logits if cap is None else torch.tanh(logits / cap) * cap


def test_the_vision_tower_sees_what_the_reference_sees(pair: Pair) -> None:
    pixels = pair.prompt(3).pixels.to(pair.device)
    theirs = pair.reference.model.vision_tower(pixel_values=pixels).last_hidden_state
    assert pair.model.tower is not None
    assert_close(run_to_end(pair.model.tower.in_parts(pixels.permute(0, 2, 3, 1))), theirs)


def test_the_tower_sees_the_same_when_it_attends_to_some_patches_at_a_time(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision_layer, "ROWS_PER_CPU_GROUP", 3)
    monkeypatch.setattr(vision_layer, "ROWS_OF_ATTENTION", 2)
    test_the_vision_tower_sees_what_the_reference_sees(pair)


def test_the_projector_gives_the_reference_s_embeddings(pair: Pair) -> None:
    pixels = pair.prompt(3).pixels.to(pair.device)
    theirs = pair.reference.get_image_features(pixels).pooler_output
    assert_close(pair.model.encode_images(pixels.permute(0, 2, 3, 1)), theirs)


@pytest.mark.parametrize("num_pictures", NUM_PICTURES)
def test_merged_embeddings_equal(pair: Pair, num_pictures: int) -> None:
    prompt = pair.prompt(num_pictures)
    states, _ = reference_stages(pair, prompt)
    assert_close(ref.merged_embeddings(pair.model, prompt), states[0])


@pytest.mark.parametrize("attention", [ReferenceAttention(), PagedAttention()], ids=["reference", "paged"])
@pytest.mark.parametrize("num_pictures", NUM_PICTURES)
def test_every_decoder_layer_and_the_logits_equal(pair: Pair, num_pictures: int, attention: Attention) -> None:
    prompt = pair.prompt(num_pictures)
    states, their_logits = reference_stages(pair, prompt)
    layers, logits = ref.run_model(pair.model, prompt, attention)
    # The reference's last hidden state is already normalized, so the last layer is judged by its logits.
    for ours, theirs in zip(layers[:-1], states[1:], strict=False):
        assert_close(ours, theirs)
    assert_close(pair.model.decoder.norm(layers[-1]), states[-1])
    assert_close(logits, their_logits)


@pytest.mark.parametrize("attention", [ReferenceAttention(), PagedAttention()], ids=["reference", "paged"])
@pytest.mark.parametrize("read", [[], [1], [0, 2], [0, 1, 2]], ids=str)
def test_the_ends_that_are_read_are_what_they_are_when_all_is_read(
    pair: Pair, read: list[int], attention: Attention
) -> None:
    prompts = [pair.prompt(num_pictures) for num_pictures in (0, 1, 2)]
    ends = [ref.run_model(pair.model, prompt, PagedAttention())[1][-1] for prompt in prompts]
    layers, logits = ref.run_together(pair.model, prompts, attention, read)
    assert len(logits) == len(layers[-1]) == len(read) < len(layers[-2])
    for row, index in zip(logits, read, strict=True):
        torch.testing.assert_close(row, ends[index], rtol=0, atol=MAX_ERROR)


@pytest.mark.parametrize("seed", [0, 3, 5, 8])
def test_text_only_checkpoints_equal_too(seed: int, tmp_path: Path) -> None:
    arguments = ref.draw_config(seed)
    reference = ref.make_reference(arguments, seed, text_only=True)
    prompt = ref.draw_prompt(arguments, 0, seed, num_words=40)
    with torch.inference_mode():
        model = Gemma3.from_checkpoint(ref.save_checkpoint(reference, tmp_path), place("cpu"))
        theirs = reference(input_ids=torch.tensor([prompt.token_ids])).logits[0]
        assert_close(ref.run_model(model, prompt, PagedAttention())[1], theirs)


def test_attention_soft_capping_is_the_reference_s_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads attn_logit_softcapping but does not pass it to its own attention, so the test does."""
    from transformers.models.gemma3 import modeling_gemma3

    eager = modeling_gemma3.eager_attention_forward
    monkeypatch.setattr(
        modeling_gemma3, "eager_attention_forward", lambda *args, **kw: eager(*args, **{**kw, "softcap": 0.5})
    )
    arguments = ref.draw_config(2)
    arguments["text_config"]["attn_logit_softcapping"] = 0.5
    reference = ref.make_reference(arguments, 2)
    prompt = ref.draw_prompt(arguments, 2, 2)
    with torch.inference_mode():
        model = Gemma3.from_checkpoint(ref.save_checkpoint(reference, tmp_path), place("cpu"))
        states = reference.model(**ref.reference_inputs(prompt), output_hidden_states=True).hidden_states
        for attention in (ReferenceAttention(), PagedAttention()):
            layers, _ = ref.run_model(model, prompt, attention)
            assert_close(layers[0], states[1][0])
            assert_close(model.decoder.norm(layers[-1]), states[-1][0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [1, 4, 7, 10])
def test_in_bfloat16_we_are_as_close_to_the_truth_as_transformers_is(seed: int, device: str, tmp_path: Path) -> None:
    """Its two attention implementations differ from each other; our error may be as large as the worse of them."""
    from transformers import Gemma3ForConditionalGeneration

    arguments = ref.draw_config(seed)
    # Rounded first, so that all compute with the same weights and only the arithmetic differs.
    directory = ref.save_checkpoint(ref.make_reference(arguments, seed).bfloat16(), tmp_path)
    prompt = ref.draw_prompt(arguments, 2, seed)

    def hidden(attention: str, dtype: torch.dtype) -> Tensor:
        reference: Any = Gemma3ForConditionalGeneration.from_pretrained(
            directory, dtype=dtype, attn_implementation=attention
        )
        inputs = ref.reference_inputs(prompt, dtype, device)
        state: Tensor = reference.to(device).model(**inputs).last_hidden_state[0]
        return state.float()

    with torch.inference_mode():
        truth = hidden("eager", torch.float32)
        their_errors = [(hidden(name, torch.bfloat16) - truth).abs().mean() for name in ("eager", "sdpa")]
        model = Gemma3.from_checkpoint(directory, place(device, torch.bfloat16))
        layers, _ = ref.run_model(model, prompt, PagedAttention())
        our_error = (model.decoder.norm(layers[-1]).float() - truth).abs().mean()
    assert our_error <= 1.1 * max(their_errors)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE HERE: equality was shown on the CPU alone")
def test_all_of_the_above_ran_on_cuda_as_well() -> None:
    assert "cuda" in DEVICES
