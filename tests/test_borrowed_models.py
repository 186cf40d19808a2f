"""Models that run on transformers' modules, end to end: their answers equal transformers' own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from keepsight import LLM, SamplingParams
from keepsight.cli.main import main
from keepsight.errors import InvalidArgumentError, UnknownArchitectureError
from keepsight.lora import LoRARequest
from keepsight.models.cpu_library import has_library
from tests.adapter_folders import draw_adapter, merge, write_adapter
from tests.dequantized import dequantize_products
from tests.drawn import ask, by_url
from tests.frontend import borrowed_like as like
from tests.frontend.adding_tokenizer import make_tokenizer_add
from tests.models.borrowed import reference as ref
from tests.models.borrowed.pictures import GEMMA4, GEMMA4_LARGE, TURNING
from tests.official_client import complete, connect
from tests.place import FLAGS, placed
from tests.random_checkpoint import copy_all_but_the_model
from tests.real_server import serving

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
# The vocabulary size is that of the tokenizer in the folder.
SIZE = {**ref.SMALL, "vocab_size": 910, "max_position_embeddings": 512}
QUESTIONS = (
    "Hello! Who are you, and what can you say of a picture?",
    "What is in the picture, and where is it?",
    "What is in the picture, and how many are there?",
)

VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
LLAMA = {"model_type": "llama"}
GEMMA4_VISION = {
    "model_type": "gemma4_vision",
    "patch_size": 7,
    "pooling_kernel_size": 2,
    "head_dim": 16,
    "num_key_value_heads": 2,
}
GEMMA4_TOKENS = {"audio_config": None, "video_token_id": 638, "audio_token_id": 639}
# For each family: text config, vision config, and other fields of config.json.
MODELS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]] = {
    "llava": (LLAMA, {"model_type": "clip_vision_model"}, {}),
    "llava_next": (
        LLAMA,
        {"model_type": "clip_vision_model"},
        {"image_grid_pinpoints": like.LLAVA_NEXT.image_processor["image_grid_pinpoints"]},
    ),
    "idefics3": (LLAMA, {}, {"scale_factor": 2}),
    "smolvlm": (LLAMA, {}, {"scale_factor": 2}),
    "internvl": ({"model_type": "qwen2"}, {"image_size": [28, 28], "patch_size": [7, 7]}, {}),
    "mistral3": (
        {"model_type": "mistral", "sliding_window": ref.WINDOW},
        {"model_type": "pixtral", "image_size": 112, "patch_size": 14},
        {"spatial_merge_size": 2},
    ),
    "aya_vision": (
        {"model_type": "cohere2"},
        {"model_type": "siglip_vision_model", "patch_size": 14},
        {"downsample_factor": 1},
    ),
    "qwen2_vl": (
        TURNING,
        {"embed_dim": 32, "hidden_size": 64, "depth": 2, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14},
        {},
    ),
    "glm4v": (TURNING, {"depth": 2, "out_hidden_size": 64, "patch_size": 14, "image_size": 112}, {}),
    "gemma4": ({**GEMMA4.text, "vocab_size_per_layer_input": 640}, GEMMA4_VISION, GEMMA4_TOKENS),
    "gemma4 seen whole": (GEMMA4_LARGE.text, GEMMA4_VISION, GEMMA4_TOKENS),
    "paddleocr_vl": ({"head_dim": 16, **TURNING}, {"spatial_merge_size": 2, "patch_size": 14, "image_size": 112}, {}),
}
# The pictures of each question, by number; the first ones are repeated.
SHOWN = ([0], [1], [0, 2], [2, 0], [0])


@pytest.mark.parametrize(
    "architecture",
    [
        *("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM"),
        *("Qwen3_5ForCausalLM", "Lfm2ForCausalLM", "FalconH1ForCausalLM"),
    ],
)
def test_text_is_answered_as_by_transformers_whatever_is_answered_beside_it(architecture: str, tmp_path: Path) -> None:
    copy_all_but_the_model(tmp_path)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / name).unlink()
    reference = ref.make_checkpoint(tmp_path, architecture, {**SIZE, **ref.TEXT_MODELS[architecture]})
    llm = LLM(tmp_path, **placed(max_num_batched_tokens=16, max_num_seqs=4, block_size=8))
    try:
        together = llm.chat([ask(question) for question in QUESTIONS], GREEDY)
        for question, output in zip(QUESTIONS, together, strict=True):
            prompt = torch.tensor(output.prompt_token_ids)
            assert output.outputs[0].token_ids == ref.greedy(reference, prompt, NUM_TOKENS)
            [again] = llm.chat(ask(question), GREEDY)
            assert again.outputs[0].token_ids == output.outputs[0].token_ids
            assert again.num_cached_tokens > 0
    finally:
        llm.close()


def test_a_text_that_is_embedded_ends_with_the_token_that_its_tokenizer_puts_after_it(tmp_path: Path) -> None:
    copy_all_but_the_model(tmp_path)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / name).unlink()
    make_tokenizer_add(tmp_path, "$A <eos>")
    reference = ref.make_checkpoint(tmp_path, "Qwen3ForCausalLM", {**SIZE, **ref.TEXT_MODELS["Qwen3ForCausalLM"]})
    judge = AutoTokenizer.from_pretrained(tmp_path)
    with LLM(tmp_path, **placed()) as llm:
        [embedded] = llm.embed(QUESTIONS[0], use_tqdm=False)
        [continued] = llm.generate(QUESTIONS[0], GREEDY, use_tqdm=False)
    whole = judge(QUESTIONS[0], return_tensors="pt").input_ids
    assert embedded.prompt_token_ids == whole[0].tolist()
    assert continued.prompt_token_ids == whole[0, :-1].tolist()
    with torch.inference_mode():
        hidden = reference.model(input_ids=whole).last_hidden_state[0, -1]
    np.testing.assert_allclose(embedded.outputs.embedding, (hidden / hidden.norm()).tolist(), atol=2e-5)


def test_asking_for_keepsight_s_own_modules_never_borrows_a_model(tmp_path: Path) -> None:
    copy_all_but_the_model(tmp_path)
    ref.make_checkpoint(tmp_path, "LlamaForCausalLM", SIZE)
    with pytest.raises(UnknownArchitectureError, match="LlamaForCausalLM"):
        LLM(tmp_path, **placed(model_impl="keepsight"))


def test_a_model_whose_layers_read_the_tokens_takes_no_prompt_as_embeddings(tmp_path: Path) -> None:
    copy_all_but_the_model(tmp_path)
    ref.make_checkpoint(tmp_path, "Gemma4ForCausalLM", {**SIZE, **ref.GEMMA4, "vocab_size_per_layer_input": 910})
    with pytest.raises(InvalidArgumentError, match=r"enable_prompt_embeds: .* also read the tokens themselves"):
        LLM(tmp_path, **placed(enable_prompt_embeds=True))


def draw_picture(seed: int) -> Image.Image:
    """Draw a picture whose size depends on the seed."""
    shape = (40 + 13 * seed, 60 - 9 * seed, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def make_checkpoint_of_pictures(directory: Path, family: like.Family, model: str = "") -> Any:
    ids = like.write_borrowed_checkpoint(directory, family)
    text, vision, others = MODELS[model or family.model_type]
    arguments = {
        "text_config": {**ref.SMALL, "vocab_size": 640, "max_position_embeddings": 2048, **text},
        "vision_config": {**VISION, **vision},
        "image_token_id": ids[family.soft_token or family.image_token],
        **others,
    }
    return ref.make_checkpoint(directory, family.architecture, arguments)


def by_transformers(reference: Any, processor: Any, prompt_ids: Sequence[int], shown: Sequence[int]) -> list[int]:
    """Return transformers' greedy answer, with inputs from its own processor."""
    made = processor(
        images=[draw_picture(seed) for seed in shown], text=[processor.image_token * len(shown)], return_tensors="pt"
    )
    prompt = torch.tensor(prompt_ids)
    arrays = {name: array for name, array in made.items() if name not in ("input_ids", "attention_mask")}
    if "mm_token_type_ids" in arrays:
        arrays["mm_token_type_ids"] = (prompt == reference.config.image_token_id)[None].int()
    return ref.greedy(reference, prompt, NUM_TOKENS, arrays)


@pytest.mark.parametrize(
    ("family", "model"),
    [*((family, family.model_type) for family in like.FAMILIES), (like.GEMMA4, "gemma4 seen whole")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pictures_are_answered_as_by_transformers_whatever_is_answered_beside_them(
    family: like.Family, model: str, tmp_path: Path
) -> None:
    reference = make_checkpoint_of_pictures(tmp_path, family, model)
    # Pictures that are seen whole need room for a whole one in a step.
    tokens_at_once = 96 if model == "gemma4 seen whole" else 64
    llm = LLM(tmp_path, **placed(max_num_batched_tokens=tokens_at_once, max_num_seqs=4, block_size=8))
    try:
        processor = like.load_reference(tmp_path, family)
        asked = [
            ask(*({"type": "image_pil", "image_pil": draw_picture(seed)} for seed in shown), "What is that?")
            for shown in SHOWN
        ]
        answers = [output.outputs[0].token_ids for output in llm.chat(asked, GREEDY)]
        for shown, messages, answer in zip(SHOWN, asked, answers, strict=True):
            [again] = llm.chat(messages, GREEDY)
            assert again.outputs[0].token_ids == answer
            assert again.num_cached_tokens > 0
            assert answer == by_transformers(reference, processor, again.prompt_token_ids, shown)
        assert answers[0] != answers[1], "pictures make no difference"
    finally:
        llm.close()


def test_a_server_answers_about_new_and_known_pictures_as_transformers_does(tmp_path: Path) -> None:
    """The rows and columns of a picture's tokens survive the transfer between processes."""
    reference = make_checkpoint_of_pictures(tmp_path, like.QWEN2_VL)
    messages = ask(*(by_url(draw_picture(seed)) for seed in (0, 2)), "What is that?")
    asked = {"model": str(tmp_path), "max_tokens": NUM_TOKENS}
    extra = {"ignore_eos": True, "return_token_ids": True}
    with serving(tmp_path / "log", str(tmp_path)) as (_, port), connect(port) as client:
        first, again = (complete(client, messages, **asked, extra_body=extra) for _ in range(2))
    expected = by_transformers(reference, like.load_reference(tmp_path, like.QWEN2_VL), first.prompt_token_ids, [0, 2])
    assert first.choices[0].token_ids == again.choices[0].token_ids == expected
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_an_adapter_changes_answers_about_pictures_as_merged_weights_would(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    reference = make_checkpoint_of_pictures(directory, like.LLAVA)
    tensors = draw_adapter(reference, 1)
    adapter = LoRARequest("a", 1, write_adapter(tmp_path / "a", tensors))
    messages = ask({"type": "image_pil", "image_pil": draw_picture(1)}, "What is that?")
    with LLM(directory, **placed(enable_lora=True)) as llm:
        adapted, plain = llm.chat([messages] * 2, GREEDY, lora_request=[adapter, None])
    processor = like.load_reference(directory, like.LLAVA)
    for judge, output in ((merge(reference, tensors), adapted), (reference, plain)):
        assert output.outputs[0].token_ids == by_transformers(judge, processor, output.prompt_token_ids, [1])
    assert adapted.outputs[0].token_ids != plain.outputs[0].token_ids


@pytest.mark.skipif(not has_library(), reason="NO KERNELS FOR THE CPU HERE: nothing is quantized")
def test_quantization_changes_only_the_decoder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    family = like.FAMILIES[0]
    reference = make_checkpoint_of_pictures(tmp_path, family)
    dequantize_products(reference.get_decoder(), reference.get_output_embeddings())
    with caplog.at_level("INFO"), LLM(tmp_path, device="cpu", dtype="float32", quantization="int8") as llm:
        [output] = llm.chat(ask({"type": "image_pil", "image_pil": draw_picture(1)}, "What is that?"), GREEDY)
    processor = like.load_reference(tmp_path, family)
    assert output.outputs[0].token_ids == by_transformers(reference, processor, output.prompt_token_ids, [1])
    assert "quantized to int8: 0.1 M of 0.2 M parameters" in caplog.text


def test_warmed_pictures_are_found_and_pinned(tmp_path: Path) -> None:
    """`pin` names entries without loading the model, so without its modules."""
    folder, picture = tmp_path / "model", tmp_path / "picture.png"
    make_checkpoint_of_pictures(folder, like.QWEN2_VL)
    draw_picture(1).save(picture)
    given = [str(picture), "--model", str(folder), *FLAGS, "--encoder-disk-cache", str(tmp_path / "kept")]
    for command in ("warm", "pin"):
        assert main(["cache", command, *given]) == 0


@pytest.mark.parametrize("model", ["gemma4", "gemma4 seen whole"])
def test_keys_of_several_shapes_and_pictures_are_found_on_disk_after_a_restart(model: str, tmp_path: Path) -> None:
    folder, disk = tmp_path / "model", tmp_path / "disk"
    make_checkpoint_of_pictures(folder, like.GEMMA4, model)
    messages = ask({"type": "image_pil", "image_pil": draw_picture(0)}, "What is that, and where is it? " * 4)
    on_disk = {"prefix_disk_cache": disk / "prefixes", "encoder_disk_cache": disk / "embeddings"}
    options = placed(max_num_batched_tokens=256, max_num_seqs=4, block_size=8, **on_disk)
    answers = []
    for _ in range(2):
        llm = LLM(folder, **options)
        try:
            [output] = llm.chat(messages, GREEDY)
        finally:
            llm.close()
        answers.append((output.outputs[0].token_ids, output.num_cached_tokens))
    (first, nothing), (second, num_cached) = answers
    assert second == first
    assert nothing == 0
    assert num_cached >= 128
