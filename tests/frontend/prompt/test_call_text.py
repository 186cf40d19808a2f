"""Templates that know calls: calls are parsed and written in the form that the template teaches."""

from collections.abc import Mapping
from typing import Any

import pytest

from keepsight.frontend.prompt.call_text import BARE, INLINE_PARAMETERS, PARAMETERS, TAGGED, CallForm, write_call
from keepsight.frontend.prompt.render_prompt import ChatTemplate
from keepsight.frontend.prompt.tokenizer import Tokenizer
from tests.frontend.gemma_like import DEMO
from tests.qwen_template import CODER_LIKE, MIMO_LIKE, OLDER_QWEN_LIKE, QWEN3_5_LIKE, QWEN_LIKE

NO_TOKENS: Mapping[str, str] = {}
ARGUMENTS = '{"at": "the \\"séa\\"", "times": [1, 2.5, {}], "deep": {"is": true}}'


def calling(*calls: tuple[str, str], text: str | None = None) -> dict[str, Any]:
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    listed = [{"id": f"c{at}", "type": "function", "function": each} for at, each in enumerate(functions)]
    return {"role": "assistant", "content": text, "tool_calls": listed}


@pytest.mark.parametrize(
    ("source", "space"),
    [(QWEN_LIKE, "\n"), (OLDER_QWEN_LIKE, "\n"), (CODER_LIKE, "\n\n"), (QWEN3_5_LIKE, "\n\n"), (MIMO_LIKE, "")],
)
@pytest.mark.parametrize("text", [None, "I look."])
def test_a_call_is_written_as_the_template_writes_it_into_the_next_turn(
    source: str, space: str, text: str | None
) -> None:
    template, user = ChatTemplate(source, NO_TOKENS), {"role": "user", "content": "Hello"}
    form = template.call_form
    calls = ("look", ARGUMENTS), ("a.b-c", "{}")
    written = (text + space if text else "") + form.between.join(write_call(*each, form) for each in calls)
    later = template.render([user, calling(*calls, text=text), {"role": "tool", "content": "x", "tool_call_id": "c0"}])
    assert later.startswith(template.render([user]).removesuffix("<think>\n") + written + "<|im_end|>\n")


@pytest.mark.parametrize(
    ("source", "form", "tags"),
    [
        (CODER_LIKE, PARAMETERS, "<parameter={}>\n{}\n</parameter>\n"),
        (QWEN3_5_LIKE, PARAMETERS, "<parameter={}>\n{}\n</parameter>\n"),
        (MIMO_LIKE, INLINE_PARAMETERS, "<parameter={}>{}</parameter>\n"),
    ],
)
def test_a_parameter_s_value_stays_as_it_was_written(source: str, form: CallForm, tags: str) -> None:
    written = '{"a": true, "b": null, "c": 1.50, "d": [1,2,  {"x": false}], "e": "[1,2]", "f": "true", "g": ""}'
    shown = ChatTemplate(source, NO_TOKENS).render([calling(("look", written))])
    values = ("true", "null", "1.50", '[1,2,  {"x": false}]', "[1,2]", "true", "")
    texts = [tags.format(name, value) for name, value in zip("abcdefg", values, strict=True)]
    assert f"<function=look>\n{''.join(texts)}</function>" in shown
    assert write_call("look", written, form) in shown


@pytest.mark.parametrize("arguments", ['{"at":', "[1]", '"at"', '{"at": "\\ud800"}'])
def test_of_arguments_that_were_cut_off_no_parameter_is_written(arguments: str) -> None:
    nothing = "<tool_call>\n<function=look>\n</function>\n</tool_call>"
    assert write_call("look", arguments, PARAMETERS) == nothing
    assert nothing in ChatTemplate(QWEN3_5_LIKE, NO_TOKENS).render([calling(("look", arguments))])


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (QWEN_LIKE, TAGGED),
        (OLDER_QWEN_LIKE, TAGGED),
        (CODER_LIKE, PARAMETERS),
        (QWEN3_5_LIKE, PARAMETERS),
        (MIMO_LIKE, INLINE_PARAMETERS),
        # Where an example has both ways, it does not say which one.
        (MIMO_LIKE.replace(">VALUE<", ">VALUE</parameter>\\n<parameter=NAME>\\nVALUE\\n<"), PARAMETERS),
        (f'{QWEN3_5_LIKE}{{# <tool_call> #}}{{{{ message["arguments"] or "\\"arguments\\"" }}}}', PARAMETERS),
        (
            '{% if tools %}{{ "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>" }}{% endif %}',
            BARE,
        ),
        ('{% if tools %}Write <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>{% endif %}', TAGGED),
        ('{% if tools %}{{ "<tool_call><function=NAME>" }}{{ messages[0].arguments }}{% endif %}', BARE),
        ('{% if tools %}{{ tools | tojson }}{"name": NAME, "arguments": OBJECT}{% endif %}', BARE),
        ('<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>', BARE),
        ("{{ messages[0].content }}", BARE),
    ],
)
def test_the_form_is_that_which_a_template_teaches_with_the_tools(source: str, form: CallForm) -> None:
    assert ChatTemplate(source, NO_TOKENS).call_form is form


def test_gemma_s_template_teaches_none() -> None:
    template = ChatTemplate.from_checkpoint(DEMO, Tokenizer.from_checkpoint(DEMO).special_tokens)
    assert template.call_form is BARE


def test_a_template_that_only_teaches_the_form_is_shown_calls_as_text_of_that_form() -> None:
    source = '{% if tools %}<tool_call>"arguments"{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}'
    shown = ChatTemplate(source, NO_TOKENS).render([calling(("look", '{"at":'))])
    assert shown == '<tool_call>\n{"name": "look", "arguments": {"at":}\n</tool_call>'
