"""An engine that nobody hands a processor reads it as a frontend does."""

import torch

from keepsight.config import Config
from keepsight.engine.load_engine import load_engine_alone
from keepsight.runner.model_runner import ModelRunner


def test_an_engine_normalises_as_its_operator_says() -> None:
    engine = load_engine_alone(Config(device="cpu", mm_processor_kwargs={"image_mean": 0.25, "image_std": 0.5}))
    try:
        assert isinstance(engine.runner, ModelRunner)
        assert engine.runner.normalizer is not None
        black = engine.runner.normalizer(torch.zeros(1, 1, 1, 3, dtype=torch.uint8))
        torch.testing.assert_close(black.float(), torch.full_like(black.float(), -0.5))
    finally:
        engine.runner.close()
