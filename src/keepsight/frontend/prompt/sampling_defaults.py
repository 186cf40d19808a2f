"""A checkpoint's default sampling parameters, from its generation_config.json as vLLM reads it.

Only numbers that shape the distribution and the maximum answer length are taken; a warning names other fields that
would change an answer. `do_sample` is ignored: a temperature of 0 has to be asked for.
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
# The file's names, and ours.
_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# Fields that change transformers' answers, unless they have a neutral value.
_LEFT_OUT = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beams",
    "sequence_bias",
    "suppress_tokens",
    "typical_p",
)
_NEUTRAL: tuple[object, ...] = (None, 0, 1, [], {})


def read_sampling_defaults(directory: Path, generation_config: str | Path) -> Mapping[str, Any]:
    """Return the defaults. `generation_config`: "auto" for the checkpoint's own, if it has one; "none"; or a path to
    another folder that has one, or to a file.
    """
    if generation_config == "none":
        return {}
    path, values = _read(directory, generation_config)
    defaults = {ours: values[theirs] for theirs, ours in _NAMES.items() if values.get(theirs) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidArgumentError as error:
        raise CheckpointConfigError(path, str(error)) from error
    if left_out := [name for name in _LEFT_OUT if values.get(name) not in _NEUTRAL]:
        logger.warning("%s: %s is not supported and ignored", path, ", ".join(left_out))
    if defaults:
        logger.info("defaults for requests: %s, from %s (generation_config=%s)", defaults, path, generation_config)
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
            path, "cannot be read: generation_config must be auto, none, or an existing file or folder"
        )
    return path, read_json_object(path)
