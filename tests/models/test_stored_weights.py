"""A checkpoint with packed weights loads like one with the weights they stand for; a faulty one is refused."""

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from keepsight.errors import CheckpointError, NotFiniteError, TensorMismatchError
from keepsight.models.cpu_library import has_library
from keepsight.models.gemma3.model import Gemma3
from keepsight.models.layers import Placement
from keepsight.models.paged_attention import PagedAttention
from keepsight.models.qwen2_5_vl.model import Qwen25VL
from keepsight.models.qwen2_audio.model import Qwen2Audio
from keepsight.models.qwen3_vl.model import Qwen3VL
from tests.dequantized import QUANTIZED
from tests.models.gemma3 import reference as gemma3
from tests.models.judged import assert_close
from tests.models.qwen2_5_vl import reference as qwen2_5_vl
from tests.models.qwen2_audio import reference as qwen2_audio
from tests.models.qwen3_vl import reference as qwen3_vl
from tests.packed import METHODS, compressed_config, pack_layers

PLACE = Placement(torch.device("cpu"), torch.float32)
WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("method", METHODS)
def test_gemma3_s_logits_are_the_reference_s_whose_weights_are_whole(method: str, tmp_path: Path) -> None:
    arguments = gemma3.draw_config(8)
    reference = gemma3.make_reference(arguments, 8)
    gemma3.save_checkpoint(reference, tmp_path / "saved")
    # The tower is packed, too.
    pack_layers(reference, tmp_path / "saved", tmp_path / "packed", method)
    prompt = gemma3.draw_prompt(arguments, 1, 8)
    with torch.inference_mode():
        model = Gemma3.from_checkpoint(tmp_path / "packed", PLACE)
        theirs = reference(**gemma3.reference_inputs(prompt)).logits[0]
        assert_close(gemma3.run_model(model, prompt, PagedAttention())[1], theirs)


@pytest.mark.parametrize("method", METHODS)
def test_qwen2_5_vl_s_logits_are_the_reference_s_whose_weights_are_whole(method: str, tmp_path: Path) -> None:
    arguments = qwen2_5_vl.draw_config(5)
    reference = qwen2_5_vl.make_reference(arguments, 5)
    prompt = qwen3_vl.draw_prompt(arguments, 2, 5)
    judge(Qwen25VL, reference, prompt, qwen3_vl.reference_inputs(prompt, arguments), method, tmp_path)


def test_qwen3_vl_s_logits_are_the_reference_s_whose_weights_are_whole(tmp_path: Path) -> None:
    arguments = qwen3_vl.draw_config(5)
    reference = qwen3_vl.make_reference(arguments, 5)
    prompt = qwen3_vl.draw_prompt(arguments, 2, 5)
    judge(Qwen3VL, reference, prompt, qwen3_vl.reference_inputs(prompt, arguments), "awq", tmp_path)


def test_qwen2_audio_s_logits_are_the_reference_s_whose_weights_are_whole(tmp_path: Path) -> None:
    arguments = qwen2_audio.draw_config(4)
    reference = qwen2_audio.make_reference(arguments, 4)
    prompt = qwen2_audio.draw_prompt(arguments, 1, 4)
    config = qwen2_audio.sound_config(arguments)
    inputs = qwen2_audio.reference_inputs(prompt.token_ids, prompt.sounds, config)
    judge(Qwen2Audio, reference, prompt, inputs, "gptq", tmp_path)


def judge(
    family: Any, reference: Any, prompt: qwen3_vl.Prompt, inputs: dict[str, Any], method: str, folder: Path
) -> None:
    qwen3_vl.save_checkpoint(reference, folder / "saved")
    pack_layers(reference, folder / "saved", folder / "packed", method)
    with torch.inference_mode():
        model = family.from_checkpoint(folder / "packed", PLACE)
        assert_close(qwen3_vl.run_together(model, [prompt], PagedAttention())[1], reference(**inputs).logits[0])


@pytest.mark.skipif(not has_library(), reason="NO KERNELS FOR THE CPU HERE: nothing is quantized")
def test_packed_weights_may_be_quantized_again(tmp_path: Path) -> None:
    arguments = gemma3.draw_config(8)
    reference = gemma3.make_reference(arguments, 8, text_only=True)
    gemma3.save_checkpoint(reference, tmp_path / "saved")
    pack_layers(reference, tmp_path / "saved", tmp_path / "packed", "awq")
    gemma3.save_checkpoint(reference, tmp_path / "whole")
    prompt = gemma3.draw_prompt(arguments, 0, 8)
    with torch.inference_mode():
        models = [Gemma3.from_checkpoint(tmp_path / name, QUANTIZED) for name in ("packed", "whole")]
        ours, theirs = (gemma3.run_model(model, prompt, PagedAttention())[1] for model in models)
        assert torch.equal(ours, theirs)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder for each method, all of the same model."""
    folder = tmp_path_factory.mktemp("packed")
    reference = gemma3.make_reference(gemma3.draw_config(0), 0, text_only=True)
    gemma3.save_checkpoint(reference, folder / "saved")
    for method in METHODS:
        pack_layers(reference, folder / "saved", folder / method, method)
    return {method: folder / method for method in METHODS}


Change = Callable[[dict[str, Tensor]], None]


@pytest.fixture
def load(folders: dict[str, Path], tmp_path: Path) -> Callable[..., Gemma3]:
    def apply(method: str, change: Change = lambda _: None, **config: Any) -> Gemma3:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(folders[method], folder)
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)
        fields = json.loads((folder / "config.json").read_text())
        fields["quantization_config"] |= config
        (folder / "config.json").write_text(json.dumps(fields))
        # In float64 no weight's layout changes.
        return Gemma3.from_checkpoint(folder, Placement(PLACE.device, torch.float64))

    return apply


PREFIX = "model.layers.1.mlp.up_proj."
PARTS = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
}
EACH_PART = [(method, part) for method, parts in PARTS.items() for part in parts]


@pytest.mark.parametrize(("method", "part"), EACH_PART)
def test_a_weight_that_lacks_one_of_its_tensors_is_reported(
    method: str, part: str, load: Callable[..., Gemma3]
) -> None:
    with pytest.raises(TensorMismatchError) as caught:
        load(method, lambda tensors: tensors.pop(PREFIX + part))
    # Without its numbers it is not a weight.
    whole = PREFIX + "weight"
    assert caught.value.missing == (whole if part == PARTS[method][0] else PREFIX + part,)


@pytest.mark.parametrize(("method", "part"), EACH_PART)
def test_a_tensor_of_another_shape_is_reported(method: str, part: str, load: Callable[..., Gemma3]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[PREFIX + part] = tensors[PREFIX + part][:-1].clone()

    with pytest.raises(TensorMismatchError, match=rf"1 of the wrong shape: {PREFIX}{part} \(is \["):
        load(method, change)


@pytest.mark.parametrize(("method", "part"), EACH_PART)
def test_a_tensor_of_another_type_is_reported(method: str, part: str, load: Callable[..., Gemma3]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[PREFIX + part] = tensors[PREFIX + part].to(torch.int16)

    with pytest.raises(TensorMismatchError, match=rf"1 of the wrong type: .*{PREFIX}{part} \(is I16, must be "):
        load(method, change)


@pytest.mark.parametrize("method", ["gptq", "compressed"])
@pytest.mark.parametrize("group", [-1, 4])
def test_an_input_whose_group_does_not_exist_is_reported(method: str, group: int, load: Callable[..., Gemma3]) -> None:
    part = PARTS[method][-1] if method == "compressed" else "g_idx"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[PREFIX + part][3] = group

    with pytest.raises(CheckpointError, match=f"{PREFIX}{part} names groups beyond the 4 that exist"):
        load(method, change)


def test_a_stored_shape_that_differs_is_reported(load: Callable[..., Gemma3]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{PREFIX}weight_shape"] = tensors[f"{PREFIX}weight_shape"].flip(0)

    with pytest.raises(CheckpointError, match=rf"{PREFIX}weight_shape says \[32, 96\], must say \[96, 32\]"):
        load("compressed", change)


@pytest.mark.parametrize(
    ("method", "config", "message"),
    [
        ("gptq", {"bits": 8}, r"qweight \(is \[4, 96\], must be \[8, 96\]\)"),
        ("awq", {"group_size": 16}, r"qzeros \(is \[4, 12\], must be \[2, 12\]\)"),
        ("compressed", compressed_config(num_bits=8), r"weight_packed \(is \[96, 4\], must be \[96, 8\]\)"),
        ("compressed", compressed_config(symmetric=True), "weight_zero_point"),
    ],
)
def test_weights_that_contradict_the_configuration_are_reported(
    method: str, config: dict[str, Any], message: str, load: Callable[..., Gemma3]
) -> None:
    with pytest.raises(TensorMismatchError) as caught:
        load(method, **config)
    assert any(map(re.compile(message).search, [*caught.value.misshapen, *caught.value.surplus]))


def test_neighbouring_inputs_are_one_group_where_no_groups_are_stored(load: Callable[..., Gemma3]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("g_idx")]:
            tensors[name] = torch.arange(len(tensors[name]), dtype=torch.int32) // 8

    def remove(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("g_idx")]:
            del tensors[name]

    ours, expected = load("gptq", remove, desc_act=False).state_dict(), load("gptq", change).state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())


def test_a_weight_that_is_stored_both_whole_and_packed_is_reported(load: Callable[..., Gemma3]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{PREFIX}weight"] = torch.zeros(96, 32)

    with pytest.raises(TensorMismatchError, match=rf"{PREFIX}qweight \(also stored as {PREFIX}weight\)"):
        load("awq", change)


def test_weights_that_are_not_matrices_are_never_packed(load: Callable[..., Gemma3]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"]
        for part in PARTS["awq"]:
            tensors[f"model.norm.{part}"] = tensors[PREFIX + part].clone()

    with pytest.raises(TensorMismatchError, match=r"model.norm.qweight \(is packed, must be \[32\]\)"):
        load("awq", change)


def test_a_bias_of_zeros_may_be_where_the_model_has_none(load: Callable[..., Gemma3]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{PREFIX}bias"] = torch.zeros(96, dtype=torch.float16)

    def spoil(tensors: dict[str, Tensor]) -> None:
        change(tensors)
        tensors[f"{PREFIX}bias"][95] = 1e-3

    load("gptq", change)
    with pytest.raises(TensorMismatchError, match=rf"1 surplus: {PREFIX}bias \(is not zero\)"):
        load("gptq", spoil)


def test_scales_that_are_not_finite_are_reported_with_their_weight(load: Callable[..., Gemma3]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{PREFIX}scales"][0, 0] = inf

    with pytest.raises(NotFiniteError, match=f"{PREFIX}qweight holds NaN or infinity"):
        load("awq", change)


SHAPES = st.lists(st.sampled_from([0, 1, 2, 4, 12, 32, 96]), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.int32, torch.int64, torch.int8, torch.float16, torch.float8_e4m3fn, torch.bool])
FIELDS = ["quant_method", "bits", "group_size", "desc_act", "version", "zero_point", "checkpoint_format"]
FIELDS += ["format", "config_groups"]
VALUES = st.none() | st.booleans() | st.integers(-2, 130) | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
VALUES |= st.sampled_from(
    ["awq", "gptq", "compressed-tensors", "fp8", "pack-quantized", "gptq_v2", {"a": {"weights": 3}}]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(list(METHODS)),
    tensors=st.dictionaries(
        st.sampled_from(sorted({part for _, part in EACH_PART})), st.tuples(SHAPES, DTYPES), max_size=2
    ),
    config=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=2),
)
def test_any_other_content_loads_or_is_refused_with_a_checkpoint_error(
    method: str,
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]],
    config: dict[str, Any],
    load: Callable[..., Gemma3],
) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        for part, (shape, dtype) in tensors.items():
            stored[PREFIX + part] = torch.ones(shape).to(dtype)

    with contextlib.suppress(CheckpointError):
        load(method, change, **config)
