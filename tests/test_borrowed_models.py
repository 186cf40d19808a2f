"""Models computed by transformers' modules, as their users have them: from a folder to transformers' answers."""

from pathlib import Path

import pytest
import torch

from keepsight import LLM, SamplingParams
from keepsight.errors import UnknownArchitectureError
from tests.drawn import ask
from tests.models.borrowed import reference as ref
from tests.random_checkpoint import copy_all_but_the_model

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
# As many tokens as the tokenizer beside it knows.
SIZE = {**ref.SMALL, "vocab_size": 910, "max_position_embeddings": 512}
QUESTIONS = ("Hello!", "What is in the picture, and where is it?", "What is in the picture, and how many are there?")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"])
def test_text_is_answered_as_by_transformers_whatever_is_answered_beside_it(architecture: str, tmp_path: Path) -> None:
    copy_all_but_the_model(tmp_path)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / name).unlink()
    reference = ref.make_checkpoint(tmp_path, architecture, {**SIZE, **ref.TEXT_MODELS[architecture]})
    llm = LLM(tmp_path, device="cpu", max_num_batched_tokens=16, max_num_seqs=4, block_size=8)
    try:
        together = llm.chat([ask(question) for question in QUESTIONS], GREEDY)
        for question, output in zip(QUESTIONS, together, strict=True):
            prompt = torch.tensor(output.prompt_token_ids)
            assert output.outputs[0].token_ids == ref.greedy(reference, prompt, NUM_TOKENS)
            [again] = llm.chat(ask(question), GREEDY)
            assert again.outputs[0].token_ids == output.outputs[0].token_ids
            assert again.num_cached_tokens > 0
    finally:
        llm.close()


def test_who_asks_for_keepsight_s_own_modules_gets_no_others(tmp_path: Path) -> None:
    copy_all_but_the_model(tmp_path)
    ref.make_checkpoint(tmp_path, "LlamaForCausalLM", SIZE)
    with pytest.raises(UnknownArchitectureError, match="LlamaForCausalLM"):
        LLM(tmp_path, device="cpu", model_impl="keepsight")
