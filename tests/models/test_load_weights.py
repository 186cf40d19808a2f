"""Checkpoints of every layout found in the wild load; a wrong one fails with a full list of its faults."""

import json
import re
import struct
from collections.abc import Callable
from math import inf, nan
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from keepsight.errors import (
    CheckpointConfigError,
    CheckpointError,
    ModelTooLargeError,
    NotFiniteError,
    TensorMismatchError,
    UnreadableTensorsError,
    UntiedTensorsError,
)
from keepsight.models import load_weights
from keepsight.models.gemma3.config import Gemma3Config
from keepsight.models.gemma3.model import Gemma3
from keepsight.models.layers import Placement
from tests.dequantized import QUANTIZED
from tests.models.gemma3 import reference as ref

PLACE = Placement(torch.device("cpu"), torch.float32)
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = ref.make_reference(ref.draw_config(4), 4)
    return ref.save_checkpoint(model, tmp_path_factory.mktemp("saved"))


@pytest.fixture
def rewrite(saved: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, Tensor]], dict[str, Tensor]]], Path]:
    def apply(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
        (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
        save_file(change(load_file(saved / WEIGHTS)), tmp_path / WEIGHTS)
        return tmp_path

    return apply


def state_of(directory: Path) -> dict[str, Tensor]:
    # In float64 no weight's layout changes.
    return dict(Gemma3.from_checkpoint(directory, Placement(PLACE.device, torch.float64)).state_dict())


def rename(prefixes: dict[str, str]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {}
        for name, tensor in tensors.items():
            prefix = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len)
            renamed[prefixes[prefix] + name.removeprefix(prefix)] = tensor
        return renamed

    return change


# The prefixes transformers 5 saves, and so those of `saved`.
SAVED = ("language_model.model.", "vision_tower.", "multi_modal_projector.")
LAYOUTS = {
    "published": ("language_model.model.", "vision_tower.vision_model.", "multi_modal_projector."),
    "transformers 4.52": (
        "model.language_model.",
        "model.vision_tower.vision_model.",
        "model.multi_modal_projector.",
    ),
    "transformers 5 in memory": ("model.language_model.", "model.vision_tower.", "model.multi_modal_projector."),
    "without the head": ("language_model.", "vision_tower.", "multi_modal_projector."),
    "the decoder alone": ("", "vision_tower.", "multi_modal_projector."),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_key_layouts_found_in_the_wild_load(layout: str, saved: Path, rewrite: Callable[..., Path]) -> None:
    tied = {"lm_head.": "lm_head.", "language_model.lm_head.": "language_model.lm_head."}
    directory = rewrite(rename(dict(zip(SAVED, LAYOUTS[layout], strict=True)) | tied))
    expected = state_of(saved)
    for name, tensor in state_of(directory).items():
        assert torch.equal(tensor, expected[name]), name


def test_sharded_checkpoints_load(saved: Path, tmp_path: Path) -> None:
    ref.make_reference(ref.draw_config(4), 4).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = state_of(saved)
    for name, tensor in state_of(tmp_path).items():
        assert torch.equal(tensor, expected[name]), name


def test_a_single_file_saved_over_a_sharded_checkpoint_is_what_loads(saved: Path, tmp_path: Path) -> None:
    ref.make_reference(ref.draw_config(4), 5).save_pretrained(tmp_path, max_shard_size="60KB")
    # It removes the shards but leaves their index.
    ref.make_reference(ref.draw_config(4), 4).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    expected = state_of(saved)
    for name, tensor in state_of(tmp_path).items():
        assert torch.equal(tensor, expected[name]), name


def test_a_tied_head_stored_all_the_same_is_accepted(rewrite: Callable[..., Path]) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        embeddings = tensors["language_model.model.embed_tokens.weight"]
        return {**tensors, "language_model.lm_head.weight": embeddings.clone()}

    state_of(rewrite(change))


def test_a_copy_of_the_embeddings_may_be_of_another_precision(rewrite: Callable[..., Path]) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        embeddings = tensors["language_model.model.embed_tokens.weight"]
        return {**tensors, "lm_head.weight": embeddings.to(torch.bfloat16)}

    state_of(rewrite(change))


def test_a_head_of_its_own_in_a_tied_checkpoint_is_refused_where_transformers_would_use_it(
    rewrite: Callable[..., Path],
) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        embeddings = tensors["language_model.model.embed_tokens.weight"]
        return {**tensors, "lm_head.weight": embeddings + 0.1}

    directory = rewrite(change)
    with pytest.raises(UntiedTensorsError, match=r"lm_head\.weight differs .*tie_word_embeddings"):
        state_of(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert "head.weight" in state_of(directory)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (nan, PLACE),
        (-inf, PLACE._replace(dtype=torch.bfloat16)),
        (1e6, PLACE._replace(dtype=torch.float16)),
        (nan, QUANTIZED),
    ],
    ids=str,
)
def test_weights_that_are_not_finite_are_refused(value: float, place: Placement, rewrite: Callable[..., Path]) -> None:
    name = "language_model.model.layers.0.self_attn.q_proj.weight"

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[name][-1, -1] = value
        return tensors

    with pytest.raises(NotFiniteError, match=re.escape(f"{name} holds NaN or infinity")):
        Gemma3.from_checkpoint(rewrite(spoil), place)


def test_a_quantized_model_needs_room_for_what_is_kept_of_it(saved: Path) -> None:
    num_bytes = sum(each.nbytes for each in Gemma3.from_checkpoint(saved, QUANTIZED).parameters())
    Gemma3.from_checkpoint(saved, QUANTIZED, num_bytes)
    for place, message in {
        PLACE: r"in float32, .*; --dtype bfloat16 takes half$",
        PLACE._replace(matrix_dtype=torch.bfloat16): r"in bfloat16, .*; --quantization int8 takes about half$",
        QUANTIZED: r"in float32",  # most of what is left of it is float32
    }.items():
        with pytest.raises(ModelTooLargeError, match=message):
            Gemma3.from_checkpoint(saved, place, num_bytes - 1)


def test_tensors_that_are_missing_altogether_are_named_as_keepsight_does(rewrite: Callable[..., Path]) -> None:
    with pytest.raises(TensorMismatchError) as caught:
        state_of(rewrite(lambda _: {}))
    assert "decoder.norm.weight" in caught.value.missing


def test_missing_surplus_and_misshapen_tensors_are_all_listed(rewrite: Callable[..., Path]) -> None:
    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors.pop("language_model.model.norm.weight")
        tensors.pop("vision_tower.post_layernorm.bias")
        tensors["language_model.model.layers.99.mlp.up_proj.weight"] = torch.zeros(3)
        tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = torch.zeros(5, 2)
        return tensors

    with pytest.raises(TensorMismatchError) as caught:
        state_of(rewrite(spoil))
    assert caught.value.missing == ("language_model.model.norm.weight", "vision_tower.post_layernorm.bias")
    assert caught.value.surplus == ("language_model.model.layers.99.mlp.up_proj.weight",)
    assert len(caught.value.misshapen) == 1
    assert "mm_soft_emb_norm.weight (is [5, 2], must be [" in str(caught.value)


@pytest.mark.parametrize(("dtype", "stored"), [(torch.int8, "I8"), (torch.bool, "BOOL"), (torch.complex64, "C64")])
def test_weights_that_are_not_floats_are_refused_by_name(
    dtype: torch.dtype, stored: str, rewrite: Callable[..., Path]
) -> None:
    name = "language_model.model.layers.0.self_attn.q_proj.weight"
    directory = rewrite(lambda tensors: tensors | {name: tensors[name].to(dtype)})
    with pytest.raises(TensorMismatchError) as caught:
        state_of(directory)
    assert caught.value.mistyped == (f"model.safetensors: {name} (is {stored}, must be a float)",)


def test_only_the_first_of_many_wrong_tensors_are_listed() -> None:
    message = str(TensorMismatchError("folder", [f"layers.{each}" for each in range(999)]))
    assert "999 missing: layers.0, layers.1" in message
    assert len(message) < 500


def test_one_tensor_stored_under_two_names_is_refused(rewrite: Callable[..., Path]) -> None:
    def double(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, "model.language_model.norm.weight": tensors["language_model.model.norm.weight"].clone()}

    with pytest.raises(TensorMismatchError, match="also stored as"):
        state_of(rewrite(double))


@pytest.mark.parametrize("kept_bytes", [0, 5, 1000, -1])
def test_a_truncated_file_is_named(kept_bytes: int, rewrite: Callable[..., Path]) -> None:
    path = rewrite(lambda tensors: tensors) / WEIGHTS
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(UnreadableTensorsError, match=r"model\.safetensors"):
        state_of(path.parent)


def test_a_header_that_promises_too_much_is_refused(rewrite: Callable[..., Path]) -> None:
    path = rewrite(lambda tensors: tensors) / WEIGHTS
    path.write_bytes(struct.pack("<Q", 2**62) + path.read_bytes()[8:])
    with pytest.raises(UnreadableTensorsError):
        state_of(path.parent)


def test_a_missing_weights_file_is_named(rewrite: Callable[..., Path]) -> None:
    directory = rewrite(lambda tensors: tensors)
    (directory / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: no such file$"):
        state_of(directory)


def test_shards_without_their_index_are_not_overlooked(rewrite: Callable[..., Path]) -> None:
    directory = rewrite(lambda tensors: tensors)
    (directory / WEIGHTS).rename(directory / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"no such file, and no model\.safetensors\.index\.json"):
        state_of(directory)


def test_a_weights_file_that_is_there_and_cannot_be_opened_is_not_called_missing(rewrite: Callable[..., Path]) -> None:
    directory = rewrite(lambda tensors: tensors)
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).symlink_to(WEIGHTS)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read: Too many levels"):
        state_of(directory)


@pytest.mark.parametrize("error", [RuntimeError("unable to mmap"), MemoryError("Cannot allocate memory")])
def test_a_weights_file_that_memory_cannot_hold_is_named(
    error: Exception, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(load_weights, "safe_open", refuse)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: its 0\.0 GiB cannot be mapped .*: {error}"):
        state_of(saved)


@pytest.mark.parametrize("target", ["../elsewhere.safetensors", "/etc/passwd", 7])
def test_an_index_cannot_lead_out_of_the_folder(target: object, rewrite: Callable[..., Path]) -> None:
    directory = rewrite(lambda tensors: tensors)
    (directory / WEIGHTS).unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": target}}))
    with pytest.raises(CheckpointConfigError, match="weight_map"):
        state_of(directory)


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("text_config", "num_hidden_layers", 0),
        ("text_config", "num_hidden_layers", "six"),
        ("text_config", "num_attention_heads", 7),
        ("text_config", "head_dim", 15),
        ("text_config", "layer_types", ["sliding_attention"]),
        ("text_config", "rope_parameters", {"full_attention": {"rope_type": "yarn"}}),
        ("text_config", "hidden_activation", "quick_gelu"),
        ("text_config", "use_bidirectional_attention", True),
        ("vision_config", "num_channels", 4),
        ("vision_config", "num_attention_heads", 7),
        ("vision_config", "model_type", "clip_vision_model"),
        (None, "mm_tokens_per_image", 7),
    ],
)
def test_a_bad_value_in_config_json_names_file_and_field(
    section: str | None, field: str, value: object, rewrite: Callable[..., Path]
) -> None:
    directory = rewrite(lambda tensors: tensors)
    config = json.loads((directory / "config.json").read_text())
    (config if section is None else config[section])[field] = value
    if field == "rope_parameters":
        field = "rope_type"
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointConfigError, match=rf"config\.json: .*{field}"):
        state_of(directory)


def test_a_model_that_does_not_fit_into_memory_is_refused_with_the_numbers(saved: Path) -> None:
    empty = Gemma3(Gemma3Config.from_checkpoint(saved), PLACE)
    num_bytes = sum(parameter.nbytes for parameter in empty.parameters())
    with pytest.raises(ModelTooLargeError, match=r"in float32, and .* are left; --dtype bfloat16 takes half$"):
        Gemma3.from_checkpoint(saved, PLACE, room=num_bytes - 1)
    Gemma3.from_checkpoint(saved, PLACE, room=num_bytes)
    with pytest.raises(ModelTooLargeError, match=r"in bfloat16, and 0\.0 GiB of memory are left; --quantization int8"):
        Gemma3.from_checkpoint(saved, Placement(PLACE.device, torch.bfloat16), room=0)
