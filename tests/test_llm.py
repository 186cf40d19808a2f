"""`LLM` end to end, from PIL pictures and OpenAI messages; the reference is transformers' processor and generate()."""

import gc
import io
import itertools
import math
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from tqdm import tqdm

from keepsight import LLM, SamplingParams
from keepsight.config import Config
from keepsight.engine import open_engine
from keepsight.engine.in_process_engine import InProcessEngine
from keepsight.engine.load_engine import load_engine
from keepsight.errors import InvalidArgumentError, RequestFailedError, UnreadablePictureError, UnsupportedFieldError
from keepsight.frontend.pixels import preprocess_image
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.ipc.run_directory import PREFIX, RIGHTS, RunDirectory
from keepsight.observe.catalogue import DECODED, PREPROCESSED
from keepsight.observe.metric_values import Counter
from keepsight.outputs import RequestOutput
from keepsight.requests import ResetCaches
from keepsight.scheduling.step_plan import StepPlan
from tests.counted import counted
from tests.drawn import Drawn, ask, by_object, by_url, draw, list_question, to_png
from tests.frontend.picture_server import picture_server, response
from tests.place import DEVICE, placed
from tests.random_checkpoint import make_checkpoint
from tests.real_server import START_SECONDS
from tests.wait_until import wait_until

NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=40)


# Equality with transformers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """One checkpoint, loaded by us and by transformers."""

    llm: LLM
    reference: Any
    processor: Any

    def reference_ids(self, messages: list[dict[str, Any]], **processor_kwargs: Any) -> tuple[list[int], list[int]]:
        """Return transformers' token ids of the prompt and of the answer."""
        inputs = self.processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs=processor_kwargs,
        )
        output = self.reference.generate(
            **inputs, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        ids, length = output[0].tolist(), inputs["input_ids"].shape[1]
        return ids[:length], ids[length:]


# Seeds with varied answers; most models with tied embeddings soon repeat themselves.
@pytest.fixture(scope="module", params=[(2, False), (5, False), (7, False), (14, True)], ids=lambda param: f"{param}")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    from transformers import AutoProcessor

    seed, ties_embeddings = request.param
    directory = tmp_path_factory.mktemp("checkpoint")
    reference = make_checkpoint(directory, seed, ties_embeddings=ties_embeddings)
    from_pretrained: Any = AutoProcessor.from_pretrained
    # Without torchvision, transformers has only this backend.
    processor = from_pretrained(directory, backend="pil")
    return Pair(LLM(directory, **placed(image_backend="pil", dtype="float32")), reference, processor)


def colourful_picture(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width * height)
    coarse = rng.integers(0, 256, (height // 20, width // 20, 3), np.uint8)
    return Image.fromarray(np.kron(coarse, np.ones((20, 20, 1), np.uint8)))


# The wide picture has two crops of at least 256 pixels, the tall one three, the square one none.
PICTURES = [colourful_picture(640, 300), colourful_picture(300, 860), colourful_picture(300, 300)]
NUM_CROPS = [2, 3, 0]


@pytest.mark.parametrize(
    ("num_pictures", "do_pan_and_scan"), [(0, False), (1, False), (1, True), (3, False), (3, True)]
)
def test_greedy_tokens_equal_transformers_over_64_tokens(pair: Pair, num_pictures: int, do_pan_and_scan: bool) -> None:
    pictures = PICTURES[:num_pictures]
    parts = [part for picture in pictures for part in ("Look: ", {"type": "image", "image": picture})]
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "You see shapes."}]},
        *ask(*parts, "What is there?"),
    ]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    [ours] = pair.llm.chat(messages, params, mm_processor_kwargs={"do_pan_and_scan": do_pan_and_scan})
    prompt_ids, token_ids = pair.reference_ids(messages, do_pan_and_scan=do_pan_and_scan)
    assert list(ours.prompt_token_ids) == prompt_ids
    assert list(ours.outputs[0].token_ids) == token_ids
    # Otherwise the comparison would mean little.
    assert len(token_ids) == NUM_TOKENS
    assert len(set(token_ids)) >= 6
    num_images = num_pictures + (sum(NUM_CROPS[:num_pictures]) if do_pan_and_scan else 0)
    assert prompt_ids.count(909) == num_images * 16


def test_the_content_of_a_picture_changes_the_answer(pair: Pair) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = [pair.llm.chat(ask(by_object(picture), "What is it?"), params)[0].outputs[0] for picture in PICTURES]
    assert len({tuple(answer.token_ids) for answer in answers}) == 3


def test_a_begun_answer_is_continued() -> None:
    drawn = draw(7)
    messages, params = ask(by_object(drawn.picture), "What is in this picture?"), SamplingParams(temperature=0)
    with LLM(**placed()) as llm:
        whole = llm.chat(messages, params)[0].outputs[0].text
        half = whole[: whole.index(" ", len(whole) // 2)]
        begun = [*messages, {"role": "assistant", "content": half}]
        assert llm.chat(begun, params, continue_final_message=True)[0].outputs[0].text == whole[len(half) :]


def test_a_request_may_have_its_pictures_resized_in_another_way(pair: Pair) -> None:
    messages = ask({"type": "image", "image": colourful_picture(500, 700)}, "What is there?")
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = []
    for options in ({}, {"resample": 0}, {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 5}):
        [ours] = pair.llm.chat(messages, params, mm_processor_kwargs=options)
        prompt_ids, token_ids = pair.reference_ids(messages, **options)
        assert list(ours.prompt_token_ids) == prompt_ids
        assert list(ours.outputs[0].token_ids) == token_ids
        answers.append(token_ids)
    assert answers[0] != answers[1]


def test_all_pictures_of_a_model_may_be_normalised_in_another_way(pair: Pair) -> None:
    messages = ask({"type": "image", "image": PICTURES[2]}, "What is there?")
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    options = {"image_mean": [0.2, 0.5, 0.8], "image_std": [0.3, 0.5, 0.4], "rescale_factor": 1 / 200}
    llm = LLM(pair.llm.config.model, **placed(image_backend="pil", dtype="float32", mm_processor_kwargs=options))
    [ours] = llm.chat(messages, params)
    assert list(ours.outputs[0].token_ids) == pair.reference_ids(messages, **options)[1]
    assert list(ours.outputs[0].token_ids) != pair.reference_ids(messages)[1]


def test_pan_and_scan_may_be_the_default_of_a_model(pair: Pair) -> None:
    options = {"do_pan_and_scan": True}
    by_default = LLM(pair.llm.config.model, **placed(image_backend="pil", mm_processor_kwargs=options))
    messages = ask(by_object(PICTURES[0]), "What is it?")
    [cropped] = by_default.chat(messages, GREEDY)
    [requested] = pair.llm.chat(messages, GREEDY, mm_processor_kwargs=options)
    [whole] = by_default.chat(messages, GREEDY, mm_processor_kwargs={"do_pan_and_scan": False})
    assert (cropped.prompt_token_ids, cropped.outputs) == (requested.prompt_token_ids, requested.outputs)
    assert len(whole.prompt_token_ids) < len(cropped.prompt_token_ids)


# The demo checkpoint ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**placed())


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return draw(7)


def text_of(output: RequestOutput) -> str:
    return output.outputs[0].text


@pytest.mark.parametrize("seed", [7, 8, 9])
def test_the_demo_answers_questions_about_a_drawn_picture_correctly(llm: LLM, seed: int) -> None:
    drawn = draw(seed)
    expected_answers = {question.text: question.answer for question in drawn.questions[:5]}
    outputs = llm.chat([ask(by_object(drawn.picture), text) for text in expected_answers], GREEDY, use_tqdm=False)
    assert dict(zip(expected_answers, map(text_of, outputs), strict=True)) == expected_answers
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}


def test_metrics_count_work_done_and_prefix_cache_hits(llm: LLM) -> None:
    names = {
        "keepsight_media_decoded_total": "decoded",
        "keepsight_media_encoded_total": "encoded",
        "keepsight_generation_tokens_total": "generated",
        "keepsight_prefix_cache_hits_total": "spared",
    }

    def count() -> dict[str, float]:
        counters = [each for each in llm.get_metrics() if isinstance(each, Counter)]
        return {what: sum(each.value for each in counters if each.name == name) for name, what in names.items()}

    picture, before = by_object(draw(4712).picture), count()
    for question in ("What is this?", "How many?"):
        llm.chat(ask(picture, question), SamplingParams(max_tokens=2, ignore_eos=True))
    risen = {name: value - before[name] for name, value in count().items()}
    spared = risen.pop("spared")
    assert risen == {"decoded": 1, "encoded": 1, "generated": 4}
    # The picture's tokens and those before it.
    assert spared >= 16


def test_pixels_are_prepared_by_single_threaded_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP teams of these threads would be counted among those that share the cores with the model."""
    counts, preprocess = [], preprocess_image.preprocess_image

    def look_and_preprocess(*arguments: Any) -> Any:
        counts.append(torch.get_num_threads())
        return preprocess(*arguments)

    monkeypatch.setattr(preprocess_image, "preprocess_image", look_and_preprocess)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with LLM(**placed(media_workers=2)) as llm:
            llm.chat([ask(by_object(draw(seed).picture), "What is this?") for seed in (8001, 8002, 8003)], GREEDY)
    finally:
        torch.set_num_threads(before)
    assert counts == [1, 1, 1]


def test_the_demo_tells_several_pictures_apart_in_their_order(llm: LLM) -> None:
    drawings = [draw(seed) for seed in (1, 2, 3)]
    for ordered in (drawings, drawings[::-1]):
        question = list_question(ordered)
        [output] = llm.chat(ask(*(by_object(each.picture) for each in ordered), question.text), GREEDY)
        assert text_of(output) == question.answer


def test_a_picture_is_the_same_however_it_is_sent(llm: LLM, drawn: Drawn) -> None:
    png = to_png(drawn.picture)
    ways = [
        by_object(drawn.picture),
        by_url(drawn.picture),
        {"type": "image_url", "image_url": drawn.data_url},
        {"type": "image_pil", "image_pil": png},
        {"type": "image", "image": drawn.picture},
    ]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0)
    first, *others = llm.chat([ask(way, "What is this?") for way in ways], params, use_tqdm=False)
    for other in others:
        assert other.prompt_token_ids == first.prompt_token_ids
        assert text_of(other) == text_of(first)
        # Not bit for bit: the composition of batches depends on arrival times.
        expected = pytest.approx(first.outputs[0].cumulative_logprob, abs=1e-4)
        assert other.outputs[0].cumulative_logprob == expected


def test_generate_takes_a_prompt_with_markers_and_its_pictures(llm: LLM, drawn: Drawn) -> None:
    text = drawn.questions[0].text
    [chatted] = llm.chat(ask(by_object(drawn.picture), text), GREEDY)
    written = f"<start_of_turn>user\n<start_of_image>{text}<end_of_turn>\n<start_of_turn>model\n"
    for prompt in (written, f"<bos>{written}"):
        for pictures in (drawn.picture, [drawn.picture], [to_png(drawn.picture)]):
            [output] = llm.generate({"prompt": prompt, "multi_modal_data": {"image": pictures}}, GREEDY)
            assert output.prompt_token_ids == chatted.prompt_token_ids
            assert text_of(output) == drawn.questions[0].answer


def test_generate_with_token_ids_answers_as_with_their_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    text = "<start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n"
    [of_text] = llm.generate(text, params)
    [of_ids] = llm.generate({"prompt_token_ids": list(of_text.prompt_token_ids)}, params)
    assert of_ids.outputs == of_text.outputs
    assert of_ids.prompt_token_ids == of_text.prompt_token_ids
    # The prompt as given; for ids, their decoded text.
    assert (of_text.prompt, of_ids.prompt) == (text, f"<bos>{text}")


def test_a_prompt_may_be_written_by_the_tokenizer_of_the_model(llm: LLM, drawn: Drawn) -> None:
    messages = ask(by_object(drawn.picture), drawn.questions[0].text)
    prompt = llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    [output] = llm.generate({"prompt": prompt, "multi_modal_data": {"image": drawn.picture}}, GREEDY)
    assert text_of(output) == drawn.questions[0].answer


@pytest.mark.parametrize("nothing", [{"image": None}, {"image": [], "video": None, "audio": None}])
def test_a_prompt_may_say_that_it_has_no_media(llm: LLM, nothing: dict[str, Any]) -> None:
    [plain] = llm.generate("Hello", GREEDY)
    for uuids in ({}, {"multi_modal_uuids": None}, {"multi_modal_uuids": dict.fromkeys(nothing)}):
        [output] = llm.generate({"prompt": "Hello", "multi_modal_data": nothing, **uuids}, GREEDY)
        assert output.prompt_token_ids == plain.prompt_token_ids


def test_bare_lists_of_token_ids_are_prompts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    [named] = llm.generate({"prompt_token_ids": [2, 30, 40]}, params)
    prompts: list[Any] = [[2, 30, 40], "One", (2, 30, 40)]
    alone, several = llm.generate([2, 30, 40], params), llm.generate(prompts, params)
    assert [each.prompt_token_ids for each in alone] == [[2, 30, 40]]
    assert [each.outputs for each in (*alone, several[0], several[2])] == [named.outputs] * 3


def test_token_ids_may_be_numpy_integers(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    [plain] = llm.generate({"prompt_token_ids": [2, 30, 40]}, params)
    [output] = llm.generate({"prompt_token_ids": list(np.array([2, 30, 40]))}, params)
    assert (output.prompt_token_ids, output.outputs) == (plain.prompt_token_ids, plain.outputs)
    for wrong in (2.0, True, "2", None):
        with pytest.raises(InvalidArgumentError, match="is not a token: it must be an integer"):
            llm.generate({"prompt_token_ids": [wrong]}, params)


def test_prompts_of_every_kind_are_answered_in_order_each_with_its_own_parameters(llm: LLM, drawn: Drawn) -> None:
    prompts: list[Any] = ["One", {"prompt": "Two"}, {"prompt_token_ids": [2, 30, 40]}]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 2, 3)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    assert outputs[2].prompt_token_ids == [2, 30, 40]
    assert outputs[2].prompt_token_ids + outputs[2].outputs[0].token_ids
    assert len({output.request_id for output in outputs}) == 3
    alone = [llm.generate(*pair)[0].outputs for pair in zip(prompts, params, strict=True)]
    assert [output.outputs for output in outputs] == alone
    conversations = [ask(by_object(drawn.picture), question.text) for question in drawn.questions[:2]]
    chatted = llm.chat(conversations, [GREEDY, SamplingParams(temperature=0, max_tokens=2)], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) <= 2 for output in chatted] == [False, True]


def test_output_fields_can_be_assigned_and_no_others_added(llm: LLM) -> None:
    [output] = llm.generate("Hello", SamplingParams(max_tokens=1, logprobs=1))
    output.outputs[0].text = output.outputs[0].text.strip()
    output.prompt = None
    for each in (output, output.outputs[0]):
        with pytest.raises(AttributeError, match="no attribute 'metrics'"):
            each.metrics = 1  # type: ignore[union-attr]


def test_no_prompts_give_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.chat([]) == []


def test_a_conversation_continues_after_an_answer(llm: LLM, drawn: Drawn) -> None:
    first = ask(by_object(drawn.picture), drawn.questions[0].text)
    answer = text_of(llm.chat(first, GREEDY)[0])
    colour = next(question for question in drawn.questions if question.kind == "colour")
    turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": colour.text}]
    [output] = llm.chat([*first, *turns], GREEDY)
    assert text_of(output) == colour.answer
    assert output.prompt is not None
    assert output.prompt.endswith(f"{colour.text}<end_of_turn>\n<start_of_turn>model\n")


def test_an_output_has_the_prompt_text_with_one_marker_per_picture(llm: LLM, drawn: Drawn) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    [chatted] = llm.chat(ask(by_object(drawn.picture), "What is this?"), params)
    written = "<start_of_turn>user\n<start_of_image>What is this?<end_of_turn>\n<start_of_turn>model\n"
    assert chatted.prompt == f"<bos>{written}"
    prompts: list[Any] = [
        {"prompt": written, "multi_modal_data": {"image": drawn.picture}},
        {"prompt": "One", "prompt_token_ids": [2, 30]},
    ]
    assert [each.prompt for each in llm.generate(prompts, params, use_tqdm=False)] == [written, "One"]


def test_a_seed_repeats_an_answer_and_its_choices_differ(llm: LLM) -> None:
    def sample(seed: int) -> list[tuple[int, ...]]:
        params = SamplingParams(n=3, temperature=2, seed=seed, max_tokens=12, ignore_eos=True)
        [output] = llm.generate("Hello", params)
        assert [choice.index for choice in output.outputs] == [0, 1, 2]
        return [tuple(choice.token_ids) for choice in output.outputs]

    first = sample(1)
    assert sample(1) == first
    assert sample(5) != first
    assert len(set(first)) == 3


def test_a_model_with_a_seed_draws_the_same_again_unless_a_request_has_its_own() -> None:
    params, own = (SamplingParams(temperature=20, max_tokens=12, ignore_eos=True, seed=each) for each in (None, 3))

    def draw_answers(seed: int | None) -> list[list[int]]:
        with LLM(**placed(seed=seed)) as llm:
            outputs = llm.generate(["Hello", "Hello", "Hello"], [params, params, own], use_tqdm=False)
            outputs += llm.chat(ask("Hello"), params)
        return [each.outputs[0].token_ids for each in outputs]

    first, again, other, none = (draw_answers(seed) for seed in (1, 1, 2, None))
    assert first == again
    assert first[0] != first[1]
    assert first[2] == other[2] == none[2]
    for index in (0, 1, 3):
        assert first[index] != other[index] != none[index]


def test_logprobs_name_the_sampled_token_and_the_likeliest_at_every_position(llm: LLM) -> None:
    params = SamplingParams(n=2, temperature=2, seed=3, max_tokens=8, ignore_eos=True, logprobs=3)
    for choice in llm.generate("Hello", params)[0].outputs:
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(choice.token_ids) == 8
        for token_id, entries in zip(choice.token_ids, choice.logprobs, strict=True):
            assert next(iter(entries)) == token_id
            by_rank = sorted(entries.values(), key=lambda entry: entry.rank)
            assert [entry.rank for entry in by_rank[:3]] == [1, 2, 3]
            assert len(entries) == (3 if entries[token_id].rank <= 3 else 4)
            assert by_rank == sorted(by_rank, key=lambda entry: -entry.logprob)
            assert sum(math.exp(entry.logprob) for entry in by_rank) <= 1 + 1e-5
            assert entries[token_id].decoded_token == llm.preparer.tokenizer.decode([token_id], False)
        total = sum(
            entries[token_id].logprob for token_id, entries in zip(choice.token_ids, choice.logprobs, strict=True)
        )
        assert choice.cumulative_logprob == pytest.approx(total)
    [without_logprobs] = llm.generate("Hello", SamplingParams(max_tokens=1))
    assert (without_logprobs.outputs[0].logprobs, without_logprobs.outputs[0].cumulative_logprob) == (None, None)


def test_logprobs_equal_those_of_transformers(pair: Pair) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=5)
    [output] = pair.llm.generate("Hello there", params)
    choice = output.outputs[0]
    ids = torch.tensor([[*output.prompt_token_ids, *choice.token_ids]])
    with torch.no_grad():
        expected = pair.reference(input_ids=ids).logits[0].log_softmax(dim=-1)
    first = len(output.prompt_token_ids) - 1
    assert choice.logprobs is not None
    assert len(choice.logprobs) == 5
    for offset, entries in enumerate(choice.logprobs):
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(float(expected[first + offset, token_id]), abs=1e-4)


def test_prompt_logprobs_equal_those_of_transformers_cached_or_not(pair: Pair) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=2, n=2)
    text = "Hello there, " * 20
    for _ in range(2):
        [output] = pair.llm.generate(text, params)
        with torch.no_grad():
            logits = pair.reference(input_ids=torch.tensor([output.prompt_token_ids])).logits[0]
        assert output.prompt_logprobs is not None
        first, *others = output.prompt_logprobs
        assert first is None
        rows = zip(others, output.prompt_token_ids[1:], logits[:-1].log_softmax(dim=-1), strict=True)
        for entries, token_id, expected in rows:
            assert entries is not None
            assert next(iter(entries)) == token_id
            assert {entry.rank for entry in entries.values()} >= {1, 2}
            for each, entry in entries.items():
                assert entry.logprob == pytest.approx(float(expected[each]), abs=1e-4)
    [without_logprobs] = pair.llm.generate(text, SamplingParams(max_tokens=1))
    assert without_logprobs.prompt_logprobs is None
    assert without_logprobs.num_cached_tokens > 0


def test_an_answer_ends_before_a_stop_string_and_says_which(llm: LLM, drawn: Drawn) -> None:
    messages = ask(by_object(drawn.picture), drawn.questions[0].text)
    whole = text_of(llm.chat(messages, GREEDY)[0])
    assert " at the" in whole
    stops = ["never said", " at the"]
    for includes, expected in ((False, whole.split(" at the")[0]), (True, whole.split(" at the")[0] + " at the")):
        params = SamplingParams(temperature=0, max_tokens=40, stop=stops, include_stop_str_in_output=includes)
        choice = llm.chat(messages, params)[0].outputs[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (expected, "stop", " at the")


def test_metrics_count_the_tokens_that_choices_with_stop_strings_have(llm: LLM) -> None:
    def count() -> float:
        return sum(
            each.value
            for each in llm.get_metrics()
            if isinstance(each, Counter) and each.name == "keepsight_generation_tokens_total"
        )

    before = count()
    params = SamplingParams(n=16, temperature=2, seed=1, max_tokens=40, stop=["e", " "])
    [output] = llm.generate(["a"], params)
    assert {choice.finish_reason for choice in output.outputs} >= {"stop"}
    assert count() - before == sum(len(choice.token_ids) for choice in output.outputs)


def test_an_answer_ends_at_a_stop_token_at_the_end_token_or_at_its_length(llm: LLM, drawn: Drawn) -> None:
    messages = ask(by_object(drawn.picture), drawn.questions[0].text)
    whole = llm.chat(messages, GREEDY)[0].outputs[0]
    assert (whole.finish_reason, whole.stop_reason, whole.token_ids[-1]) == ("stop", None, 6)
    stop_id = whole.token_ids[2]
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[stop_id])
    stopped = llm.chat(messages, params)[0].outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop_id)
    assert stopped.token_ids == whole.token_ids[:3]
    assert whole.text.startswith(stopped.text)
    cut = llm.chat(messages, SamplingParams(temperature=0, max_tokens=3))[0].outputs[0]
    assert (cut.finish_reason, cut.stop_reason, cut.token_ids) == ("length", None, whole.token_ids[:3])


def test_an_answer_ends_at_the_maximum_model_length(drawn: Drawn) -> None:
    llm = LLM(**placed(max_model_len=50))
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    [output] = llm.chat(ask(by_object(drawn.picture), "What is this?"), params)
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 50
    assert output.outputs[0].finish_reason == "length"


def test_only_several_prompts_show_their_progress(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=1)
    llm.generate(["a", "b"], params)
    monkeypatch.delenv("TQDM_DISABLE")
    llm.generate("a", params)
    llm.generate(["a"], params)
    llm.generate(["a", "b"], params, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], params)
    assert "2/2" in capsys.readouterr().err


def test_no_progress_is_shown_without_standard_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQDM_DISABLE")
    monkeypatch.setattr("sys.stderr", None)
    assert len(llm.generate(["a", "b"], SamplingParams(max_tokens=1))) == 2


def test_a_caller_may_pass_its_own_progress_bar(llm: LLM) -> None:
    bars = []

    def make_bar(**options: Any) -> tqdm:
        bars.append(tqdm(file=io.StringIO(), **{**options, "disable": False}))
        return bars[-1]

    params = SamplingParams(max_tokens=1)
    llm.generate(["a", "b"], params, use_tqdm=make_bar)
    llm.chat(ask("Hello"), params, make_bar)  # its position in vLLM's chat(), not in its generate()
    assert [(each.n, each.total) for each in bars] == [(2, 2), (1, 1)]


# The engine ---------------------------------------------------------------------------------------------------


def kinds_of_prompts(drawn: Drawn) -> list[list[dict[str, Any]]]:
    """Return prompts that share prefixes and pictures in various ways."""
    picture, other = by_object(drawn.picture), by_object(draw(8).picture)
    texts = [question.text for question in drawn.questions[:3]]
    return [
        *(ask(picture, text) for text in texts),
        ask("Look:", picture, texts[0]),
        ask(picture, other, "What is the second picture?"),
        ask(other, picture, "What is the second picture?"),
        ask(picture, "and the same again", picture, texts[0]),
        ask("Hello!"),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False, "encoder_cache_gb": 0, "max_num_seqs": 1},
        {"max_num_batched_tokens": 19, "max_num_seqs": 3},
        {"num_gpu_blocks_override": 16, "block_size": 8, "encoder_cache_size": 16},
        {"max_prompt_tokens_beside_streams": 0, "block_size": 128, "mm_cache_device": "cpu"},
    ],
    ids=["no cache, one by one", "tiny steps", "little room", "prompts beside streams"],
)
def test_cache_and_step_sizes_do_not_change_answers(llm: LLM, drawn: Drawn, options: dict[str, Any]) -> None:
    prompts = kinds_of_prompts(drawn)
    expected = [text_of(llm.chat(prompt, GREEDY)[0]) for prompt in prompts]
    with LLM(**placed(**options)) as other:
        for _ in range(2):
            outputs = other.chat([*prompts, *prompts], GREEDY, use_tqdm=False)
            assert list(map(text_of, outputs)) == expected * 2


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_prefix_before_a_cache_breakpoint_survives_other_requests(is_marked: bool) -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}} if is_marked else {}
    known = {"type": "text", "text": "What is in this picture? " * 12}
    with LLM(**placed(num_gpu_blocks_override=32, max_model_len=256)) as llm:
        first = llm.chat(ask({**known, **mark}, "Well?"), GREEDY)[0]
        for number in range(12):
            llm.chat(ask(f"{number} is the number. " * 12), GREEDY)
        again = llm.chat(ask(known, "Why?"), GREEDY)[0]
    assert len(first.prompt_token_ids) > 64
    if is_marked:
        assert again.num_cached_tokens >= 64
    else:
        # The common prefix of all chat prompts.
        assert again.num_cached_tokens == 4


def count_accepted_guesses(llm: LLM) -> float:
    name = "keepsight_spec_decode_num_accepted_tokens_total"
    return sum(each.value for each in llm.get_metrics() if isinstance(each, Counter) and each.name == name)


def test_a_prediction_saves_steps_without_changing_the_answer(llm: LLM, drawn: Drawn) -> None:
    messages = ask(by_url(drawn.picture), "Describe the picture.")
    plain: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "logprobs": 1}
    [output] = llm.chat(messages, SamplingParams(**plain))
    answer = output.outputs[0].text
    num_accepted = []
    for prediction in (answer, answer[:20] + answer[24:], "nothing of this"):
        before = count_accepted_guesses(llm)
        [again] = llm.chat(messages, SamplingParams(**plain, prediction=prediction))
        assert (again.outputs[0].text, again.outputs[0].logprobs) == (answer, output.outputs[0].logprobs)
        num_accepted.append(count_accepted_guesses(llm) - before)
    assert num_accepted[0] > len(output.outputs[0].token_ids) // 2
    assert num_accepted[1] > 0


def test_tokens_found_in_the_prefix_cache_are_counted(llm: LLM) -> None:
    # A picture of its own: one that other tests have shown in another encoding gets that one's name once it is decoded.
    messages = ask(by_object(draw(23).picture), "What was counted?")
    llm.reset_prefix_cache()
    first, second = (llm.chat(messages, GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == len(first.prompt_token_ids) - 1
    assert second.outputs == first.outputs
    llm.reset_prefix_cache()
    llm.reset_encoder_cache()
    third = llm.chat(messages, GREEDY)[0]
    assert (third.num_cached_tokens, text_of(third)) == (0, text_of(first))


ONE_PICTURE: dict[str, Any] = {"encoder_cache_size": 16}


def test_evicted_embeddings_are_found_in_host_memory(drawn: Drawn) -> None:
    in_turn = [by_url(picture) for picture in [drawn.picture, draw(8).picture] * 3]
    with LLM(**placed(enable_prefix_caching=False, mm_processor_cache_gb=0, **ONE_PICTURE)) as llm:
        answers = [text_of(llm.chat(ask(each, "What is this?"), GREEDY)[0]) for each in in_turn]
        assert counted(llm.engine._media_pool, DECODED) == [2]
    assert answers == answers[:2] * 3


@pytest.mark.parametrize("cache", [None, "lru", "shm", "shared"])
def test_a_picture_with_evicted_embeddings_is_not_decoded_again(drawn: Drawn, cache: str | None) -> None:
    options = placed(enable_prefix_caching=False, **ONE_PICTURE, encoder_host_cache_gb=0)
    in_turn = [by_url(picture) for picture in [drawn.picture, draw(8).picture] * 3]
    answers, num_decoded = [], list[float]()
    for gigabytes in (0.01, 0):
        with LLM(mm_processor_cache_gb=gigabytes, mm_processor_cache_type=cache, **options) as llm:
            answers.append([text_of(llm.chat(ask(each, "What is this?"), GREEDY)[0]) for each in in_turn])
            num_decoded += counted(llm.engine._media_pool, DECODED)
    assert answers[0] == answers[1]
    assert num_decoded == [2, 6]


@pytest.mark.parametrize("num_pictures", [4, 8])
def test_each_picture_is_decoded_once_however_many_crops_a_request_has(num_pictures: int) -> None:
    pictures = [Image.new("RGB", (1100, 300), (20 * number, 99, 0)) for number in range(num_pictures)]
    messages = ask(*({"type": "image", "image": each} for each in pictures), "What is this?")
    with LLM(**placed()) as llm:
        llm.chat(messages, GREEDY, mm_processor_kwargs={"do_pan_and_scan": True})
        pool = llm.engine._media_pool
        assert counted(pool, DECODED, PREPROCESSED) == [num_pictures, 5 * num_pictures]


def test_after_a_reset_of_the_processor_cache_a_picture_is_decoded_again(drawn: Drawn) -> None:
    with LLM(**placed(enable_prefix_caching=False)) as llm:
        for _ in range(2):
            llm.reset_encoder_cache()
            llm.chat(ask(by_object(drawn.picture), "What is this?"), GREEDY)
        assert counted(llm.engine._media_pool, PREPROCESSED) == [1]
        llm.reset_encoder_cache()
        llm.reset_mm_cache()
        llm.chat(ask(by_object(drawn.picture), "What is this?"), GREEDY)
        assert counted(llm.engine._media_pool, PREPROCESSED) == [2]


@pytest.mark.parametrize("cache", ["lru", "shm", "shared"])
def test_a_late_reset_does_not_drop_pixels_sent_after_it(monkeypatch: Any, cache: str) -> None:
    with LLM(**placed(mm_processor_cache_type=cache)) as llm:
        loop: Any = llm.engine._loop
        pool, reset, is_resetting = llm.engine._media_pool, loop._reset, threading.Event()

        def reset_late(message: ResetCaches) -> None:
            is_resetting.set()
            wait_until(lambda: counted(pool, PREPROCESSED) != [0])
            reset(message)

        monkeypatch.setattr(loop, "_reset", reset_late)
        with ThreadPoolExecutor(1) as threads:
            resetting = threads.submit(llm.reset_mm_cache)
            assert is_resetting.wait(20)
            llm.chat(ask(by_url(draw(7).picture), "What is this?"), GREEDY)
            resetting.result(20)
        assert counted(pool, DECODED) == [1]


def test_prompts_with_different_salts_share_no_cache_entries(llm: LLM) -> None:
    def num_cached(salt: str) -> int:
        prompt = {"prompt": "One two three four five six seven eight nine ten " * 4, "cache_salt": salt}
        return llm.generate(prompt, SamplingParams(max_tokens=1))[0].num_cached_tokens

    assert [num_cached(salt) > 0 for salt in ("a", "b", "a", "b")] == [False, False, True, True]


def test_the_smallest_priority_goes_first_and_answers_keep_their_order() -> None:
    finished: list[str] = []
    with LLM(**placed(max_num_seqs=1)) as llm:
        hold, num_submitted, engine = threading.Event(), itertools.count(1), cast(Any, llm.engine)
        loop, submit = engine._loop, engine.submit
        run = loop._runner.run

        def run_when_all_have_arrived(plan: StepPlan) -> Any:
            assert hold.wait(20)
            finished.extend(request_id for request_id, _ in plan.ended)
            return run(plan)

        def submit_and_count(*arguments: Any) -> None:
            submit(*arguments)
            if next(num_submitted) == 4:
                hold.set()

        loop._runner.run, engine.submit = run_when_all_have_arrived, submit_and_count
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        outputs = llm.generate(["a", "b", "c", "d"], params, use_tqdm=False, priority=[0, 3, 2, 1])
        llm.generate("the end", params)
    first, *others = (output.request_id for output in outputs)
    # The first may have started before the others arrived.
    assert finished[:4] == [first, *others[::-1]]


def test_calls_from_several_threads_share_the_engine(llm: LLM, drawn: Drawn) -> None:
    questions = drawn.questions[:4]
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(llm.chat, ask(by_object(drawn.picture), each.text), GREEDY) for each in questions]
        assert [text_of(each.result()[0]) for each in futures] == [each.answer for each in questions]


def test_changing_parameters_during_a_call_changes_no_answer(llm: LLM) -> None:
    params: Any = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)

    def change(**_: Any) -> Any:
        params.max_tokens = 1
        return tqdm(total=2, disable=True)

    for given in (params, [params, params]):
        params.max_tokens = 3
        outputs = llm.generate(["a", "b"], given, use_tqdm=change)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]
        assert all(output.outputs[0].finished() for output in outputs)


@pytest.mark.parametrize("name", ["tokenization_kwargs", "chat_template"])
def test_unsupported_vllm_arguments_are_accepted_only_as_none(llm: LLM, name: str) -> None:
    calls: list[Callable[..., list[RequestOutput]]] = [partial(llm.chat, ask("Who are you?"), GREEDY)]
    if name == "tokenization_kwargs":
        calls.append(partial(llm.generate, "Who are you?", GREEDY))
    for call in calls:
        assert call(**{name: None})
        with pytest.raises(UnsupportedFieldError, match=name):
            call(**{name: {}})


def test_chat_template_kwargs_are_checked(llm: LLM) -> None:
    assert llm.chat(ask("Who are you?"), GREEDY, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(UnsupportedFieldError, match=r"chat_template_kwargs\.depth"):
        llm.chat(ask("Who are you?"), GREEDY, chat_template_kwargs={"depth": 3})


def test_tools_are_written_into_the_prompt(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    [output] = llm.chat(ask("Who are you?"), SamplingParams(max_tokens=1), tools=[tool])
    assert '[{"name": "look", "parameters": {"type": "object"}}]' in str(output.prompt)
    assert "functions" not in str(llm.chat(ask("Who are you?"), SamplingParams(max_tokens=1), tools=[])[0].prompt)
    with pytest.raises(InvalidArgumentError, match=r"tools\[0\]: must be"):
        llm.chat(ask("Who are you?"), tools=[{"name": "look"}])


def test_an_invalid_prompt_aborts_the_ones_before_it(llm: LLM) -> None:
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    with pytest.raises(InvalidArgumentError, match="prompt: must be a string"):
        llm.generate(["a", {"prompt": "b"}, {"prompt": 5}], endless, use_tqdm=False)
    assert not llm.engine._callers


def test_a_prompt_is_aborted_when_its_caller_is_interrupted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = llm.engine.submit

    def submit_last(*arguments: Any) -> None:
        submit(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "submit", submit_last)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", SamplingParams(max_tokens=None, ignore_eos=True))
    assert not llm.engine._callers


def test_a_truncated_picture_is_refused_with_its_field(llm: LLM, drawn: Drawn) -> None:
    cut = to_png(drawn.picture)[:-2000]
    with pytest.raises(UnreadablePictureError) as caught:
        llm.chat([ask("Hello!"), ask({"type": "image_pil", "image_pil": cut}, "What is this?")], GREEDY)
    assert caught.value.field == "messages[1][0].content[0].image_pil"
    assert not llm.engine._callers


def test_errors_name_the_index_of_the_prompt_and_shared_arguments_by_name(llm: LLM) -> None:
    def field_of(call: Callable[..., object], *given: object, **named: object) -> str:
        with pytest.raises(InvalidArgumentError) as caught:
            call(*given, use_tqdm=False, **named)
        return caught.value.field

    bad: dict[str, Any] = {"prompt": "<start_of_image>", "multi_modal_data": {"image": [b"no picture"]}}
    assert field_of(llm.generate, ["a", "b", bad]) == "prompts[2].multi_modal_data.image[0]"
    assert field_of(llm.generate, [bad]) == "multi_modal_data.image[0]"
    assert field_of(llm.generate, ["a", 5.0]) == "prompts[1]"
    valid, invalid = ask("Hello!"), [{"role": None, "content": "Hello!"}]
    assert field_of(llm.chat, [valid, invalid]) == "messages[1][0].role"
    assert field_of(llm.chat, invalid) == "messages[0].role"
    assert field_of(llm.chat, [valid, valid], mm_processor_kwargs={"a": 1}) == "mm_processor_kwargs.a"
    assert field_of(llm.chat, [valid, valid], tools=[{}]) == "tools[0]"
    unknown = SamplingParams(allowed_token_ids=[2**20])
    assert field_of(llm.chat, [valid, valid], [GREEDY, unknown]) == "messages[1].allowed_token_ids[0]"


def test_closing_ends_all_threads_and_later_calls_fail() -> None:
    before = set(threading.enumerate())
    with LLM(**placed()) as llm:
        assert llm.generate("Hello", SamplingParams(max_tokens=1))
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before
    llm.close()
    for call in (partial(llm.generate, "Hello"), llm.reset_prefix_cache):
        with pytest.raises(RequestFailedError, match="the engine was closed"):
            call()


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[object]]]:
    """Weak references to loaded models; garbage collection is off during the test."""
    held: list[weakref.ref[object]] = []

    def load(*given: Any) -> Any:
        loaded: Any = load_engine(*given)
        held.append(weakref.ref(loaded.runner.model))
        return loaded

    monkeypatch.setattr(open_engine, "load_engine", load)
    gc.disable()
    yield held
    gc.enable()


def test_closing_frees_the_model_at_once_and_keeps_metrics_readable(models: list[weakref.ref[object]]) -> None:
    with LLM(**placed()) as llm:
        assert llm.generate("Hello", SamplingParams(max_tokens=1))
        [model] = models
        assert model() is not None
    assert model() is None
    assert Counter("keepsight_generation_tokens_total", {}, 1) in llm.get_metrics()


CLOSING = """
from keepsight import LLM, SamplingParams

def measure():
    [line] = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
    return int(line.split()[1]) // 1024

before = measure()
with LLM(device="cpu", kv_cache_memory_bytes=2**28) as llm:
    llm.generate([40] * 600, SamplingParams(max_tokens=1))
    running = measure()
print(before, running, measure())
"""


def test_closing_returns_memory_to_the_system() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CLOSING], capture_output=True, text=True, timeout=START_SECONDS, check=True
    )
    before, running, after = map(int, ended.stdout.split())
    assert after - before < (running - before) / 2


def test_deleting_an_llm_frees_the_model_at_once(models: list[weakref.ref[object]]) -> None:
    llm = LLM(**placed())
    if DEVICE == "cuda":
        gc.collect()  # compiling a process's first kernels leaves reference cycles that hold the caller
    assert llm.generate("Hello", SamplingParams(max_tokens=1))
    [model] = models
    del llm
    assert model() is None


@pytest.mark.parametrize("is_closed_again", [True, False])
def test_interrupted_closing_is_completed_by_closing_again_or_deleting(
    monkeypatch: pytest.MonkeyPatch, is_closed_again: bool
) -> None:
    before = set(threading.enumerate())
    llm = LLM(**placed())
    with monkeypatch.context() as patch:
        patch.setattr(InProcessEngine, "close", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.close()
    assert set(threading.enumerate()) - before
    if is_closed_again:
        llm.close()
    else:
        del llm
        gc.collect()
    assert not set(threading.enumerate()) - before


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


FORKING = f"""
import os, sys
from keepsight import LLM, SamplingParams
from keepsight.errors import KeepsightError
one = SamplingParams(max_tokens=1)
llm = LLM(**{placed()})
llm.generate("Hello", one)
if (child := os.fork()) == 0:
    for call in (lambda: llm.generate(["Hello", "Hi"], one), lambda: llm.chat([], one), llm.reset_mm_cache):
        try:
            call()
        except KeepsightError as error:
            print(error)
    llm.close()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert llm.generate("Hello", one)
advice = "create one in each process, or start processes by spawn"
print(f"this LLM belongs to process {{os.getpid()}}, but this is {{child}}: {{advice}}")
"""


def test_calls_in_a_forked_child_fail_and_the_parent_s_engine_still_works() -> None:
    # Some Python versions warn about forking with threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(ended.stdout.splitlines()) == 4
    assert len(set(ended.stdout.splitlines())) == 1


def test_a_garbage_collected_llm_is_closed() -> None:
    before = set(threading.enumerate())
    llm = LLM(**placed())
    assert set(threading.enumerate()) - before
    del llm
    gc.collect()
    # Threads of an earlier LLM, collected only now, may also end meanwhile, so this is no equality.
    assert not set(threading.enumerate()) - before


SCRIPT = f"""
import sys
from keepsight import LLM, SamplingParams
llm = LLM(**{placed(allowed_media_networks=["127.0.0.0/8"])})
picture = {{"type": "image_url", "image_url": {{"url": sys.argv[1]}}}}
llm.chat([{{"role": "user", "content": [picture]}}], SamplingParams(max_tokens=1))
"""


def test_a_script_that_downloaded_a_picture_exits_silently(drawn: Drawn) -> None:
    with picture_server() as server:
        url = server.serve("/x.png", response(to_png(drawn.picture)))
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT, url], check=False, capture_output=True, text=True, timeout=100
        )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_run_directories_of_killed_servers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / f"{PREFIX}killed"
    left.mkdir()
    left.chmod(RIGHTS)
    (left / "pixels").touch()
    with LLM(**placed()):
        assert not left.exists()


def test_a_failed_start_leaves_neither_threads_nor_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_pixel_source(_mode: str, _config: Config, folder: Path) -> None:
        folders.append(folder)
        raise OSError("no space left")

    folders: list[Path] = []
    monkeypatch.setattr(open_engine, "open_pixel_source", open_pixel_source)
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="no space left"):
        LLM(**placed(mm_processor_cache_type="shared"))
    assert not set(threading.enumerate()) - before
    assert not any(folder.exists() for folder in folders)


def start_and_interrupt(engine: InProcessEngine) -> None:
    engine._thread.start()
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("owner", "method", "replacement"),
    [
        (RequestPreparer, "prefer_held", interrupt),
        (InProcessEngine, "start", interrupt),
        (InProcessEngine, "start", start_and_interrupt),
    ],
)
def test_an_interrupted_start_leaves_neither_threads_nor_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, replacement: Callable[..., None]
) -> None:
    monkeypatch.setattr(RunDirectory, "create", partial(RunDirectory.create, tmp_path))
    monkeypatch.setattr(owner, method, replacement)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        LLM(**placed(mm_processor_cache_type="shared"))
    gc.collect()
    assert not set(threading.enumerate()) - before
    assert not list(tmp_path.iterdir())


# Caller errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtyp": "float32"}, "dtyp: is not an option; did you mean 'dtype'"),
        ({"tensor_parallel_size": 1}, "tensor_parallel_size: does not exist: an engine uses one device"),
        ({"swap_space": 4}, "swap_space: is not an option; docs/quickstart.md.*Coming from vLLM"),
        ({"seed": "1"}, "seed: must be a 64-bit integer or None"),
        ({"dtype": "int4"}, "dtype: must be one of auto, float32, bfloat16, not 'int4'"),
        ({"max_model_len": 4096}, "max_model_len: 4096 exceeds the 2048 positions"),
        ({"max_num_batched_tokens": 15}, r"max_num_batched_tokens: must be at least 16 \+ 0 = 16, not 15"),
        (
            {"max_model_len": 65, "num_gpu_blocks_override": 4},
            "max_model_len: must be at most 64, not 65: that is what the 4 KV blocks of 16",
        ),
        ({"mm_processor_kwargs": {"do_resize": False}}, "mm_processor_kwargs.do_resize: cannot be changed"),
        ({"mm_processor_kwargs": {"resample": 77}}, "mm_processor_kwargs.resample: must be one of"),
    ],
)
def test_an_invalid_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        LLM(**options)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"promt": "a"}, "promt: is not a field of a prompt"),
        ({}, "prompt: must be a string"),
        ({"prompt": 5}, "prompt: must be a string, not 5"),
        (5, "prompts: must be"),
        ([5.0], r"prompts\[0\]: must be"),
        ([2, "30"], "prompt_token_ids: '30' is not a token"),
        (["a", 30], r"prompts\[1\]: must be"),
        ([[2, -1]], "prompt_token_ids: -1 is not one of"),
        ([[]], "prompt_token_ids: is empty"),
        (["a", []], r"prompts\[1\].prompt_token_ids: is empty"),
        (None, "prompts: must be"),
        ({"prompt_token_ids": [5, -1]}, "prompt_token_ids: -1 is not one of"),
        ({"prompt_token_ids": [5, 960]}, "prompt_token_ids: 960 is not one of"),
        ({"prompt_token_ids": ["a"]}, "prompt_token_ids: 'a' is not a token"),
        ({"prompt_token_ids": []}, "prompt_token_ids: is empty"),
        ({"prompt_token_ids": 5}, "prompt_token_ids: must be a list"),
        ({"prompt_token_ids": [2, 7, 909, 8]}, "prompt_token_ids: must not contain"),
        ({"prompt": "a", "multi_modal_data": {"smell": []}}, "multi_modal_data.smell: only image, video, audio"),
        ({"prompt": "a", "multi_modal_data": 5}, "multi_modal_data: must be a mapping"),
        ({"prompt": "a", "multi_modal_data": {"image": [None]}}, r"data.image\[0\]: may be None only with a uuid"),
        ({"prompt": "a", "multi_modal_data": {"audio": [None]}}, r"data.audio\[0\]: may be None only with a uuid"),
        ({"prompt": "a", "mm_processor_kwargs": [5]}, "mm_processor_kwargs: must be a mapping"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"image": [b""]}}, "multi_modal_data: needs the prompt as text"),
        ({"prompt_token_ids": [5], "mm_processor_kwargs": {}}, "mm_processor_kwargs: needs the prompt as text"),
        ({"prompt_token_ids": [5], "prompt": 77}, "prompt: must be a string, not 77"),
    ],
)
def test_a_prompt_of_the_wrong_shape_is_refused_by_name(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([SamplingParams()], "sampling_params: must have one for each of 2 prompts, not 1"),
        ({"temperature": 0}, "sampling_params: must be SamplingParams"),
        ([SamplingParams(), {"temperature": 0}], "sampling_params: must be SamplingParams"),
    ],
)
def test_sampling_parameters_of_wrong_number_or_type_are_refused(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        llm.generate(["a", "b"], params, use_tqdm=False)


@pytest.mark.parametrize(
    ("priority", "field"), [([1], "priority"), (5, "priority"), ([1, "2"], "priority[1]"), ([True, 1], "priority[0]")]
)
def test_priorities_of_wrong_number_or_type_are_refused(llm: LLM, priority: Any, field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(field)}: must be"):
        llm.generate(["a", "b"], SamplingParams(max_tokens=1), use_tqdm=False, priority=priority)


def test_a_wrong_priority_of_the_only_conversation_is_named_as_the_caller_wrote_it(llm: LLM) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^priority\[0\]: must be"):
        llm.chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=1), priority=cast(Any, [1.5]))


def test_priorities_may_be_numpy_integers(llm: LLM) -> None:
    params, given = SamplingParams(max_tokens=1), cast(Any, [np.int64(1), np.int64(0)])
    assert len(llm.generate(["a", "b"], params, use_tqdm=False, priority=given)) == 2


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([[]], "messages: must be a list of messages, not an empty one"),
        (5, "messages: must be a list of messages"),
        ("hello", "messages: must be a list of messages"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([{"role": "user", "content": [{"type": "smell"}]}], r"messages\[0\].content\[0\].type"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "roles must alternate"),
    ],
)
def test_messages_of_the_wrong_shape_are_refused_by_name(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        llm.chat(messages)


def test_an_unknown_sampling_parameter_is_refused() -> None:
    with pytest.raises(UnsupportedFieldError, match="did you mean 'temperature'"):
        SamplingParams(temprature=0)  # type: ignore[call-arg]


def test_the_engine_still_answers_after_a_refused_request(llm: LLM, drawn: Drawn) -> None:
    with pytest.raises(InvalidArgumentError):
        llm.chat(ask(by_object(drawn.picture), "<image_soft_token>"))
    [output] = llm.chat(ask(by_object(drawn.picture), drawn.questions[0].text), GREEDY)
    assert text_of(output) == drawn.questions[0].answer


def test_a_checkpoint_may_be_given_as_a_string_and_is_shown_in_config(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path, 0, ties_embeddings=True)
    with caplog.at_level("INFO"):
        llm = LLM(str(tmp_path), dtype="bfloat16", device="cpu")
    assert llm.config.model_name == str(tmp_path)
    assert "bfloat16 on cpu (device=cpu, dtype=bfloat16" in caplog.text
    assert len(llm.generate("Hi", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
