"""Embeddings in place of a prompt's tokens give the same answers as the tokens, however cached or chunked."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keepsight import LLM, SamplingParams
from keepsight.errors import InvalidArgumentError, PromptEmbedsError, PromptTooLongError, UnsupportedFieldError
from keepsight.media import TOKENS_PER_STRIP
from keepsight.outputs import RequestOutput
from tests.place import DEVICE, placed
from tests.precomputed import to_npy
from tests.random_checkpoint import make_checkpoint, make_text_only_checkpoint

NUM_TOKENS = 24
# The placeholder's id. Its bias makes it be sampled at once, unless penalties wrongly count placeholders, too.
BIASED = 0
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PENALIZED = SamplingParams(
    temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, repetition_penalty=100, logit_bias={BIASED: 30}, logprobs=2
)
# Several strips, the last one partial; the placeholder's id is not among them.
IDS = [2, *np.random.default_rng(3).integers(10, 900, 88).tolist()]


class Judge:
    """The transformers model; its answers are cached across our engine settings."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._answers: dict[tuple[bytes, float, float], list[int]] = {}

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            embedded: torch.Tensor = self._model.get_input_embeddings()(torch.tensor(ids)).clone()
        return embedded

    def answer(self, embeds: torch.Tensor, repetition_penalty: float = 1.0, bias: float = 0.0) -> list[int]:
        """Return the greedy answer; `bias` is added to the logit of `BIASED`."""
        key = (embeds.numpy().tobytes(), repetition_penalty, bias)
        if key not in self._answers:
            self._answers[key] = self._generate(embeds, repetition_penalty, bias)
        return self._answers[key]

    def _generate(self, embeds: torch.Tensor, repetition_penalty: float, bias: float) -> list[int]:
        """Decode by hand: transformers' `generate` does not support `inputs_embeds` for this model."""
        from transformers import RepetitionPenaltyLogitsProcessor

        penalize = RepetitionPenaltyLogitsProcessor(repetition_penalty)
        ids: list[int] = []
        for _ in range(NUM_TOKENS):
            with torch.no_grad():
                logits = self._model(inputs_embeds=embeds[None]).logits[:, -1].clone()
            logits[:, BIASED] += bias
            token_ids = torch.tensor([ids], dtype=torch.long)
            ids.append(int(penalize(token_ids, logits).argmax()))
            embeds = torch.cat([embeds, self.embed(ids[-1:])])
        return ids


class Pair:
    """One checkpoint, loaded by transformers and by us, with one engine setting."""

    def __init__(self, directory: Path, judge: Judge, **options: Any) -> None:
        self.judge = judge
        self.llm = LLM(directory, **placed(dtype="float32", enable_prompt_embeds=True, **options))

    def ask(self, params: SamplingParams, *prompts: Any) -> list[RequestOutput]:
        return self.llm.generate(list(prompts), params, use_tqdm=False)


def answer_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Judge]:
    directory = tmp_path_factory.mktemp("checkpoint")
    return directory, Judge(make_checkpoint(directory, 5, ties_embeddings=False))


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "without a prefix cache": {"enable_prefix_caching": False},
    "in small steps": {"max_num_batched_tokens": 19, "max_num_seqs": 2},
    "with nothing kept": {"encoder_cache_gb": 0, "mm_processor_cache_gb": 0, "enable_prefix_caching": False},
    "with no room": {"encoder_cache_size": 16, "num_gpu_blocks_override": 9, "max_model_len": 144},
}


@pytest.fixture(scope="module", params=OPTIONS)
def pair(request: pytest.FixtureRequest, checkpoint: tuple[Path, Judge]) -> Iterator[Pair]:
    pair = Pair(*checkpoint, **OPTIONS[request.param])
    with pair.llm:
        yield pair


def test_embeddings_are_continued_like_their_tokens_and_as_by_transformers(pair: Pair) -> None:
    embeds = pair.judge.embed(IDS)
    first, repeated, tokens = (
        pair.ask(GREEDY, prompt)[0]
        for prompt in ({"prompt_embeds": embeds}, {"prompt_embeds": embeds.numpy()}, {"prompt_token_ids": IDS})
    )
    assert answer_of(first) == answer_of(tokens) == pair.judge.answer(embeds)
    # Otherwise the comparison would mean little.
    assert len(set(answer_of(first))) >= 6
    assert answer_of(repeated) == answer_of(first)
    has_prefixes = pair.llm.config.enable_prefix_caching
    assert (first.num_cached_tokens, repeated.num_cached_tokens) == (0, len(IDS) - 1 if has_prefixes else 0)
    assert tokens.num_cached_tokens == 0
    assert (first.prompt, first.prompt_token_ids) == ("", [])


def test_a_batch_and_several_choices_are_answered_as_alone(pair: Pair) -> None:
    embeds = [pair.judge.embed(ids) for ids in (IDS, IDS[:33], [*IDS[:40], 77, *IDS[41:]], IDS[:1])]
    outputs = pair.ask(GREEDY, *({"prompt_embeds": each} for each in embeds), {"prompt_token_ids": IDS[:33]})
    answers = [answer_of(output) for output in outputs]
    assert answers[:4] == [pair.judge.answer(each) for each in embeds]
    assert answers[4] == answers[1]
    twice = SamplingParams(n=2, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    [both] = pair.ask(twice, {"prompt_embeds": embeds[1]})
    assert [list(each.token_ids) for each in both.outputs] == [answers[1]] * 2


def test_penalties_apply_to_generated_tokens_and_not_to_placeholders(pair: Pair) -> None:
    embeds = pair.judge.embed(IDS)
    [output] = pair.ask(PENALIZED, {"prompt_embeds": embeds})
    assert answer_of(output) == pair.judge.answer(embeds, repetition_penalty=100.0, bias=30.0)
    assert answer_of(output)[0] == BIASED


def test_vectors_of_no_token_are_used_unchanged(pair: Pair) -> None:
    embeds = pair.judge.embed(IDS) + pair.judge.embed(IDS).roll(1, 0)
    [output] = pair.ask(GREEDY, {"prompt_embeds": to_npy(embeds.numpy())})
    assert answer_of(output) == pair.judge.answer(embeds)
    assert answer_of(output) != pair.judge.answer(pair.judge.embed(IDS))


def test_the_prefix_cache_is_shared_only_by_equal_vectors_of_one_salt(checkpoint: tuple[Path, Judge]) -> None:
    pair = Pair(*checkpoint)
    with pair.llm:
        embeds = pair.judge.embed(IDS)
        changed = embeds.clone()
        changed[50, 0] += 1e-3
        prompts: list[dict[str, Any]] = [
            {"prompt_embeds": embeds},
            {"prompt_token_ids": [0] * len(IDS)},
            {"prompt_embeds": changed},
            {"prompt_embeds": embeds, "cache_salt": "a"},
            {"prompt_embeds": embeds, "cache_salt": "a"},
            {"prompt_embeds": embeds[:60]},
        ]
        found = [pair.ask(GREEDY, prompt)[0].num_cached_tokens for prompt in prompts]
    # Strips of 16 tokens: three of them lie before the change, and before the end of the shorter prompt.
    assert found == [0, 0, 48, 0, len(IDS) - 1, 48]


def test_a_text_only_model_takes_prompt_embeds(tmp_path: Path) -> None:
    make_text_only_checkpoint(tmp_path)
    ids = [2, *IDS, *IDS, 7]
    assert len(ids) > 2 * TOKENS_PER_STRIP
    with LLM(tmp_path, **placed(dtype="float32", enable_prompt_embeds=True)) as llm:
        loop: Any = llm.engine._loop
        embeds = loop._runner.model.embed_tokens(torch.tensor(ids, device=DEVICE)).cpu()
        first, again, tokens = (
            llm.generate(prompt, GREEDY)[0]
            for prompt in ({"prompt_embeds": embeds}, {"prompt_embeds": embeds}, {"prompt_token_ids": ids})
        )
    assert answer_of(first) == answer_of(again) == answer_of(tokens)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, len(ids) - 1)


def test_invalid_prompt_embeds_are_refused_by_field() -> None:
    good = np.zeros((4, 128), np.float32)
    with LLM(**placed(enable_prompt_embeds=True)) as llm:
        for source, error in (
            (good[:, 1:], PromptEmbedsError),
            (good.astype(np.int32), PromptEmbedsError),
            (good + np.inf, PromptEmbedsError),
            (None, PromptEmbedsError),
            (np.zeros((2048, 128), np.float32), PromptTooLongError),
        ):
            with pytest.raises(error) as caught:
                llm.generate({"prompt_embeds": source})
            assert (caught.value.field, caught.value.status) == ("prompt_embeds", 400)
        for other in ("prompt", "prompt_token_ids", "multi_modal_data"):
            with pytest.raises(InvalidArgumentError, match="together with prompt_embeds") as beside:
                llm.generate({"prompt_embeds": good, other: "Hello"})
            assert beside.value.field == other
    with (
        LLM(**placed()) as closed,
        pytest.raises(
            UnsupportedFieldError, match=r"prompt_embeds.*--enable-prompt-embeds .*enable_prompt_embeds=True"
        ),
    ):
        closed.generate({"prompt_embeds": good})
