"""Loads transformers' modules and their weights from a checkpoint's folder, never running code from it.

Weights are read in the dtype of computation; on a CPU matrices may be converted to another later.
Invariant: no weight is missing, randomly initialized, or not finite.
"""

import logging
from collections.abc import Mapping, Set
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from keepsight.borrowed import TRANSFORMERS_MISSING
from keepsight.errors import (
    CheckpointConfigError,
    CheckpointError,
    ModelTooLargeError,
    NotFiniteError,
    TensorMismatchError,
    UnknownArchitectureError,
)
from keepsight.json_fields import JsonFields
from keepsight.models.borrowed.check_config import QUANTIZED, check_config, check_structure
from keepsight.models.layers import Placement, name_of
from keepsight.models.load_weights import is_finite, stored_tensors

logger = logging.getLogger(__name__)

_NAMES_OF_DTYPE = ("dtype", "torch_dtype")
_FLOATS = ("F64", "F32", "F16", "BF16")


def load_modules(directory: Path, place: Placement, room: int | None) -> Any:
    """Return transformers' model, a PreTrainedModel. `room`: bytes of memory that its weights may take."""
    try:
        import_module("transformers")
    except ImportError as error:
        raise CheckpointError(directory, TRANSFORMERS_MISSING) from error

    if (adapter := directory / "adapter_config.json").exists():
        why = "transformers would load this adapter only where peft is installed: remove it"
        raise CheckpointConfigError(adapter, why)
    path = directory / "config.json"
    architecture = _find_class(path)
    config = _read_config(path)
    check_config(config, path)
    skeleton = _build_without_weights(architecture, config, path)
    check_structure(skeleton, path)
    num_bytes = sum(each.numel() for each in skeleton.parameters()) * place.dtype.itemsize
    if room is not None and num_bytes > room:
        raise ModelTooLargeError(directory, num_bytes, room, name_of(place.dtype))
    _check_are_whole(directory, {name for name, _ in skeleton.named_parameters()})
    model = _read_weights(architecture, config, directory, place)
    return model.to(place.device).eval().requires_grad_(False)


def _find_class(path: Path) -> Any:
    """Return the class of transformers by its name; refuse names of other code, or of classes that do not generate."""
    import transformers

    names = JsonFields.read(path).strings("architectures")
    for name in names:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) and found.can_generate():
            return found
    raise UnknownArchitectureError(
        path,
        f"architectures: {list(names)}; transformers {transformers.__version__} can generate text with none of them",
    )


def _read_config(path: Path) -> Any:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
    except AttributeError as error:  # as for `torch.bf16`
        raise _find_wrong_dtype(JsonFields.read(path)) or error from error
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointConfigError(path, f"transformers {transformers.__version__} cannot read it: {error}") from error
    # These may name code on a hub. Setting them here also sets them on nested configurations.
    config._attn_implementation = config._experts_implementation = None
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part.return_dict = True  # a tuple's fields have no names
    return config


def _find_wrong_dtype(fields: JsonFields) -> CheckpointConfigError | None:
    for section in (fields, *fields.sections()):
        for name in _NAMES_OF_DTYPE:
            given = section.get(name)
            if isinstance(given, str) and not isinstance(getattr(torch, given, None), torch.dtype):
                return section.refuse(name, f"{given!r} is no dtype of torch")
    return None


def _build_without_weights(architecture: Any, config: Any, path: Path) -> Any:
    try:
        with torch.device("meta"):
            return architecture(config)
    except Exception as error:  # modules may raise anything
        if not isinstance(config, architecture.config_class):
            names = f"{architecture.config_class.__name__}, which is not that of model_type {config.model_type}"
            raise CheckpointConfigError(path, f"architectures: {architecture.__name__} needs a {names}") from error
        if isinstance(error, KeyError) and error.args and (field := _find_field(config.to_dict(), error.args[0])):
            raise CheckpointConfigError(path, f"{field}: transformers knows no {error.args[0]!r}") from error
        raise


def _find_field(fields: Mapping[str, Any], value: object) -> str | None:
    """Return the path of the field that has a value."""
    for name, each in fields.items():
        if isinstance(each, Mapping) and (within := _find_field(each, value)):
            return f"{name}.{within}"
        if each == value:
            return name
    return None


def _check_are_whole(directory: Path, parameters: Set[str]) -> None:
    """Refuse quantized weights that no configuration tells of: transformers would take them for the numbers.

    Buffers may be integers: positions of patches, masks.
    """
    quantized = [
        f"{name} (is {dtype}: {QUANTIZED})"
        for name, dtype in stored_tensors(directory)
        if dtype not in _FLOATS and (dtype.startswith("F") or name in parameters or name.endswith(".weight"))
    ]
    if quantized:
        raise TensorMismatchError(directory, mistyped=sorted(quantized))


def _read_weights(architecture: Any, config: Any, directory: Path, place: Placement) -> Any:
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model, told = architecture.from_pretrained(
            directory,
            config=config,
            dtype=place.dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # otherwise transformers refuses them without naming one
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(directory, f"transformers cannot load it: {error}") from error
    # transformers would initialize missing and misshapen weights randomly.
    if told["missing_keys"] or told["mismatched_keys"]:
        misshapen = sorted(
            f"{name} (is {list(stored)}, must be {list(wanted)})" for name, stored, wanted in told["mismatched_keys"]
        )
        raise TensorMismatchError(directory, missing=sorted(told["missing_keys"]), misshapen=misshapen)
    if told["unexpected_keys"]:
        logger.warning(
            "%s: ignored tensors that its model does not have: %s", directory, sorted(told["unexpected_keys"])
        )
    for name, parameter in model.named_parameters():
        if not is_finite(parameter.detach()):
            raise NotFiniteError(directory, name, name_of(parameter.dtype))
    return model
