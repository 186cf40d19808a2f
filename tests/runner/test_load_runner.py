"""Settings chosen when a model is loaded, with a stand-in for the missing device."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from keepsight.config import Config
from keepsight.errors import InvalidArgumentError
from keepsight.models import cpu_library, gpu_library
from keepsight.models.cpu_library import has_library
from keepsight.models.cpu_products import gains_by_rounding, multiplies_bfloat16
from keepsight.models.layers import Placement
from keepsight.runner import load_runner
from tests.scheduling.drive import make_config

ROUNDED = Placement(
    torch.device("cpu"), torch.float32, torch.bfloat16, rounds=gains_by_rounding(), halves_kv=multiplies_bfloat16()
)

needs_library = pytest.mark.skipif(not has_library(), reason="NO KERNELS FOR THE CPU HERE: torch's are used")


def save_checkpoint(directory: Path, *dtypes: torch.dtype) -> None:
    tensors = {f"tensor{index}": torch.ones(2, dtype=dtype) for index, dtype in enumerate(dtypes)}
    save_file(tensors, directory / "model.safetensors")


def chosen(directory: Path, dtype: str) -> Placement:
    return load_runner.choose_place(Config(model=str(directory), device="cpu", dtype=dtype))


@needs_library
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_a_cpu_multiplies_checkpoints_that_are_not_bfloat16_in_float32(stored: torch.dtype, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, torch.bfloat16, stored)
    for asked in ("auto", "float32"):
        assert chosen(tmp_path, asked) == Placement(torch.device("cpu"), torch.float32, None, False)
    assert chosen(tmp_path, "bfloat16") == ROUNDED


@needs_library
def test_matrices_of_bfloat16_stay_so_and_rows_are_rounded_likewise_unless_float32_is_asked_for(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, torch.bfloat16, torch.bfloat16)
    for asked in ("auto", "bfloat16"):
        assert chosen(tmp_path, asked) == ROUNDED
    exact = chosen(tmp_path, "float32")
    assert exact == Placement(torch.device("cpu"), torch.float32, torch.bfloat16, False)
    assert exact.is_exact
    if multiplies_bfloat16():
        assert chosen(tmp_path, "auto").arithmetic != exact.arithmetic


@needs_library
def test_rows_are_not_rounded_where_that_is_slower_but_keys_and_values_still_take_half_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, torch.bfloat16)
    monkeypatch.setattr(load_runner, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(load_runner, "gains_by_rounding", lambda: False)
    whole_rows = chosen(tmp_path, "auto")
    monkeypatch.setattr(load_runner, "gains_by_rounding", lambda: True)
    rounded_rows = chosen(tmp_path, "auto")
    assert (whole_rows.rounds, rounded_rows.rounds) == (False, True)
    assert whole_rows.kv_dtype is rounded_rows.kv_dtype is torch.bfloat16
    assert not whole_rows.is_exact
    assert whole_rows.arithmetic != rounded_rows.arithmetic


@needs_library
@pytest.mark.parametrize("stored", [torch.float32, torch.float8_e4m3fn])
def test_results_of_rounded_matrices_have_other_names_where_rows_are_not_rounded(
    stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, stored)
    for may in ("gains_by_rounding", "multiplies_bfloat16"):
        monkeypatch.setattr(load_runner, may, lambda: False)
    rounded, whole = chosen(tmp_path, "bfloat16"), chosen(tmp_path, "float32")
    assert rounded.arithmetic != whole.arithmetic
    assert rounded.arithmetic_of_decoder != whole.arithmetic_of_decoder


@needs_library
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8, torch.int32])
def test_weights_published_quantized_are_kept_in_bfloat16_unless_float32_is_asked_for(
    stored: torch.dtype, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, stored, torch.float32)
    assert chosen(tmp_path, "auto").matrix_dtype is torch.bfloat16
    assert chosen(tmp_path, "float32").matrix_dtype is None


@pytest.mark.parametrize(("asked", "dtype"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_without_kernels_all_is_of_one_precision(
    asked: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_library, "_library", lambda: None)
    save_checkpoint(tmp_path, torch.bfloat16)
    assert chosen(tmp_path, asked) == Placement(torch.device("cpu"), dtype, None, False)


def quantizing(directory: Path, device: str = "cpu") -> Placement:
    return load_runner.choose_place(Config(model=str(directory), device=device, quantization="int8"))


@needs_library
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_quantization_changes_only_the_decoder_s_matrices(stored: torch.dtype, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, stored)
    place, usual = quantizing(tmp_path), chosen(tmp_path, "auto")
    assert place.for_decoder() == place._replace(matrix_dtype=torch.int8)
    assert place._replace(decoder_matrix_dtype=None) == usual == usual.for_decoder()
    # The pictures' embeddings are the same, and found again; keys and values are not.
    assert place.arithmetic == usual.arithmetic == usual.arithmetic_of_decoder
    assert place.arithmetic_of_decoder != usual.arithmetic_of_decoder


@pytest.mark.parametrize(
    ("module", "name"), [(load_runner, "name_of_build"), (torch.backends.cpu, "get_cpu_capability")]
)
def test_results_of_other_kernels_for_the_cpu_have_other_names(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where our kernels are missing, or leave something to torch, torch's depend on the processor too."""
    config = Config(device="cpu")
    place = load_runner.choose_place(config)
    before = load_runner.describe_encoder(config, place), load_runner.describe_decoder(place)
    monkeypatch.setattr(module, name, lambda: "another")
    after = load_runner.describe_encoder(config, place), load_runner.describe_decoder(place)
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_results_of_transformers_modules_have_other_names() -> None:
    configs = [Config(device="cpu", model_impl=each) for each in ("auto", "transformers")]
    place = load_runner.choose_place(configs[0])
    ours, theirs = (load_runner.describe_encoder(config, place) for config in configs)
    assert ours != theirs
    assert load_runner.describe_encoder(configs[1], place._replace(modules="transformers")) == theirs


def test_a_model_that_cannot_be_quantized_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, torch.float32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(InvalidArgumentError, match=r"quantization: int8 needs a CPU \(device=cpu\)"):
        quantizing(tmp_path, "cuda")
    for module in (cpu_library, load_runner):
        monkeypatch.setattr(module, "has_library", lambda: False)
    with pytest.raises(InvalidArgumentError, match="quantization: int8 needs the kernels for the CPU"):
        quantizing(tmp_path)


@needs_library
def test_a_start_says_what_was_quantized_and_how_small_it_is_now(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(device="cpu", quantization="int8", dtype="float32")
    with caplog.at_level("INFO"):
        model = load_runner.load_model_for(config, load_runner.choose_place(config))
    num_bytes = sum(each.nbytes for each in model.parameters() if each.dtype is torch.int8)
    assert f"quantized to int8: {num_bytes / 1e6:.1f} M of " in caplog.text
    assert not any(
        each.is_floating_point() and "decoder" in name and each.dim() > 1
        for name, each in cast("torch.nn.Module", model).named_parameters()
    )


@pytest.fixture
def prefers_cudnn() -> Iterator[None]:
    """Torch's own default."""
    was = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(was)


def model_on(place: Placement) -> SimpleNamespace:
    return SimpleNamespace(place=place, parameters=lambda: iter([torch.empty(10_000_000, device="meta")]))


@pytest.mark.usefixtures("prefers_cudnn")
def test_on_a_gpu_enforce_eager_uses_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Placement(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(load_runner, "load_model", lambda *_: model_on(place))
    monkeypatch.setattr(gpu_library._Use, "on", frozenset({"cuda"}))
    load_runner.load_model_for(Config(enforce_eager=True), place)
    assert gpu_library.kernels_for(place.device) is None


@pytest.mark.usefixtures("prefers_cudnn")
def test_a_model_that_is_loaded_next_uses_the_kernels_again(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Placement(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(load_runner, "load_model", lambda *_: model_on(place))
    monkeypatch.setattr(load_runner, "prove_kernels", lambda _: None)
    monkeypatch.setattr(gpu_library, "_load", object)
    monkeypatch.setattr(gpu_library._Use, "on", frozenset({"cuda"}))
    load_runner.load_model_for(Config(enforce_eager=True), place)
    load_runner.load_model_for(Config(), place)
    assert gpu_library.kernels_for(place.device) is not None


def test_without_a_gpu_the_log_says_that_enforce_eager_has_no_effect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = Placement(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(load_runner, "load_model", lambda *_: model_on(place))
    with caplog.at_level("INFO"):
        load_runner.load_model_for(Config(enforce_eager=True), place)
    assert "enforce_eager has no effect: there is no GPU" in caplog.text


@pytest.mark.usefixtures("prefers_cudnn")
def test_on_a_gpu_no_kernel_is_planned_anew_for_each_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Placement(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(load_runner, "load_model", lambda *_: model_on(place))
    monkeypatch.setattr(load_runner, "prove_kernels", lambda _: None)
    load_runner.load_model_for(Config(), place)
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    assert torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    assert torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("max_num_seqs", "guess_up_to", "expected"), [(1, 8, 8), (256, 8, 256), (4, 0, 4)])
def test_steps_that_guesses_fill_are_recorded_too(
    max_num_seqs: int, guess_up_to: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_runner, "ModelRunner", lambda *_, max_recorded, **__: max_recorded)
    engine_config = make_config(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=2 * max_num_seqs + 64, guess_up_to=guess_up_to
    )
    unused: Any = None
    runner: Any = load_runner.load_runner(
        Config(), unused, None, engine_config, frozenset(), unused, unused, None, None
    )
    assert runner == expected
