"""A checkpoint published quantized loads like one whose weights are its numbers times their scales."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from keepsight.errors import CheckpointConfigError, TensorMismatchError
from keepsight.json_fields import JsonFields
from keepsight.models.gemma3.model import Gemma3
from keepsight.models.layers import Placement
from keepsight.models.packed_weights import Packing, awq, gptq
from keepsight.models.packed_weights import compressed as compressed_packing
from keepsight.models.quantized_checkpoint import check_quantization, dequantize, fits_scales, read_packing
from tests import packed
from tests.models.gemma3 import reference as ref

Quantized = tuple[Tensor, Tensor]
# In float64 no weight's layout changes.
PLACE = Placement(torch.device("cpu"), torch.float64)
LARGEST_FLOAT8 = 448
NAMED = {"fp8": "_scale_inv", "channel": "_scale", "tensor": "_scale", "int8": "_scale"}
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": WEIGHTS | weights, "input_activations": {"num_bits": 8}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}


UNLIKE = packed.compressed_config()
UNLIKE["config_groups"] |= {"group_1": packed.compressed_config(num_bits=8)["config_groups"]["group_0"]}
CONFIGS = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "channel": compressed("float-quantized", strategy="channel"),
    "tensor": compressed("float-quantized", strategy="tensor"),
    "int8": compressed("int-quantized", type="int", strategy="channel"),
}


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """Return the scale of each number."""
    rows, numbers = shape
    return torch.tensor([[float(scales[row // 128, each // 128]) for each in range(numbers)] for row in range(rows)])


def quantize(weight: Tensor, how: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers, their scales, and the weight they stand for."""
    if how == "fp8":
        blocks = [[block.abs().max() for block in torch.split(rows, 128, 1)] for rows in torch.split(weight, 128)]
        scales = torch.tensor(blocks) / LARGEST_FLOAT8
        of_each = spread(scales, weight.shape)
    elif how == "tensor":
        of_each = scales = (weight.abs().max() / LARGEST_FLOAT8)[None]
    else:
        of_each = scales = weight.abs().amax(1, keepdim=True) / (127 if how == "int8" else LARGEST_FLOAT8)
    scaled = weight / of_each
    numbers = scaled.round().to(torch.int8) if how == "int8" else scaled.to(torch.float8_e4m3fn)
    return numbers, scales, numbers.float() * of_each


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arguments = ref.draw_config(4)
    arguments["text_config"]["intermediate_size"] = 200  # more than a block
    return ref.save_checkpoint(ref.make_reference(arguments, 4), tmp_path_factory.mktemp("saved"))


Save = Callable[[str, dict[str, Any], Callable[[dict[str, Tensor], str], None]], Path]


@pytest.fixture
def save(saved: Path, tmp_path: Path) -> Save:
    def apply(name: str, config: dict[str, Any], change: Callable[[dict[str, Tensor], str], None]) -> Path:
        shutil.copytree(saved, folder := tmp_path / name)
        fields = json.loads((saved / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(fields))
        tensors = load_file(folder / "model.safetensors")
        for each in [each for each in tensors if "language_model" in each and each.endswith("proj.weight")]:
            change(tensors, each)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return apply


def state_of(folder: Path) -> dict[str, Tensor]:
    return dict(Gemma3.from_checkpoint(folder, PLACE).state_dict())


@pytest.mark.parametrize("how", NAMED)
def test_weights_are_the_stored_numbers_times_their_scales(how: str, save: Save) -> None:
    def publish(tensors: dict[str, Tensor], name: str) -> None:
        tensors[name], tensors[name + NAMED[how]], _ = quantize(tensors[name], how)
        tensors[name.replace("weight", "input_scale")] = torch.ones(1)  # scale of its input

    def stand_for(tensors: dict[str, Tensor], name: str) -> None:
        tensors[name] = quantize(tensors[name], how)[2]

    ours = state_of(save("quantized", {"quantization_config": CONFIGS[how]}, publish))
    expected = state_of(save("whole", {}, stand_for))
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("shape", [(256, 384), (128, 128)])
def test_blocks_are_as_transformers_has_them(shape: tuple[int, int]) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    numbers, scales, _ = quantize(torch.randn(shape), "fp8")
    judge: Any = Fp8Dequantize
    theirs = judge(None)._dequantize_one(numbers, scales, torch.float32)
    assert torch.equal(dequantize(numbers, scales), theirs)


def test_scales_that_do_not_fit_are_named(save: Save) -> None:
    def publish(tensors: dict[str, Tensor], name: str) -> None:
        tensors[name], scales, _ = quantize(tensors[name], "channel")
        tensors[f"{name}_scale"] = scales[:3]

    with pytest.raises(TensorMismatchError, match=r"weight_scale \(is \[3, 1\], of a weight of \["):
        state_of(save("quantized", {"quantization_config": CONFIGS["channel"]}, publish))


@pytest.mark.parametrize(
    ("num_scales", "message"), [(2, r"lm_head.weight_scale \(is \[2, 1\]"), (0, "lm_head.weight .is F8")]
)
def test_a_head_that_only_copies_the_table_needs_scales_that_fit_it_too(
    num_scales: int, message: str, save: Save
) -> None:
    def publish(tensors: dict[str, Tensor], name: str) -> None:
        table = tensors["language_model.model.embed_tokens.weight"]
        tensors["lm_head.weight"], scales, _ = quantize(table, "channel")
        if num_scales:
            tensors["lm_head.weight_scale"] = scales[:num_scales]

    with pytest.raises(TensorMismatchError, match=message):
        state_of(save("quantized", {"quantization_config": CONFIGS["channel"]}, publish))


def test_quantized_numbers_without_scales_are_refused(save: Save) -> None:
    def publish(tensors: dict[str, Tensor], name: str) -> None:
        tensors[name] = quantize(tensors[name], "fp8")[0]

    with pytest.raises(TensorMismatchError, match="is F8_E4M3, must be a float"):
        state_of(save("quantized", {"quantization_config": CONFIGS["fp8"]}, publish))


def test_few_rows_have_blocks_all_the_same() -> None:
    weight, scales = torch.ones(2, 200), torch.tensor([[3.0, 5.0]])
    assert torch.equal(dequantize(weight, scales), torch.tensor([[3.0] * 128 + [5.0] * 72] * 2))


@pytest.mark.parametrize(
    ("weight", "scales", "fits"),
    [
        ((300, 200), (3, 2), True),
        ((300, 200), (300, 1), True),
        ((300, 200), (300,), True),
        ((300, 200), (), True),
        ((4, 300, 200), (1,), True),
        ((300, 200), (2, 3), False),
        ((300, 200), (1, 200), False),
        ((4, 300, 200), (4, 3, 2), False),
    ],
)
def test_there_is_a_scale_for_all_for_each_row_or_for_each_block(
    weight: tuple[int, ...], scales: tuple[int, ...], fits: bool
) -> None:
    assert fits_scales(weight, scales) == fits


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq"}, "quant_method: 'hqq' is not supported, .*--quantization int8"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "'bitsandbytes' is not supported"),
        ({"bits": 4}, "quant_method: None is not supported"),
        (CONFIGS["fp8"] | {"weight_block_size": [64, 128]}, "weight_block_size: must be"),
        (compressed("marlin-24", strategy="channel"), "format: must be one of float-quantized"),
        (compressed("int-quantized", num_bits=4, strategy="channel"), "group_0.weights.num_bits: must be 8"),
        (compressed("int-quantized", strategy="group"), "strategy: must be one of tensor, channel"),
        (compressed("int-quantized", strategy="channel", symmetric=False), "symmetric: must be true"),
        (packed.AWQ | {"bits": 8}, "bits: must be 4, not 8"),
        (packed.AWQ | {"version": "GEMV"}, "version: must be gemm, not 'gemv'"),
        (packed.AWQ | {"version": None, "format": "gemv_fast"}, "format: must be gemm, not 'gemv_fast'"),
        (packed.AWQ | {"backend": "llm-awq"}, "backend: 'llm-awq' is not supported"),
        (packed.AWQ | {"zero_point": False}, "zero_point: must be true"),
        (packed.AWQ | {"group_size": 0}, "group_size: must be an integer of at least 1"),
        (packed.GPTQ | {"bits": 3}, "bits: must be 4 or 8, not 3"),
        (packed.GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: must be gptq or gptq_v2, not 'marlin'"),
        (packed.compressed_config(num_bits=2), "num_bits: must be 4 or 8, not 2"),
        (packed.compressed_config(type="float"), "type: must be one of int"),
        (packed.compressed_config(strategy="block"), "strategy: must be one of group, channel"),
        (packed.compressed_config() | {"config_groups": {}}, "config_groups: must be present and all alike"),
        (UNLIKE, "config_groups: must be present and all alike"),
    ],
)
def test_unsupported_quantization_is_refused_by_the_field_s_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointConfigError, match=message):
        check_quantization(JsonFields(Path("config.json"), {"quantization_config": config}))


AWQ_OF_TRANSFORMERS = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 64,
    "format": "gemm",
    "backend": "auto",
    "sym": True,
}


@pytest.mark.parametrize(
    ("config", "packing"),
    [
        (packed.AWQ | {"version": "GEMM", "group_size": -1}, awq(None)),
        (AWQ_OF_TRANSFORMERS, awq(64)),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, gptq(8, None, needs_groups=False, zeros_less=1)),
        (packed.GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(4, 8, needs_groups=True, zeros_less=0)),
        (packed.compressed_config(actorder="weight"), compressed_packing(4, 8, needs_groups=False, has_zeros=True)),
        (
            packed.compressed_config(strategy="channel", group_size=None, symmetric=True),
            compressed_packing(4, None, needs_groups=True, has_zeros=False),
        ),
        (CONFIGS["fp8"], None),
    ],
)
def test_a_configuration_says_how_weights_are_packed(config: dict[str, Any], packing: Packing | None) -> None:
    assert read_packing(JsonFields(Path("config.json"), {"quantization_config": config})) == packing
