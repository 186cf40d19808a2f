"""How a checkpoint wants to be sampled where a request does not say: its generation_config.json, as vLLM reads it.

Only numbers that shape the distribution are taken, and a longest answer.  `do_sample` is not looked at: a temperature
of 0 has to be asked for.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepsight.errors import CheckpointConfigError, InvalidArgumentError
from keepsight.json_fields import read_json_object, read_optional_json_object
from keepsight.sampling_params import SamplingParams

logger = logging.getLogger(__name__)
FILE_NAME = "generation_config.json"
# Its names, and ours.
_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_sampling_defaults(directory: Path, generation_config: str | Path) -> Mapping[str, Any]:
    """`generation_config`: "auto" is the checkpoint's own, if it has one; "none"; or another folder's, or a file."""
    if generation_config == "none":
        return {}
    path, values = _read(directory, generation_config)
    defaults = {ours: values[theirs] for theirs, ours in _NAMES.items() if values.get(theirs) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidArgumentError as error:
        raise CheckpointConfigError(path, str(error)) from error
    if defaults:
        logger.info(
            "where a request does not say, %s: %s says so (generation_config=%s)", defaults, path, generation_config
        )
    return defaults


def _read(directory: Path, generation_config: str | Path) -> tuple[Path, dict[str, Any]]:
    if generation_config == "auto":
        path = directory / FILE_NAME
        return path, read_optional_json_object(path)
    path = Path(generation_config)
    try:
        path = path / FILE_NAME if path.is_dir() else path
        is_there = path.exists()
    except OSError as error:
        raise CheckpointConfigError(path, f"cannot be read: {error.strerror}") from error
    if not is_there:
        raise CheckpointConfigError(
            path, "cannot be read: generation_config must be auto, none, or a file or folder that is there"
        )
    return path, read_json_object(path)
