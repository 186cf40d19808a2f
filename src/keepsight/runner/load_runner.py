"""Builds a runner from a configuration: chooses the device and precision, and loads the model.

The model is loaded first, as the engine's configuration follows from its shape.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from keepsight.borrowed import name_library
from keepsight.config import Config
from keepsight.engine_config import EngineConfig
from keepsight.errors import CheckpointError, InvalidArgumentError
from keepsight.models.cpu_library import has_library, name_of_build
from keepsight.models.cpu_products import gains_by_rounding, multiplies_bfloat16
from keepsight.models.gpu_library import use_kernels
from keepsight.models.layers import Placement
from keepsight.models.load_weights import stored_dtypes
from keepsight.models.model import Model, count_parameters
from keepsight.models.paged_attention import use_kernels_of_any_length
from keepsight.models.quantized_checkpoint import are_quantized
from keepsight.models.registry import load_model
from keepsight.processor_config import ProcessorConfig
from keepsight.runner.encode_media import Normalizer
from keepsight.runner.guide_tokens import GuideMaker
from keepsight.runner.held_adapters import HeldAdapters
from keepsight.runner.keep_freed_memory import keep_freed_memory, write_memory_ahead
from keepsight.runner.mel_spectrogram import MelSpectrogram
from keepsight.runner.model_runner import Keep, KeepStretch, ModelRunner
from keepsight.runner.normalize_pixels import PixelNormalizer
from keepsight.runner.openmp_team import set_team_size
from keepsight.runner.prove_kernels import prove_kernels

logger = logging.getLogger(__name__)
# In smaller models a product is done before a second thread has started; waiting for one on a busy machine costs a
# hundred times as much.
MIN_PARAMETERS_TO_SHARE = 8_000_000


def load_model_for(config: Config, place: Placement, room: int | None = None) -> Model:
    """Load the model; also set the number of threads, a CPU's handling of freed memory, a GPU's attention kernels."""
    if place.device.type == "cuda":
        use_kernels_of_any_length()
        # Another model in this process may have had other settings, or found that they fail: each model tries anew.
        use_kernels(not config.enforce_eager)
    elif config.enforce_eager:
        logger.info("enforce_eager has no effect: there is no GPU")
    keeps_memory = place.device.type == "cpu" and keep_freed_memory()
    try:
        model = load_model(config.directory, place, room, config.model_impl)
    except torch.OutOfMemoryError as error:  # memory is allocated before anything is read
        raise CheckpointError(config.directory, f"does not fit into the device's memory: {error}") from error
    _log_quantized(model)
    prove_kernels(model)
    _limit_threads(model)
    if keeps_memory:
        write_memory_ahead()
    return model


def _log_quantized(model: Model) -> None:
    # Some parameters of transformers' modules show another dtype than they are stored in.
    quantized = [each for each in model.parameters() if getattr(each, "kept_in", each.dtype) is torch.int8]
    if not quantized:
        return
    numbers, rows = sum(each.numel() for each in quantized), sum(each.shape[:-1].numel() for each in quantized)
    place = model.place
    before, after = numbers * (place.matrix_dtype or place.dtype).itemsize, numbers + rows * torch.float32.itemsize
    logger.info(
        "quantized to int8: %.1f M of %.1f M parameters, which take %.1f MiB instead of %.1f; all others are unchanged",
        numbers / 1e6, count_parameters(model) / 1e6, after / 2**20, before / 2**20,
    )  # fmt: skip


def load_adapters(config: Config, model: Model) -> HeldAdapters | None:
    """Load the adapters that the configuration names; others may be loaded later. None if LoRA is disabled."""
    if not config.enable_lora:
        return None
    adapters = HeldAdapters(model, config.max_loras, config.max_lora_rank)
    for name, path in config.adapter_folders.items():
        adapters.load(name, path)
    return adapters


def load_runner(
    config: Config,
    model: Model,
    processor_config: ProcessorConfig | None,
    engine_config: EngineConfig,
    end_ids: frozenset[int],
    on_finished: Callable[[], None],
    guides: GuideMaker,
    keeping: Callable[[], Keep] | None,
    keep_stretch: KeepStretch | None,
    adapters: HeldAdapters | None = None,
) -> ModelRunner:
    """Make the runner. `keeping` returns a function that stores embeddings in tiers; `keep_stretch` stores pages."""
    return ModelRunner(
        model,
        _make_normalizer(model, processor_config),
        engine_config.kv_cache,
        on_finished,
        config.encoder_share,
        end_ids=end_ids,
        embeddings_device=torch.device("cpu") if config.mm_cache_device == "cpu" else None,
        guides=guides,
        keeping=keeping,
        keep_stretch=keep_stretch,
        max_recorded=max(engine_config.scheduler.max_num_seqs, engine_config.scheduler.guess_up_to),
        max_recorded_prompt=engine_config.scheduler.max_num_batched_tokens,
        adapters=adapters,
    )


def _make_normalizer(model: Model, config: ProcessorConfig | None) -> Normalizer | None:
    """Return the function that turns pixels into the encoder's input; None if the model takes text only."""
    if config is None:
        return None
    device, dtype = model.place.device, model.place.dtype
    if config.sound is not None:
        return MelSpectrogram(config.sound, device, dtype)
    if model.shape.takes_arrays:
        return lambda carried: carried
    return PixelNormalizer(config.image, device, dtype) if model.shape.patch_size else None


def describe_encoder(config: Config, place: Placement) -> str:
    """Describe what the bits of embeddings depend on besides weights and preprocessing. Loads no model."""
    place = place._replace(modules=name_library(config.directory, config.model_impl))
    return f"{place.arithmetic}, {describe_kernels(place.device)}"


def describe_decoder(place: Placement) -> str:
    """Describe what the bits of keys and values depend on besides weights. `place`: of the loaded model."""
    return f"{place.arithmetic_of_decoder}, {describe_kernels(place.device)}"


def describe_kernels(device: torch.device) -> str:
    """Name the kernels or GPU on which the last bits of computed numbers also depend."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{name_of_build()}, {torch.backends.cpu.get_cpu_capability()} in torch"


def choose_place(config: Config) -> Placement:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise InvalidArgumentError("device", "is cuda, but torch sees no CUDA device on this machine")
    device = config.device if config.device != "auto" else ("cuda" if has_cuda else "cpu")
    dtype_on_gpu = torch.float32 if config.dtype == "float32" else torch.bfloat16
    place = _place_on_cpu(config) if device == "cpu" else Placement(torch.device(device), dtype_on_gpu)
    if config.quantization:
        _check_quantizes(place)
        place = place._replace(decoder_matrix_dtype=torch.int8)
    logger.info(
        "computing in %s (device=%s, dtype=%s, CUDA %s)",
        place.arithmetic_of_decoder, config.device, config.dtype, "present" if has_cuda else "absent",
    )  # fmt: skip
    return place


def _check_quantizes(place: Placement) -> None:
    if place.device.type != "cpu":
        raise InvalidArgumentError("quantization", "int8 needs a CPU (device=cpu), but the model is on a GPU")
    if not has_library():
        reason = "there was no compiler at installation, or the processor is a different one"
        raise InvalidArgumentError("quantization", f"int8 needs the kernels for the CPU, which are missing: {reason}")


def _place_on_cpu(config: Config) -> Placement:
    """Choose the precision on a CPU: with our kernels, everything but the matrices is float32."""
    cpu, asked = torch.device("cpu"), config.dtype
    if not has_library():
        return Placement(cpu, torch.bfloat16 if asked == "bfloat16" else torch.float32)
    # Matrices published in bfloat16 stay in bfloat16: half the memory to read, and the same numbers.
    is_half = asked == "bfloat16" or (config.directory.is_dir() and _was_half(config.directory, asked))
    if not is_half:
        return Placement(cpu, torch.float32)
    may_round = asked != "float32"
    return Placement(
        cpu, torch.float32, torch.bfloat16,
        rounds=may_round and gains_by_rounding(), halves_kv=may_round and multiplies_bfloat16(),
    )  # fmt: skip


def _was_half(directory: Path, asked: str) -> bool:
    """Return whether bfloat16 matrices can hold the checkpoint.

    Either all of it is bfloat16, so nothing is lost; or, with dtype auto, it was published quantized from bfloat16,
    though its numbers times its scales have more digits.
    """
    dtypes = stored_dtypes(directory)
    return dtypes == {"BF16"} or (asked == "auto" and are_quantized(dtypes))


def _limit_threads(model: Model) -> None:
    num_parameters = count_parameters(model)
    if num_parameters < MIN_PARAMETERS_TO_SHARE and "OMP_NUM_THREADS" not in os.environ:
        logger.info("computing on one thread: %d parameters are too few to share", num_parameters)
        set_team_size(1)
