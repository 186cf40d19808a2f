"""The token ids that end an answer, as named by the checkpoint's configuration; needs no tokenizer."""

from pathlib import Path

from keepsight.json_fields import check_is_count, read_optional_json_object


def read_end_ids(directory: Path) -> frozenset[int] | None:
    """Return the end ids of generation_config.json, or of config.json if the former names none, or else None."""
    config_path, generation_path = directory / "config.json", directory / "generation_config.json"
    config = read_optional_json_object(config_path)
    text_config = config.get("text_config")
    sources = [(generation_path, read_optional_json_object(generation_path)), (config_path, config)]
    if isinstance(text_config, dict):
        sources.append((config_path, text_config))
    for path, values in sources:
        if (value := values.get("eos_token_id")) is not None:
            listed = value if isinstance(value, list) else [value]
            return frozenset(check_is_count(path, "eos_token_id", each) for each in listed)
    return None
