"""An engine that nobody hands a processor reads it as a frontend does, and is ready only when all is read."""

import shutil
from pathlib import Path

import torch

from keepsight.config import Config
from keepsight.demo import checkpoint_path
from keepsight.engine.load_engine import load_engine_alone
from keepsight.runner.model_runner import ModelRunner
from keepsight.structured_outputs import StructuredOutputsParams


def test_an_engine_normalises_as_its_operator_says() -> None:
    engine = load_engine_alone(Config(device="cpu", mm_processor_kwargs={"image_mean": 0.25, "image_std": 0.5}))
    try:
        assert isinstance(engine.runner, ModelRunner)
        assert engine.runner.normalizer is not None
        black = engine.runner.normalizer(torch.zeros(1, 1, 1, 3, dtype=torch.uint8))
        torch.testing.assert_close(black.float(), torch.full_like(black.float(), -0.5))
    finally:
        engine.runner.close()


def test_nothing_of_the_vocabulary_is_read_with_the_first_guided_answer(tmp_path: Path) -> None:
    """It would keep every stream waiting."""
    folder = shutil.copytree(checkpoint_path(), tmp_path / "demo")
    engine = load_engine_alone(Config(device="cpu", model=str(folder)))
    try:
        (folder / "tokenizer.json").unlink()
        assert isinstance(engine.runner, ModelRunner)
        guide = engine.runner._guides.begin(StructuredOutputsParams(choice=["yes"]).to_grammar())
        assert guide.mask() is not None
    finally:
        engine.runner.close()
