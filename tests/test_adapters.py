"""Adapters through `LLM`: each answer equals that of merged weights, whatever else is in the batch."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from keepsight import LLM, RequestOutput, SamplingParams
from keepsight.errors import CheckpointError, InvalidArgumentError
from keepsight.lora import LoRARequest
from keepsight.observe.metric_values import Counter
from tests.adapter_folders import draw_adapter, merge, write_adapter
from tests.drawn import ask
from tests.models.borrowed import reference as ref
from tests.place import LEEWAY, placed
from tests.qwen_checkpoint import QWEN2_5_VL, QWEN3_5, make_qwen_checkpoint, reference_answer
from tests.random_checkpoint import copy_all_but_the_model, make_checkpoint
from tests.sound_checkpoint import make_sound_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
# Prompt logprobs disable prefix cache hits.
WITH_LOGPROBS = replace(GREEDY, prompt_logprobs=0)
PICTURE = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
TEXT = "Who are you, what do you see, and how many of them are there, if any?"
# Fields of a model whose tokenizer is the demo's.
OF_TOKENIZER = {"vocab_size": 910, "vocab_size_per_layer_input": 910, "max_position_embeddings": 512}


class Family(NamedTuple):
    make: Callable[[Path], Any]
    # Maps module names to those of transformers 4.
    rename: Callable[[str], str]
    # The tower's module prefix.
    tower: str = "visual."


FAMILIES = {
    "Gemma 3": Family(
        lambda directory: make_checkpoint(directory, 1, ties_embeddings=True),
        lambda name: name.replace("model.model.language_model.", "model.language_model.model."),
        "vision_tower.",
    ),
    "Qwen3-VL": Family(make_qwen_checkpoint, lambda name: name),
    "Qwen2.5-VL": Family(
        lambda directory: make_qwen_checkpoint(directory, 3, QWEN2_5_VL),
        lambda name: name.replace("model.model.language_model.", "model.model."),
    ),
    "Qwen3.5": Family(lambda directory: make_qwen_checkpoint(directory, 1, QWEN3_5), lambda name: name),
}


class Served(NamedTuple):
    family: Family
    directory: Path
    reference: Any
    merged: list[Any]
    adapters: list[LoRARequest]


@pytest.fixture(scope="module", params=[*FAMILIES.values()], ids=[*FAMILIES])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    family, directory = request.param, tmp_path_factory.mktemp("adapters")
    model = directory / "model"
    model.mkdir()
    reference = family.make(model)
    tensors = [draw_adapter(reference, 1), draw_adapter(reference, 2, "q_proj", "v_proj", "down_proj")]
    paths = [
        write_adapter(directory / "all", tensors[0], family.rename),
        write_adapter(directory / "some", tensors[1], use_rslora=True, alpha_pattern={"layers.0.self_attn.q_proj": 12}),
    ]
    merged = [merge(reference, tensors[0]), merge(reference, tensors[1], 6 / 2)]
    doubled = {name: each for name, each in tensors[1].items() if "layers.0.self_attn.q_proj" in name}
    merged[1] = merge(merged[1], doubled, (12 - 6) / 2)
    for judge in (reference, *merged):
        judge.generation_config.eos_token_id = None
    return Served(family, model, reference, merged, [LoRARequest(Path(path).name, 1, path) for path in paths])


@pytest.fixture(scope="module")
def llm(served: Served) -> Iterator[LLM]:
    options: dict[str, Any] = {"image_backend": "pil", "max_num_batched_tokens": 300, "max_num_seqs": 8}
    with LLM(served.directory, **placed(dtype="float32", enable_lora=True, **options)) as llm:
        yield llm


def exact_logprobs(output: RequestOutput) -> list[tuple[int, float]]:
    """Return each token with its exact logprob."""
    [answer] = output.outputs
    assert answer.logprobs is not None
    return [(token, logprobs[token].logprob) for token, logprobs in zip(answer.token_ids, answer.logprobs, strict=True)]


def assert_same_logprobs(one: RequestOutput, other: RequestOutput) -> None:
    """Compare logprobs, bit for bit where that is guaranteed (on a CPU)."""
    np.testing.assert_allclose(exact_logprobs(one), exact_logprobs(other), atol=LEEWAY, rtol=0)


def test_answers_equal_those_of_merged_weights_batched_and_alone(llm: LLM, served: Served) -> None:
    adapters = [served.adapters[0], None, served.adapters[1], served.adapters[0]]
    prompts = [TEXT, TEXT, TEXT, "What else?"]
    together = llm.generate(prompts, WITH_LOGPROBS, lora_request=adapters)
    judges = [served.merged[0], served.reference, served.merged[1], served.merged[0]]
    for output, judge in zip(together, judges, strict=True):
        theirs = reference_answer(judge, Path(), output.prompt_token_ids, [], 8)
        assert output.outputs[0].token_ids == theirs
        assert_prompt_logprobs_match(judge, output)
    assert len({tuple(output.outputs[0].token_ids) for output in together[:3]}) == 3
    for prompt, adapter, output in zip(prompts, adapters, together, strict=True):
        [alone] = llm.generate(prompt, WITH_LOGPROBS, lora_request=adapter)
        assert_same_logprobs(alone, output)


def test_a_vector_equals_that_of_merged_weights(llm: LLM, served: Served) -> None:
    adapters = [served.adapters[0], None]
    outputs = llm.embed([TEXT, TEXT], lora_request=adapters, use_tqdm=False)
    for output, judge in zip(outputs, (served.merged[0], served.reference), strict=True):
        ids = torch.tensor([output.prompt_token_ids])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "output_hidden_states": True}
        expected = torch.nn.functional.normalize(judge(**inputs).hidden_states[-1][0, -1], dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, atol=1e-4, rtol=0)


def assert_prompt_logprobs_match(judge: Any, output: RequestOutput) -> None:
    ids = torch.tensor([output.prompt_token_ids])
    theirs = judge(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    for position, logprobs in enumerate(output.prompt_logprobs[1:]):
        [(token, own)] = logprobs.items() if logprobs else []
        assert own.logprob == pytest.approx(theirs[position, token].item(), abs=1e-4)


def test_prefixes_are_separate_per_adapter_and_picture_embeddings_are_shared(llm: LLM, served: Served) -> None:
    llm.reset_prefix_cache()
    llm.reset_encoder_cache()
    messages, cached, num_found = ask({"type": "image", "image": PICTURE}, TEXT), list[int](), num_embeddings_found(llm)
    for adapter in (None, *served.adapters, served.adapters[0]):
        [output] = llm.chat(messages, GREEDY, lora_request=adapter)
        cached.append(output.num_cached_tokens)
    num_known = len(output.prompt_token_ids) - 1
    if "qwen3_5" in served.reference.config.model_type:
        num_known -= num_known % 16  # a state is kept at the end of a block
    assert cached == [0, 0, 0, num_known]
    assert num_embeddings_found(llm) == num_found + 2
    if "gemma3" not in served.reference.config.model_type:
        theirs = reference_answer(served.merged[0], served.directory, output.prompt_token_ids, [PICTURE], 8)
        assert output.outputs[0].token_ids == theirs


def test_adapters_apply_to_prompts_with_pictures_batched_and_alone(llm: LLM, served: Served) -> None:
    directory = Path(served.adapters[0].lora_path).parent
    tensors = draw_adapter(served.reference, 4, "", within=served.family.tower)
    eyes = LoRARequest("eyes", 1, write_adapter(directory / "eyes", tensors, served.family.rename))
    adapters = [eyes, None, served.adapters[0], eyes]
    prompts = [ask({"type": "image", "image": PICTURE}, text) for text in (TEXT, TEXT, TEXT, "What else?")]
    llm.reset_encoder_cache()
    together = llm.chat(prompts, GREEDY, lora_request=adapters)
    assert len({tuple(exact_logprobs(output)) for output in together[:3]}) == 3
    for prompt, adapter, output in zip(prompts, adapters, together, strict=True):
        llm.reset_prefix_cache()
        llm.reset_encoder_cache()
        [alone] = llm.chat(prompt, GREEDY, lora_request=adapter)
        assert_same_logprobs(alone, output)
    if "gemma3" not in served.reference.config.model_type:
        judge = merge(served.reference, tensors)
        theirs = reference_answer(judge, served.directory, together[0].prompt_token_ids, [PICTURE], 8)
        assert together[0].outputs[0].token_ids == theirs


def num_embeddings_found(llm: LLM) -> float:
    [found] = [
        metric.value
        for metric in llm.get_metrics()
        if isinstance(metric, Counter)
        and metric.name == "keepsight_cache_hits_total"
        and metric.labels == {"cache": "encoder", "tier": "device", "modality": "image"}
    ]
    return found


def test_adapters_of_the_same_name_share_no_cache_entries(llm: LLM, served: Served) -> None:
    first = served.adapters[0]
    path = Path(first.lora_path).parent / "changed"
    other = LoRARequest(first.lora_name, 1, write_adapter(path, draw_adapter(served.reference, 3)))
    outputs = [llm.generate("Which one?", GREEDY, lora_request=each)[0] for each in (first, other)]
    assert outputs[1].num_cached_tokens == 0
    assert exact_logprobs(outputs[0]) != exact_logprobs(outputs[1])


def test_an_adapter_over_the_limits_is_refused_and_others_still_load(served: Served) -> None:
    first, second = served.adapters
    with LLM(served.directory, **placed(enable_lora=True, max_loras=1, max_lora_rank=4)) as llm:
        [expected] = llm.generate(TEXT, GREEDY, lora_request=first)
        with pytest.raises(InvalidArgumentError, match="max_loras: allows 1"):
            llm.generate(TEXT, GREEDY, lora_request=second)
        for wrong in ("all", [first, first]):
            with pytest.raises(InvalidArgumentError, match=r"lora_request: must be a LoRARequest, or a list of 1"):
                llm.generate(TEXT, GREEDY, lora_request=wrong)  # type: ignore[arg-type]
        assert_same_logprobs(llm.generate(TEXT, GREEDY, lora_request=[first])[0], expected)


def test_an_adapter_needs_enable_lora_and_an_existing_folder(served: Served) -> None:
    with LLM(served.directory, **placed()) as llm, pytest.raises(InvalidArgumentError, match="enable_lora=True"):
        llm.chat(ask(TEXT), GREEDY, lora_request=served.adapters[0])
    with pytest.raises(CheckpointError, match=r"it has no adapter_config\.json"):
        LLM(**placed(enable_lora=True, lora_modules=[{"name": "a", "path": str(served.directory)}]))


def test_an_audio_model_takes_adapters(tmp_path: Path) -> None:
    reference = make_sound_checkpoint(tmp_path / "model")
    tensors = draw_adapter(reference, 1)
    path = write_adapter(
        tmp_path / "a", tensors, lambda name: name.replace("model.model.language_model.", "model.language_model.model.")
    )
    with LLM(tmp_path / "model", **placed(enable_lora=True)) as llm:
        [output] = llm.generate(TEXT, GREEDY, lora_request=LoRARequest("a", 1, path))
    theirs = reference_answer(merge(reference, tensors), Path(), output.prompt_token_ids, [], 8)
    assert output.outputs[0].token_ids == theirs


@pytest.mark.parametrize(
    "architecture",
    [
        *("LlamaForCausalLM", "Phi3ForCausalLM", "Gemma4ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3_5MoeForCausalLM"),
        *("Lfm2ForCausalLM", "FalconH1ForCausalLM"),
    ],
)
def test_every_linear_layer_of_a_borrowed_decoder_takes_adapters(architecture: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    copy_all_but_the_model(model)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (model / name).unlink()
    reference = ref.make_checkpoint(model, architecture, {**ref.SMALL, **ref.TEXT_MODELS[architecture], **OF_TOKENIZER})
    tensors = [draw_adapter(reference, seed, "", within="model.") for seed in (1, 2)]
    paths = [write_adapter(tmp_path / f"adapter-{number}", each) for number, each in enumerate(tensors)]
    judges = [merge(reference, each) for each in tensors]
    adapters = [LoRARequest(path, 1, path) for path in paths]
    options: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "block_size": 8}
    with LLM(model, **placed(dtype="float32", enable_lora=True, **options)) as llm:
        together = llm.generate([TEXT] * 4, GREEDY, lora_request=[adapters[0], None, adapters[1], adapters[0]])
    for judge, output in zip([judges[0], reference, judges[1], judges[0]], together, strict=True):
        prompt = torch.tensor(output.prompt_token_ids)
        assert output.outputs[0].token_ids == ref.greedy(judge, prompt, 8)
    assert len({tuple(output.outputs[0].token_ids) for output in together}) == 3
