"""What an effort of reasoning becomes, with templates that have a switch, levels of their own, both, or neither."""

import dataclasses
from typing import Any, get_args

import pytest

from keepsight.errors import UnsupportedFieldError
from keepsight.frontend.prompt.read_messages import read_messages
from keepsight.frontend.prompt.reasoning_effort import Effort
from keepsight.frontend.prompt.render_prompt import ChatTemplate
from tests.frontend.gemma_like import DEMO
from tests.qwen_template import QWEN_LIKE, THINKING_QWEN_LIKE

SWITCH = "{{ messages[0].content }}{{ enable_thinking | default('unset') }}"
DEEPSEEK_LIKE = "{{ messages[0].content }}{{ thinking if thinking is defined else 'unset' }}"
LEVELS = "{{ messages[0].content }}{{ reasoning_effort | default('unset') }}"
BOTH = LEVELS + "{{ enable_thinking if enable_thinking is defined else 'unset' }}"
UP: tuple[Effort, ...] = ("low", "medium", "high", "xhigh", "max")
OFF: tuple[Effort | None, ...] = ("none", "minimal", None)
TAGS_ONLY = "{{ messages[0].content.split('</think>')[-1] }}{{ '' if true else '<think>' }}"


def render(source: str, effort: Effort | None, **variables: Any) -> str:
    read = read_messages([{"role": "user", "content": ":"}], "answer", variables)
    return ChatTemplate(source, {}).render(dataclasses.replace(read, effort=effort)).removeprefix(":")


@pytest.mark.parametrize("source", [SWITCH, DEEPSEEK_LIKE])
def test_a_template_with_a_switch_is_switched(source: str) -> None:
    assert [render(source, each) for each in OFF] == ["False", "False", "unset"]
    assert {render(source, each) for each in UP} == {"True"}


def test_a_template_with_levels_gets_them_as_they_are() -> None:
    assert all(render(LEVELS, each) == each for each in get_args(Effort))
    assert render(LEVELS, None) == "unset"


def test_a_template_with_both_is_told_to_think_at_a_level_or_only_not_to_think() -> None:
    assert render(BOTH, "none") == "unsetFalse"
    assert [render(BOTH, each) for each in ("minimal", "high")] == ["minimalTrue", "highTrue"]


def test_variables_that_the_client_sets_itself_hold() -> None:
    assert render(SWITCH, "high", enable_thinking=False) == "False"
    assert render(BOTH, "high", reasoning_effort="low") == "lowTrue"


def test_a_model_that_always_thinks_takes_any_effort_but_none() -> None:
    assert {render(THINKING_QWEN_LIKE, each) for each in (*UP, "minimal")} == {render(THINKING_QWEN_LIKE, None)}
    with pytest.raises(UnsupportedFieldError, match="always thinks") as caught:
        render(THINKING_QWEN_LIKE, "none")
    assert caught.value.field == "reasoning_effort"


def test_a_model_that_thinks_when_it_chooses_takes_any_effort() -> None:
    assert {render(TAGS_ONLY, each) for each in get_args(Effort)} == {render(TAGS_ONLY, None)}


def test_a_model_that_cannot_think_takes_none_only() -> None:
    demo = ChatTemplate.from_checkpoint(DEMO, {})
    read = read_messages([{"role": "user", "content": "Hi"}])
    assert demo.render(dataclasses.replace(read, effort="none")) == demo.render(read)
    for effort in ("minimal", *UP):
        with pytest.raises(UnsupportedFieldError, match=r"reasoning_effort: .* does not think"):
            demo.render(dataclasses.replace(read, effort=effort))


def test_the_effort_counts_before_a_breakpoint_too() -> None:
    part = {"type": "text", "text": "Hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
    read = dataclasses.replace(read_messages([{"role": "user", "content": [part]}]), effort="none")
    [breakpoint_] = read.breakpoints
    template = ChatTemplate(QWEN_LIKE, {})
    assert template.render(read.emptied_after(breakpoint_)) == template.render(read)
