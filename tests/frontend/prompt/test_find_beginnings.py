"""From a breakpoint in the messages to the number of prompt tokens before it, with several templates."""

from collections.abc import Mapping
from typing import Any

import pytest

from keepsight.errors import ChatTemplateError
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prompt.find_beginnings import find_beginnings
from keepsight.frontend.prompt.read_messages import Breakpoint, read_messages
from keepsight.frontend.prompt.render_prompt import ChatTemplate
from keepsight.requests import EngineRequest
from keepsight.sampling_params import SamplingParams
from tests.drawn import Drawn, draw

NO_TOKENS: Mapping[str, str] = {}


def text(words: str, ttl: str | None = None) -> dict[str, Any]:
    return {"type": "text", "text": words} | ({} if ttl is None else mark(ttl))


def mark(ttl: str = "30m") -> dict[str, Any]:
    return {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": ttl}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return draw(5)


def prepare(preparer: RequestPreparer, *messages: Any, **options: Any) -> EngineRequest:
    return preparer.prepare_chat(list(messages), SamplingParams(), **options).engine_request


def pinned_text(preparer: RequestPreparer, request: EngineRequest) -> list[str]:
    return [preparer.tokenizer.decode(request.token_ids[: pin.num_tokens]) for pin in request.pins]


def test_who_marks_nothing_pins_nothing(preparer: RequestPreparer, drawn: Drawn) -> None:
    assert prepare(preparer, user(text("Hello"))).pins == ()
    assert prepare(preparer, {"role": "user", "content": "Hello"}).pins == ()


def test_all_before_a_marked_part_is_pinned_and_nothing_behind_it(preparer: RequestPreparer) -> None:
    request = prepare(preparer, user(text("Hello. ", "30m"), text("What is this?")))
    assert pinned_text(preparer, request) == ["user\nHello."]
    assert [pin.seconds for pin in request.pins] == [1800]


def test_a_system_message_is_pinned_although_the_template_writes_it_into_the_next_turn(
    preparer: RequestPreparer,
) -> None:
    system = {"role": "system", "content": [text("Look closely.", "12h")]}
    first = prepare(preparer, system, user(text("What is this?")))
    assert pinned_text(preparer, first) == ["user\nLook closely.\n\n"]
    [pin] = first.pins
    assert pin.seconds == 12 * 3600
    other = prepare(preparer, system, {"role": "user", "content": "Hello"})
    assert other.token_ids[: pin.num_tokens] == first.token_ids[: pin.num_tokens]


def test_a_marked_picture_is_pinned_with_its_last_token(preparer: RequestPreparer, drawn: Drawn) -> None:
    picture = {"type": "image_url", "image_url": {"url": drawn.data_url}, **mark()}
    [pin] = (request := prepare(preparer, user(text("Look: "), picture, text("What is it?")))).pins
    assert request.media[0].span.end < pin.num_tokens < len(request.token_ids)


def test_crops_of_pictures_before_and_behind_a_breakpoint_are_told_apart(
    preparer: RequestPreparer, drawn: Drawn
) -> None:
    wide = draw(6).picture.resize((900, 300))
    shown = {"type": "image_pil", "image_pil": wide}
    request = prepare(
        preparer,
        user(shown, text("Look.", "30m"), shown, text("And?")),
        mm_processor_kwargs={"do_pan_and_scan": True, "pan_and_scan_min_ratio_to_activate": 1.2},
    )
    assert len(request.media) > 2, "there are crops"
    [pin] = request.pins
    middle = len(request.media) // 2
    assert request.media[middle - 1].span.end < pin.num_tokens <= request.media[middle].span.start


def test_of_each_time_the_last_breakpoint_counts(preparer: RequestPreparer) -> None:
    parts = [text("One.", "12h"), text("Two.", "12h"), text("Three.", "30m"), text("Four.")]
    conversation = read_messages([user(text("Zero.", "30m")), {"role": "assistant", "content": "Yes."}, user(*parts)])
    assert sorted(conversation.breakpoints) == [Breakpoint(2, 2, 0, 12 * 3600.0), Breakpoint(2, 3, 0, 1800.0)]


def test_what_comes_back_in_a_later_turn_begins_with_what_was_pinned(preparer: RequestPreparer) -> None:
    turns = [user(text("Hello")), {"role": "assistant", "content": "Hello!"}, user(text("What is this?", "30m"))]
    [pin] = (earlier := prepare(preparer, *turns)).pins
    later = prepare(preparer, *turns, {"role": "assistant", "content": "A box."}, user(text("Why?")))
    assert pin.num_tokens >= len(earlier.token_ids) - 3, "but for the turn of the model"
    assert later.token_ids[: pin.num_tokens] == earlier.token_ids[: pin.num_tokens]


def test_a_template_that_refuses_silent_turns_fails_no_request() -> None:
    source = (
        "{% for m in messages %}{% if not m.content %}{{ raise_exception('say something') }}{% endif %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(source, NO_TOKENS)
    conversation = read_messages([user(text("One.", "30m")), user(text("Two."))])
    assert template.render(conversation) == "One.Two."
    with pytest.raises(ChatTemplateError, match="say something"):
        template.render(conversation.emptied_after(conversation.breakpoints[0]))
    assert list(find_beginnings(template, conversation, ())) == []
