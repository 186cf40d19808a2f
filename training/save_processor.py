"""Write all files of a checkpoint except its weights: tokenizer, chat template, processor settings."""

import shutil
from pathlib import Path

WEIGHT_FILES = ("model.safetensors", "config.json", "generation_config.json", "README.md")


def save_processor(directory: Path, *, copy_from: Path | None) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if copy_from is not None:
        for file in copy_from.iterdir():
            if file.name not in WEIGHT_FILES:
                shutil.copy(file, directory / file.name)
        return
    raise NotImplementedError
