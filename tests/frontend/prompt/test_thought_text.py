"""The chat template and the end of the prompt tell whether an answer begins with a thought."""

import pytest

from keepsight.frontend.prompt.read_messages import PromptEnd, read_messages
from keepsight.frontend.prompt.render_prompt import ChatTemplate
from keepsight.frontend.prompt.thought_text import TAGS, Thought, find_thought
from tests.frontend.gemma_like import DEMO
from tests.qwen_template import QWEN_LIKE, THINKING_QWEN_LIKE

OPEN, POSSIBLE = Thought(TAGS, is_open=True), Thought(TAGS, is_open=False)
BEGUN = Thought(TAGS, is_open=True, has_words=True)
USER = {"role": "user", "content": "What is <think>?"}


@pytest.mark.parametrize("source", [QWEN_LIKE, THINKING_QWEN_LIKE])
def test_a_template_that_writes_the_tags_knows_thoughts(source: str) -> None:
    assert ChatTemplate(source, {}).thought_form is TAGS


def test_others_know_none() -> None:
    assert ChatTemplate.from_checkpoint(DEMO, {}).thought_form is None
    assert ChatTemplate("{{ '<think>' }}{{ messages[0].content }}", {}).thought_form is None


@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        (THINKING_QWEN_LIKE, {}, OPEN),
        (QWEN_LIKE, {}, POSSIBLE),
        (QWEN_LIKE, {"enable_thinking": True}, POSSIBLE),
        (QWEN_LIKE, {"enable_thinking": False}, None),
    ],
)
def test_the_end_of_the_prompt_says_whether_one_can_come(
    source: str, options: dict[str, bool], expected: Thought | None
) -> None:
    prompt = ChatTemplate(source, {}).render(read_messages([USER], "answer", options))
    assert find_thought(TAGS, prompt) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("It is", None),
        ("Let me see.</think>It is", None),
        ("Behind <think> it", None),
        ("It ends with <think>", None),
        ("<think>\n", OPEN),
        ("<think>\nLet me see", BEGUN),
        ("<think>\nLet me see.\n</think>\n\nIt is", None),
        (" ", POSSIBLE),
    ],
)
@pytest.mark.parametrize("num_parts", [0, 1, 2])
def test_an_answer_that_is_gone_on_with_is_where_its_own_tags_leave_it(
    answer: str, expected: Thought | None, num_parts: int
) -> None:
    # An empty part would have no line.
    texts = [answer] if num_parts == 1 or answer.endswith("\n") else answer.split("\n", 1)
    content = [{"type": "text", "text": text} for text in texts] if num_parts else answer
    for end, begun in {"text": answer, "answer": ""}.items():
        place: PromptEnd = "text" if end == "text" else "answer"
        read = read_messages([USER, {"role": "assistant", "content": content}], place)
        assert read.begun_answer == begun
        if end == "text":
            assert find_thought(TAGS, ChatTemplate(QWEN_LIKE, {}).render(read), begun) == expected
