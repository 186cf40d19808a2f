"""What transformers' modules cannot serve is refused at load time by a message that says what it is."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keepsight.adapter_folder import AdapterFolder
from keepsight.errors import (
    CheckpointConfigError,
    CheckpointError,
    ModelTooLargeError,
    NotFiniteError,
    TensorMismatchError,
)
from keepsight.models.layers import Placement
from keepsight.models.registry import load_model
from tests.adapter_folders import draw_adapter, write_adapter
from tests.models.borrowed import reference as ref
from tests.models.borrowed.pictures import GEMMA4, LLAVA

PLACE = Placement(torch.device("cpu"), torch.float32)
TWO_WAY = {"text_config": ref.SMALL, "vision_config": {"image_size": 32, "patch_size": 8}}
ALL_PICTURES_AS_ONE = {
    "text_config": {**ref.SMALL, "head_dim": 16},
    "vit_config": {"hidden_size": 32, "num_hidden_layers": 1},
    "adapter_config": {"hidden_size": 32, "text_hidden_size": 64},
    "image_patch_id": 299,
}
FOUR_AXES = {
    "text_config": {**ref.SMALL, "head_dim": 16, "rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 2, 2, 2]}}
}

QUANTIZED_WITHIN = {"text_config": {**ref.SMALL, "quantization_config": {"quant_method": "fp8"}}}


@pytest.mark.parametrize(
    ("architecture", "arguments", "message"),
    [
        ("T5ForConditionalGeneration", {}, r"is_encoder_decoder: .*that also attends to an encoder"),
        ("BloomForCausalLM", {}, "transformers' BloomForCausalLM has its own attention"),
        ("Llama4ForCausalLM", {}, r"layer_types: 'chunked_attention' is not supported"),
        ("Qwen3VLForConditionalGeneration", {}, "adds to pictures' hidden states after several layers"),
        ("Ernie4_5_VLMoeForConditionalGeneration", {}, "computes tokens of pictures differently from text"),
        ("HunYuanVLForConditionalGeneration", FOUR_AXES, "otherwise than by their rows and columns"),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "fp8"}}, r"quantization_config: .*quantized"),
        ("LlamaForCausalLM", {"compression_config": {"format": "float-quantized"}}, r"compression_config: quantized w"),
        ("LlavaForConditionalGeneration", QUANTIZED_WITHIN, r"text_config\.quantization_config: quantized weights are"),
        ("PaliGemmaForConditionalGeneration", TWO_WAY, "use_bidirectional_attention: True: tokens that see later ones"),
    ],
)
def test_a_configuration_is_refused_by_the_field_before_weights_are_read(
    architecture: str, arguments: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    write_config(tmp_path, architecture, {**ref.SMALL, **arguments})
    with pytest.raises(CheckpointConfigError, match=message):
        load_model(tmp_path, PLACE, model_impl="transformers")


def write_config(directory: Path, architecture: str, arguments: Mapping[str, Any]) -> None:
    import transformers

    model_class: Any = getattr(transformers, architecture)
    config = json.loads(model_class.config_class(**arguments).to_json_string())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))


def test_a_configuration_that_transformers_would_need_code_beside_it_for_is_refused(tmp_path: Path) -> None:
    fields = {"architectures": ["LlamaForCausalLM"], "model_type": "nobodys", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "code.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(CheckpointConfigError, match=r"config\.json: transformers \d.* cannot read it"):
        load_model(tmp_path, PLACE)


def test_where_transformers_is_missing_it_is_said_how_to_come_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path, "LlamaForCausalLM", ref.SMALL)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"pip install 'keepsight\[transformers\]'"):
        load_model(tmp_path, PLACE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architectures: GPT2LMHeadModel needs a GPT2Config, which is not that of model_type llama",
        ),
        ({"hidden_size": "many"}, "Field 'hidden_size' expected int, got str"),
        ({"hidden_act": "nobodys"}, "hidden_act: transformers knows no 'nobodys'"),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "nobodys", "factor": 2.0}},
            r"rope_parameters\.(rope_)?type: transformers knows no 'nobodys'",
        ),
        ({"dtype": "auto"}, "dtype: 'auto' is no dtype of torch"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
    ],
)
def test_whatever_transformers_finds_wrong_is_said_in_one_line_that_names_the_checkpoint(
    tmp_path: Path, fields: Mapping[str, Any], message: str
) -> None:
    ref.make_text_checkpoint(tmp_path, "LlamaForCausalLM")
    change_config(tmp_path, fields)
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(tmp_path))}[^\n]*{message}[^\n]*\Z"):
        load_model(tmp_path, PLACE)


def change_config(directory: Path, fields: Mapping[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_picture_token_that_is_null_is_refused_by_its_field(tmp_path: Path) -> None:
    LLAVA.make_checkpoint(tmp_path)
    change_config(tmp_path, {"image_token_id": None})
    with pytest.raises(CheckpointConfigError, match=r"config\.json: image_token_id: names no token"):
        load_model(tmp_path, PLACE)


def test_no_token_for_padding_is_refused_only_where_the_modules_compute_with_it(tmp_path: Path) -> None:
    for family, folder in ((LLAVA, tmp_path / "llava"), (GEMMA4, tmp_path / "gemma4")):
        family.make_checkpoint(folder)
        text = json.loads((folder / "config.json").read_text())["text_config"]
        change_config(folder, {"text_config": {**text, "pad_token_id": None}})
    load_model(tmp_path / "llava", PLACE)
    with pytest.raises(CheckpointConfigError, match=r"config\.json: pad_token_id: is null, .*Gemma4For[^\n]*\Z"):
        load_model(tmp_path / "gemma4", PLACE)


def test_a_table_of_the_layers_without_all_tokens_is_refused_only_where_the_modules_look_beyond_it(
    tmp_path: Path,
) -> None:
    for architecture in ("Gemma3nForCausalLM", "Gemma4ForCausalLM"):
        fields = {**ref.SMALL, **ref.TEXT_MODELS[architecture], "vocab_size_per_layer_input": 200}
        ref.make_checkpoint(tmp_path / architecture, architecture, fields)
    load_model(tmp_path / "Gemma3nForCausalLM", PLACE)
    with pytest.raises(CheckpointConfigError, match=r"vocab_size_per_layer_input: layers can read only 200 of 300 tok"):
        load_model(tmp_path / "Gemma4ForCausalLM", PLACE)


def test_a_file_of_weights_that_ends_too_soon_is_refused(tmp_path: Path) -> None:
    ref.make_text_checkpoint(tmp_path, "LlamaForCausalLM")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated, or not a safetensors file: .*header"):
        load_model(tmp_path, PLACE)


def test_a_vision_config_of_a_class_that_sees_no_pictures_by_themselves_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, "LlamaForCausalLM", ref.SMALL)
    change_config(tmp_path, {"vision_config": {"image_size": 32}})
    with pytest.raises(CheckpointConfigError, match=r"LlamaForCausalLM encodes pictures in its own way"):
        load_model(tmp_path, PLACE)


@pytest.mark.parametrize("within", ["", "vision_config"])
def test_no_attention_that_a_configuration_names_is_asked_for(
    within: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be code from a hub, which transformers would download and run."""
    import transformers

    LLAVA.make_checkpoint(tmp_path)
    named = {"attn_implementation": "nobodys/kernel", "experts_implementation": "nobodys/kernel"}
    config = json.loads((tmp_path / "config.json").read_text())
    change_config(tmp_path, {within: config[within] | named} if within else named)
    asked: list[str | None] = []
    choose = transformers.PreTrainedModel._check_and_adjust_attn_implementation

    def watch(self: Any, implementation: str | None, *others: Any, **options: Any) -> Any:
        asked.append(implementation)
        return choose(self, implementation, *others, **options)

    monkeypatch.setattr(transformers.PreTrainedModel, "_check_and_adjust_attn_implementation", watch)
    load_model(tmp_path, PLACE)
    assert asked
    assert "nobodys/kernel" not in asked


def test_values_that_are_wider_than_keys_are_refused(tmp_path: Path) -> None:
    ref.make_checkpoint(tmp_path, "MiniCPM3ForCausalLM", {**ref.SMALL, **ref.LATENT, "qk_nope_head_dim": 4})
    with pytest.raises(CheckpointConfigError, match=r"shape \[4, 12\], its values \[4, 16\]: .* values no wider"):
        load_model(tmp_path, PLACE)


def test_a_window_that_the_modules_do_not_tell_of_is_refused(tmp_path: Path) -> None:
    ref.make_checkpoint(tmp_path, "PhimoeForCausalLM", {**ref.SMALL, **ref.SPARSE, "sliding_window": 255})
    with pytest.raises(CheckpointConfigError, match="layer 0 sees all positions, a sliding_attention of 255 was exp"):
        load_model(tmp_path, PLACE)


def test_pictures_whose_tokens_see_those_of_other_pictures_are_refused(tmp_path: Path) -> None:
    import transformers

    if not hasattr(transformers, "Molmo2ForConditionalGeneration"):
        pytest.skip(f"TRANSFORMERS {transformers.__version__} HAS NO MODEL WITH THIS RULE")
    ref.make_checkpoint(tmp_path, "Molmo2ForConditionalGeneration", ALL_PICTURES_AS_ONE)
    with pytest.raises(CheckpointConfigError, match=r"Molmo2For.* shows tokens of pictures to each other in an unsupp"):
        load_model(tmp_path, PLACE)


def test_attention_with_sinks_is_refused(tmp_path: Path) -> None:
    ref.make_checkpoint(tmp_path, "GptOssForCausalLM", {**ref.SMALL, **ref.SPARSE, "head_dim": 16})
    with pytest.raises(CheckpointError, match=r"config\.json: .* its attention is given attention sinks \(s_aux\)"):
        load_model(tmp_path, PLACE)


def test_weights_that_are_missing_are_named_and_never_made_up(tmp_path: Path) -> None:
    change_weights(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(TensorMismatchError, match=r"1 missing: model\.norm\.weight"):
        load_model(tmp_path, PLACE)


def test_a_weight_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    change_weights(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(
        TensorMismatchError, match=r"1 of the wrong shape: model\.norm\.weight \(is \[63\], must be \[64\]\)"
    ):
        load_model(tmp_path, PLACE)


@pytest.mark.parametrize("within", ["", "text_config"])
def test_a_configuration_may_ask_for_plain_tuples(within: str, tmp_path: Path) -> None:
    LLAVA.make_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    change_config(tmp_path, {within: config[within] | {"return_dict": False}} if within else {"return_dict": False})
    load_model(tmp_path, PLACE)


def test_a_weight_that_is_not_a_number_is_named(tmp_path: Path) -> None:
    change_weights(tmp_path, lambda tensors: tensors["model.norm.weight"].fill_(torch.nan))
    with pytest.raises(NotFiniteError, match=r"model\.norm\.weight holds NaN"):
        load_model(tmp_path, PLACE)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.uint8, "U8")])
def test_quantized_weights_that_no_configuration_tells_of_are_named(
    tmp_path: Path, dtype: torch.dtype, name: str
) -> None:
    weight = "model.layers.0.mlp.up_proj.weight"
    change_weights(tmp_path, lambda tensors: tensors.update({weight: tensors[weight].to(dtype)}))
    with pytest.raises(TensorMismatchError, match=rf"{re.escape(weight)} \(is {name}: quantized weights are not sup"):
        load_model(tmp_path, PLACE)


def test_integers_that_are_no_weights_may_be_stored_beside_them(tmp_path: Path) -> None:
    change_weights(tmp_path, lambda tensors: tensors.update({"model.position_ids": torch.arange(8)}))
    load_model(tmp_path, PLACE)


def test_a_file_beside_the_configuration_that_tells_of_quantized_weights_is_named(tmp_path: Path) -> None:
    ref.make_text_checkpoint(tmp_path, "LlamaForCausalLM")
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(CheckpointConfigError, match=r"hf_quant_config\.json: quantized weights are not supported"):
        load_model(tmp_path, PLACE)


def change_weights(directory: Path, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    ref.make_text_checkpoint(directory, "LlamaForCausalLM")
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def test_weights_for_which_there_is_no_room_are_not_read(tmp_path: Path) -> None:
    write_config(tmp_path, "LlamaForCausalLM", {**ref.SMALL, "vocab_size": 2**20})
    with pytest.raises(ModelTooLargeError, match=r"the weights take 0\.5 GiB in float32, and 0\.1 GiB"):
        load_model(tmp_path, PLACE, room=2**27)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, "LlamaForCausalLM", ref.SMALL)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: no such file"):
        load_model(tmp_path, PLACE)


def test_modules_that_do_not_heed_positions_are_found_by_the_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    ref.make_text_checkpoint(tmp_path, "LlamaForCausalLM")
    rotate = LlamaRotaryEmbedding.forward

    def rotate_by_place(self: nn.Module, hidden: Tensor, position_ids: Tensor) -> Any:
        return rotate(self, hidden, torch.arange(hidden.shape[1])[None])

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", rotate_by_place)
    with pytest.raises(CheckpointError, match=r"give wrong results: .*differ by \d+\.\d%"):
        load_model(tmp_path, PLACE)


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens", "model.layers.0.mlp.router"])
def test_an_adapter_of_what_is_no_layer_that_is_given_each_token_is_refused(name: str, tmp_path: Path) -> None:
    reference = ref.make_text_checkpoint(tmp_path, "PhimoeForCausalLM")
    tensors = draw_adapter(reference, 1, "q_proj", within="layers.1")
    adapter = write_adapter(
        tmp_path / "a", tensors, lambda known: known.replace("model.layers.1.self_attn.q_proj", name)
    )
    model = load_model(tmp_path, PLACE)
    with pytest.raises(CheckpointError, match=re.escape(name) + r"\.lora_A\.weight: of this model only linear layers"):
        model.load_adapter(AdapterFolder.read(Path(adapter)), 8)


def test_an_adapter_in_its_folder_is_refused(tmp_path: Path) -> None:
    ref.make_text_checkpoint(tmp_path, "LlamaForCausalLM")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointConfigError, match=r"adapter_config\.json: .* where peft is installed"):
        load_model(tmp_path, PLACE)


def test_a_dtype_in_a_part_that_transformers_does_not_read_is_ignored(tmp_path: Path) -> None:
    ref.make_text_checkpoint(tmp_path, "LlamaForCausalLM")
    change_config(tmp_path, {"transformers.js_config": {"dtype": "q4f16"}})
    load_model(tmp_path, PLACE)
