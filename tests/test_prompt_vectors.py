"""A prompt's embedding vector is transformers' last hidden state, whatever is cached, chunked or batched with it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from keepsight import LLM, PoolingParams, SamplingParams
from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.outputs import EmbeddingRequestOutput
from tests.place import LEEWAY, placed
from tests.random_checkpoint import make_checkpoint

TEXTS = ["Hello", "What is this? A red square, and a blue circle beside it.", "Red. Blue. " * 12]
MARKED = "A picture: <start_of_image> and what it shows."
OPTIONS: dict[str, dict[str, Any]] = {
    "by default": {},
    "cut and crowded": {"max_num_batched_tokens": 20, "max_num_seqs": 2},
    "with few pages": {"num_gpu_blocks_override": 12, "block_size": 16, "max_num_batched_tokens": 32},
    "without a prefix cache": {"enable_prefix_caching": False},
}


class Pair:
    """One checkpoint, loaded by transformers and by us, with one engine setting."""

    def __init__(self, directory: Path, reference: Any, **options: Any) -> None:
        from transformers import AutoProcessor

        self.reference = reference
        from_pretrained: Any = AutoProcessor.from_pretrained
        self._processor = from_pretrained(directory, backend="pil")
        self.llm = LLM(directory, **placed(image_backend="pil", dtype="float32", **options))

    def expected(self, text: str, picture: Image.Image | None = None) -> npt.NDArray[np.float32]:
        images = {} if picture is None else {"images": [picture]}
        inputs = self._processor(text=text, return_tensors="pt", **images)
        with torch.no_grad():
            hidden = self.reference(**inputs, output_hidden_states=True).hidden_states[-1][0, -1]
        vector: npt.NDArray[np.float32] = torch.nn.functional.normalize(hidden, dim=0).numpy()
        return vector


def vectors_of(outputs: list[EmbeddingRequestOutput]) -> npt.NDArray[np.float32]:
    return np.array([each.outputs.embedding for each in outputs], np.float32)


def coloured(colour: str) -> Image.Image:
    return Image.new("RGB", (80, 60), colour)


def showing(picture: Image.Image) -> dict[str, Any]:
    return {"prompt": MARKED, "multi_modal_data": {"image": picture}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("checkpoint")
    return directory, make_checkpoint(directory, 5, ties_embeddings=False)


@pytest.fixture(scope="module", params=OPTIONS.values(), ids=tuple(OPTIONS))
def pair(checkpoint: tuple[Path, Any], request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(*checkpoint, **request.param)
    yield pair
    pair.llm.close()


def test_vectors_are_the_normalized_last_hidden_states_of_transformers(pair: Pair) -> None:
    red, blue = coloured("red"), coloured("blue")
    vectors = vectors_of(pair.llm.embed([*TEXTS, showing(red), showing(blue)], use_tqdm=False))
    expected = [*map(pair.expected, TEXTS), pair.expected(MARKED, red), pair.expected(MARKED, blue)]
    np.testing.assert_allclose(vectors, expected, atol=2e-5)
    # Otherwise the pictures would have had no effect.
    assert np.abs(vectors[3] - vectors[4]).max() > 1e-3


def test_a_vector_is_the_same_whatever_is_cached_of_its_prompt(pair: Pair) -> None:
    prompts = [*TEXTS, showing(coloured("green"))]
    first = vectors_of(pair.llm.embed(prompts, use_tqdm=False))
    # This caches the end of each prompt as logits, from which no vector can be made.
    answers = pair.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    again = pair.llm.embed(prompts, use_tqdm=False)
    np.testing.assert_allclose(vectors_of(again), first, atol=LEEWAY, rtol=0)
    if pair.llm.config.enable_prefix_caching:
        assert again[2].num_cached_tokens > 0
    assert pair.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False) != []
    assert [each.prompt_token_ids for each in again] == [each.prompt_token_ids for each in answers]


@pytest.fixture(scope="module")
def llm(checkpoint: tuple[Path, Any]) -> Iterator[LLM]:
    with LLM(checkpoint[0], **placed(dtype="float32")) as llm:
        yield llm


def test_a_shortened_vector_is_normalized(llm: LLM) -> None:
    [whole], [short] = (
        vectors_of(llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=each))) for each in (None, 5)
    )
    assert short.shape == (5,)
    np.testing.assert_allclose(short, whole[:5] / np.linalg.norm(whole[:5]), rtol=1e-5)


def test_a_vector_may_be_unnormalized(llm: LLM) -> None:
    [unit], [raw] = (
        vectors_of(llm.embed(TEXTS[0], pooling_params=PoolingParams(use_activation=each))) for each in (None, False)
    )
    assert np.linalg.norm(unit) == pytest.approx(1, abs=1e-6)
    assert np.linalg.norm(raw) != pytest.approx(1, abs=1e-2)
    np.testing.assert_allclose(raw / np.linalg.norm(raw), unit, atol=1e-6)


def test_invalid_pooling_parameters_and_prompts_are_refused(llm: LLM) -> None:
    width = llm.preparer.hidden_size
    with pytest.raises(InvalidArgumentError, match=f"dimensions: must be at most {width}"):
        llm.embed("Hello", pooling_params=PoolingParams(dimensions=width + 1))
    with pytest.raises(InvalidArgumentError, match="dimensions: must be an integer of at least 1, not 0"):
        PoolingParams(dimensions=0)
    for invalid in ("no", 0):
        with pytest.raises(InvalidArgumentError, match="use_activation: must be true or false"):
            PoolingParams(use_activation=invalid)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="pooling_params: must be PoolingParams, not list"):
        llm.embed("Hello", pooling_params=[PoolingParams()])  # type: ignore[arg-type]
    with pytest.raises(UnsupportedFieldError, match="tokenization_kwargs"):
        llm.embed("Hello", tokenization_kwargs={})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"prompts\[1\].*1000000 is not one of"):
        llm.embed(["Hello", [1_000_000]], use_tqdm=False)
