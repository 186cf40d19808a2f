"""Qwen3-VL end to end: answers about pictures of any size, films and texts equal those of transformers."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI

from keepsight import LLM, SamplingParams
from keepsight.errors import KeepsightError
from keepsight.frontend.pixels.render_page import render_page
from keepsight.frontend.prompt.read_messages import PicturePart
from keepsight.media import TOKENS_PER_STRIP
from keepsight.structured_outputs import StructuredOutputsParams
from tests.drawn import ask, by_url, draw, say, to_data_url
from tests.frontend import sample_films
from tests.frontend.sample_documents import Page, write_pdf
from tests.place import placed
from tests.qwen_checkpoint import MAX_PIXELS, make_qwen_checkpoint, reference_answer
from tests.qwen_turns import GREEDY, expect_reference_answers_in_turns, film, picture, shown
from tests.real_server import START_SECONDS, real_server

SIZES = [(40, 30), (200, 90), (17, 300), (1, 1), (64, 64)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("qwen3-vl")
    return directory, make_qwen_checkpoint(directory)


@pytest.fixture(scope="module")
def llm(checkpoint: tuple[Path, Any]) -> Iterator[LLM]:
    # Of transformers' two image backends, the one that does not need torchvision.
    llm = LLM(checkpoint[0], **placed(image_backend="pil", max_num_batched_tokens=32, max_num_seqs=8))
    yield llm
    llm.close()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_answers_about_pictures_of_any_size_equal_the_reference_s(
    llm: LLM, checkpoint: tuple[Path, Any], size: tuple[int, int]
) -> None:
    shown_picture = picture(*size)
    [output] = llm.chat(ask(*shown(shown_picture), "What is it?"), GREEDY)
    directory, reference = checkpoint
    theirs = reference_answer(reference, directory, output.prompt_token_ids, [shown_picture], 8)
    assert output.outputs[0].token_ids[: len(theirs)] == theirs


def test_pictures_of_several_sizes_in_several_turns_are_cached(llm: LLM, checkpoint: tuple[Path, Any]) -> None:
    conversation, _ = expect_reference_answers_in_turns(llm, checkpoint, "And these?")
    [again] = llm.chat(conversation, GREEDY)
    assert again.num_cached_tokens == len(again.prompt_token_ids) - 1


def test_a_pdf_page_is_resized_like_its_rendered_picture(llm: LLM, checkpoint: tuple[Path, Any]) -> None:
    pdf = write_pdf(Page(["A report"], size=(150, 400)))
    file = {"type": "file", "file": {"file_data": to_data_url(pdf, "application/pdf")}}
    [output] = llm.chat(ask(file, "What is it?"), GREEDY)
    directory, reference = checkpoint
    drawn = render_page(pdf, 0, "file")
    theirs = reference_answer(reference, directory, output.prompt_token_ids, [drawn], 8)
    assert output.outputs[0].token_ids[: len(theirs)] == theirs


def test_an_answer_about_a_film_equals_the_reference_s(llm: LLM, checkpoint: tuple[Path, Any]) -> None:
    video, still = film(49), picture(40, 60, 1)
    messages = ask(*shown(still), {"type": "video", "video": video}, "What happens?")
    [output] = llm.chat(messages, GREEDY)
    directory, reference = checkpoint
    # Two of the 24 frames per second, but at least four.
    frames = video[[0, 16, 32, 48]]
    theirs = reference_answer(reference, directory, output.prompt_token_ids, [still], 8, frames)
    assert output.outputs[0].token_ids[: len(theirs)] == theirs
    tokenizer = llm.get_tokenizer()
    written = tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    # The markers that the template writes around a film stay around its moments.
    assert "<|vision_start|><0.3 seconds><|vision_start|>" in written
    assert "<|vision_end|><1.7 seconds><|vision_start|>" in written
    [again] = llm.chat(messages, GREEDY)
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    assert again.num_cached_tokens == len(again.prompt_token_ids) - 1


@pytest.mark.parametrize(("num_frames", "kind"), [(1, "image"), (5, "video")])
def test_a_gif_of_several_frames_is_a_film(llm: LLM, num_frames: int, kind: str) -> None:
    gif = sample_films.film("gif", "gif", num_frames)
    [named] = llm.preparer.name_media(PicturePart(gif, "body"), None)
    assert named.picture.layout.kind == kind


def test_films_and_pictures_of_a_written_prompt_replace_their_markers(llm: LLM) -> None:
    video, still = film(8), picture(40, 60, 1)
    prompts = [
        {"prompt": f"<|{first}_pad|>and<|{second}_pad|>", "multi_modal_data": {"image": still, "video": video}}
        for first, second in (("image", "video"), ("video", "image"))
    ]
    one, other = llm.generate(prompts, GREEDY)
    assert sorted(one.prompt_token_ids) == sorted(other.prompt_token_ids)
    assert one.prompt_token_ids != other.prompt_token_ids


def test_prompt_embeds_are_answered_like_their_tokens(checkpoint: tuple[Path, Any]) -> None:
    directory, reference = checkpoint
    ids = list(range(40, 130))
    embeds = reference.get_input_embeddings()(torch.tensor(ids)).detach()
    with LLM(directory, **placed(enable_prompt_embeds=True)) as llm:
        by_tokens, by_embeds = llm.generate([{"prompt_token_ids": ids}, {"prompt_embeds": embeds}], GREEDY)
    assert by_embeds.outputs[0].token_ids == by_tokens.outputs[0].token_ids


def test_a_step_too_small_for_a_strip_of_an_embedded_prompt_is_refused(checkpoint: tuple[Path, Any]) -> None:
    """Pictures are limited to a smaller size here, so only the strip is too large for a step."""
    smaller = {"min_pixels": 4 * 32 * 32, "max_pixels": 8 * 32 * 32}
    with pytest.raises(KeepsightError, match=f"must be at least {TOKENS_PER_STRIP}"):
        LLM(
            checkpoint[0],
            **placed(
                enable_prompt_embeds=True,
                max_num_seqs=1,
                disable_chunked_mm_input=True,
                max_num_batched_tokens=60,
                mm_processor_kwargs=smaller,
            ),
        )


def test_an_answer_may_be_constrained_to_a_choice(llm: LLM) -> None:
    choices = ["Größe", "東京"]
    form = StructuredOutputsParams(choice=choices)
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=form)
    [output] = llm.chat(ask(*shown(picture(50, 50)), "Which?"), params)
    assert output.outputs[0].text in choices


@pytest.mark.parametrize(
    ("width", "height", "options", "message"),
    [
        (2010, 10, {}, "200"),
        (40, 40, {"do_pan_and_scan": True}, "cannot be changed; these can: fps, max_frames, max_pixels, "),
        (40, 40, {"max_pixels": 2 * MAX_PIXELS}, f"must be at most {MAX_PIXELS} here"),
    ],
)
def test_an_unsupported_size_is_refused_with_the_limit(
    llm: LLM, width: int, height: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(KeepsightError, match=message):
        llm.chat(ask(*shown(picture(width, height)), "What?"), GREEDY, mm_processor_kwargs=options)


def test_a_request_may_have_its_pictures_shown_smaller(llm: LLM) -> None:
    conversation, options = ask(*shown(picture(150, 150)), "What?"), {"max_pixels": 8 * 32 * 32}
    [usual], [smaller] = (llm.chat(conversation, GREEDY, mm_processor_kwargs=each) for each in ({}, options))
    assert len(smaller.prompt_token_ids) < len(usual.prompt_token_ids)


def test_pictures_and_films_are_found_on_disk_after_a_restart(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    directory, _ = checkpoint
    disk_caches = (
        "--encoder-disk-cache",
        str(tmp_path / "embeddings"),
        "--prefix-disk-cache",
        str(tmp_path / "prefixes"),
    )
    url, video = by_url(draw(4).picture), sample_films.film()
    by_bytes = {"type": "video_url", "video_url": {"url": to_data_url(video, "video/mp4")}}
    questions = ["What is it?", "What is it?", "And this?", "What is it?"]
    answers, encoded = [], list[str]()
    for questions_now in (questions[:3], questions[3:]):
        with real_server(str(directory), *disk_caches) as server:
            client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            headers = {"Content-Type": "video/mp4"}
            handle = httpx.post(f"{server.url}/v1/media", content=video, headers=headers, timeout=START_SECONDS).json()
            by_handle = {"type": "video", "media_id": handle["id"]}
            for question in questions_now:
                content: Any = [url, by_bytes if question == questions[0] else by_handle, say(question)]
                answer = client.chat.completions.create(
                    model=str(directory),
                    messages=[{"role": "user", "content": content}],
                    temperature=0,
                    max_tokens=6,
                    extra_body={"ignore_eos": True},
                )
                answers.append(answer.choices[0].message.content)
            metrics = httpx.get(f"{server.url}/metrics", timeout=START_SECONDS).text
            encoded += re.findall(r'^keepsight_media_encoded_total\{modality="(?:image|video)"\} (\S+)', metrics, re.M)
    # Two moments of the film: its minimum is four frames.
    assert list(map(float, encoded)) == [1, 2, 0, 0]
    assert answers[0] == answers[1] == answers[3]
