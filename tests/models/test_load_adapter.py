"""Every tensor of an adapter has its place; otherwise the adapter is refused with that tensor's name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.adapter_folder import AdapterFolder
from keepsight.errors import CheckpointError, NotFiniteError, UnreadableTensorsError
from keepsight.models.gemma3.model import Gemma3
from keepsight.models.layers import Placement
from keepsight.models.qwen3_vl.model import Qwen3VL
from tests.adapter_folders import draw_adapter, merge, write_adapter
from tests.models.gemma3 import reference as ref
from tests.models.qwen3_vl import mixture_reference

FLOAT32 = Placement(torch.device("cpu"), torch.float32)
LAYER = "base_model.model.model.language_model.layers.0."
Models = tuple[Any, Gemma3]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    reference = ref.make_reference(ref.draw_config(2), 2)
    directory = ref.save_checkpoint(reference, tmp_path_factory.mktemp("gemma3"))
    return reference, Gemma3.from_checkpoint(directory, FLOAT32)


def load(models: Models, directory: Path, tensors: dict[str, Tensor], **config: Any) -> None:
    models[1].load_adapter(AdapterFolder.read(Path(write_adapter(directory, tensors, **config))), 4)


def drawn(models: Models) -> dict[str, Tensor]:
    return draw_adapter(models[0], 1, "q_proj", "down_proj")


def test_any_float_is_taken(models: Models, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        load(models, tmp_path, {name: each.to(dtype) for name, each in drawn(models).items()})


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("mlp.down_proj.lora_magnitude_vector", torch.ones(4), "neither lora_A nor lora_B"),
        ("mlp.down_proj.weight", torch.ones(4, 4), "neither lora_A nor lora_B"),
        ("mlp.up_proj.lora_A.weight", torch.ones(4, 4), r"up_proj.lora_B.weight is missing"),
        ("mlp.down_proj.lora_B.weight", torch.ones(4, 4), r"its shape is \[4, 4\], but must be \[\d+, 4\]"),
        ("mlp.down_proj.lora_A.weight", torch.ones(3, 4), r"its shape is \[3, 4\], but must be \[4, \d+\]"),
        ("self_attn.q_proj.lora_A.weight", None, "its type is int32, but must be float32"),
    ],
    ids=str,
)
def test_a_tensor_that_does_not_fit_is_refused_by_its_name(
    models: Models, tmp_path: Path, name: str, tensor: Tensor | None, message: str
) -> None:
    tensors = drawn(models)
    tensors[LAYER + name] = tensors[LAYER + name].int() if tensor is None else tensor
    with pytest.raises(CheckpointError, match=message) as caught:
        load(models, tmp_path, tensors)
    assert f"{tmp_path}/adapter_model.safetensors: {LAYER}{name}: " in str(caught.value)


@pytest.mark.parametrize(
    "module",
    [
        "model.language_model.embed_tokens",
        "lm_head",
        "model.vision_tower.embeddings.patch_embedding",
        "model.multi_modal_projector",
        "model.language_model.layers.0.self_attn.r_proj",
        "model.language_model.layers.99.self_attn.q_proj",
    ],
)
def test_modules_that_cannot_be_adapted_are_refused_by_name(models: Models, tmp_path: Path, module: str) -> None:
    tensors = {f"base_model.model.{module}.lora_{letter}.weight": torch.ones(4, 4) for letter in "AB"}
    with pytest.raises(CheckpointError, match=rf"base_model.model.{module}.lora_A.weight: of this model only"):
        load(models, tmp_path, {**drawn(models), **tensors})


def test_pictures_are_seen_through_merged_weights_and_all_else_is_shared(models: Models, tmp_path: Path) -> None:
    reference, model = models
    tensors = draw_adapter(reference, 1, "q_proj", "v_proj", "out_proj", "fc1", "fc2", within="vision_tower.")
    size = reference.config.vision_config.image_size
    pixels = torch.randn(2, 3, size, size)
    folder = AdapterFolder.read(Path(write_adapter(tmp_path, tensors)))
    weights, before = model.load_adapter(folder, 4), model.encode_images(pixels.permute(0, 2, 3, 1))
    ours = model.encode_images(pixels.permute(0, 2, 3, 1), weights)
    torch.testing.assert_close(
        ours, merge(reference, tensors).get_image_features(pixels).pooler_output, rtol=1e-4, atol=1e-4
    )
    assert torch.equal(model.encode_images(pixels.permute(0, 2, 3, 1)), before)
    assert weights.tower is not None
    assert model.tower is not None
    assert weights.tower.get_submodule("embedding") is model.tower.embedding
    assert folder.as_adapter("any").changes_encoder
    assert not AdapterFolder.read(Path(write_adapter(tmp_path, drawn(models)))).as_adapter("any").changes_encoder


def test_one_matrix_by_two_names_is_refused(models: Models, tmp_path: Path) -> None:
    tensors = drawn(models)
    twice = {
        name.replace("model.model.language_model.", "model.language_model.model."): tensors[name].clone()
        for name in tensors
    }
    with pytest.raises(CheckpointError, match="this matrix is also adapted under another name"):
        load(models, tmp_path, {**tensors, **twice})


def test_experts_of_a_mixture_are_refused_and_its_attention_is_not(tmp_path: Path) -> None:
    reference = mixture_reference.make_reference(mixture_reference.draw_config(1), 1)
    model = Qwen3VL.from_checkpoint(ref.save_checkpoint(reference, tmp_path / "model"), FLOAT32)
    tensors = draw_adapter(reference, 1, "q_proj", "o_proj")
    folder = Path(write_adapter(tmp_path / "adapter", tensors))
    assert model.load_adapter(AdapterFolder.read(folder), 4).layers[0].keys() == {"qkv", "out"}
    experts = {f"{LAYER}mlp.experts.0.up_proj.lora_{letter}.weight": torch.ones(4, 4) for letter in "AB"}
    write_adapter(folder, {**tensors, **experts})
    with pytest.raises(CheckpointError, match=r"experts\.0\.up_proj\S+: of this model only"):
        model.load_adapter(AdapterFolder.read(folder), 4)


def test_a_rank_beyond_the_limit_is_refused_by_the_option_s_name(models: Models, tmp_path: Path) -> None:
    tensors = draw_adapter(models[0], 1, "q_proj", rank=5)
    with pytest.raises(CheckpointError, match="its rank is 5, but max_lora_rank is 4"):
        load(models, tmp_path, tensors, r=5)


def test_weights_that_their_scale_makes_infinite_are_refused(models: Models, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lora_B\.weight: multiplied by its scale, 2\.5e\+299, it overflows"):
        load(models, tmp_path, drawn(models), lora_alpha=1e300)


def test_numbers_that_torch_does_not_have_are_refused(models: Models, tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    write_adapter(tmp_path, drawn(models))
    (tmp_path / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0")
    with pytest.raises(UnreadableTensorsError, match="holds tensors of 'F4', which is not supported"):
        models[1].load_adapter(AdapterFolder.read(tmp_path), 4)


def test_files_with_nan_without_tensors_or_truncated_are_refused(models: Models, tmp_path: Path) -> None:
    tensors = drawn(models)
    tensors[LAYER + "mlp.down_proj.lora_A.weight"][0, 0] = torch.nan
    with pytest.raises(NotFiniteError, match="holds NaN"):
        load(models, tmp_path, tensors)
    with pytest.raises(CheckpointError, match="holds no tensors"):
        load(models, tmp_path, {})
    write_adapter(tmp_path, drawn(models))
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UnreadableTensorsError, match="truncated"):
        models[1].load_adapter(AdapterFolder.read(tmp_path), 4)
