"""Chat templates like Qwen3-VL's, which render tools, tool calls and tool results themselves.

The coder's and 3.5's have another form of calls, whose arguments must be an object; their texts are trimmed. MiMo's
is like that form, but has fewer newlines.

The thinking variants open a thought for each answer, and render earlier thoughts only after the last user message.
Qwen2.5-VL's template does not support tools and inserts a default system message.
"""

TEMPLATE = """\
{%- macro show(content) -%}
    {%- if content is string %}{{ content }}{% else -%}
        {%- for part in content -%}
            {%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% endif -%}
            {%- if part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}{% endif -%}
            {%- if part.type == 'text' %}{{ part.text }}{% endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set speaks_first = messages[0].role == 'system' -%}
{%- if tools or speaks_first -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if speaks_first %}{{ show(messages[0].content) }}{% endif -%}
    {%- if tools -%}
        {%- if speaks_first %}{{ '\\n\\n' }}{% endif -%}
        {{- 'Functions that you may call:\\n<tools>' -}}
        {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor -%}
        {{- '\\n</tools>\\nCall one so:\\n' + TAUGHT_CALL -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
        {{- '\\n<tool_response>\\n' }}{{ show(message.content) }}{{ '\\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
    {%- elif not (loop.first and speaks_first) -%}
        {{- '<|im_start|>' }}{{ message.role }}{{ '\\n' -}}
        {{- WRITTEN_THOUGHT -}}
        WRITTEN_ANSWER
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {{- BEGUN_THOUGHT -}}
{%- endif -%}
"""
TAGGED = (
    r"""
        {{- show(message.content) -}}
        {%- for call in message.tool_calls or () -%}
            {%- if message.content or not loop.first %}{{ '\n' }}{% endif -%}
            {{- '<tool_call>\n{"name": "' }}{{ call.function.name }}{{ '", "arguments": ' -}}
            {{- WRITTEN_ARGUMENTS -}}
            {{- '}\n</tool_call>' -}}
        {%- endfor -%}""",
    r"""'<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>'""",
)
PARAMETERS = (
    r"""
        {%- set content = show(message.content) | trim -%}
        {{- content -}}
        {%- for call in message.tool_calls or () -%}
            {{- '' if content == '' and loop.first else '\n\n' if loop.first else '\n' -}}
            {{- '<tool_call>\n<function=' + call.function.name + '>\n' -}}
            {%- for name, value in call.function.arguments | items -%}
                {{- '<parameter=' + name + '>\n' -}}
                {{- WRITTEN_VALUE -}}
                {{- '\n</parameter>\n' -}}
            {%- endfor -%}
            {{- '</function>\n</tool_call>' -}}
        {%- endfor -%}""",
    r"'<tool_call>\n<function=NAME>\n<parameter=NAME>\nVALUE\n</parameter>\n</function>\n</tool_call>'",
)
# Its tools are described by tags with names like those of calls.
INLINE_PARAMETERS = (
    r"""
        {{- show(message.content) -}}
        {%- for call in message.tool_calls or () -%}
            {{- '<tool_call>\n<function=' + call.function.name + '>\n' -}}
            {%- for name, value in call.function.arguments | items -%}
                {{- '<parameter=' + name + '>' }}{{ WRITTEN_VALUE }}{{ '</parameter>\n' -}}
            {%- endfor -%}
            {{- '</function>\n</tool_call>' -}}
        {%- endfor -%}""",
    r"""'<tool_call>\n<function=NAME>\n<parameter=NAME>VALUE</parameter>\n</function>\n</tool_call>'
        + '\nwhere the names are those of\n<function>\n<parameter>\n<name>NAME</name>\n</parameter>\n</function>'""",
)


def _of(form: tuple[str, str], **others: str) -> str:
    template = TEMPLATE
    for name, text in {"WRITTEN_ANSWER": form[0].strip(), "TAUGHT_CALL": form[1], **others}.items():
        template = template.replace(name, text)
    return template


_AS_SENT = "(call.function.arguments if call.function.arguments is string else call.function.arguments | tojson)"
_OPTIONAL = r"'<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else ''"
_WITHOUT_THOUGHT = {"WRITTEN_THOUGHT": "''", "BEGUN_THOUGHT": _OPTIONAL}
_IS_SHOWN = "message.reasoning_content and 'user' not in messages[loop.index0:] | map(attribute='role')"
_THOUGHT = r"'<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n'"
_WITH_THOUGHT = {"WRITTEN_THOUGHT": f"({_THOUGHT}) if {_IS_SHOWN} else ''", "BEGUN_THOUGHT": r"'<think>\n'"}
# Qwen3's also accepts arguments as a string. Qwen2.5's re-serializes them.
QWEN_LIKE = _of(TAGGED, **_WITHOUT_THOUGHT, WRITTEN_ARGUMENTS=_AS_SENT)
OLDER_QWEN_LIKE = _of(TAGGED, **_WITHOUT_THOUGHT, WRITTEN_ARGUMENTS="call.function.arguments | tojson")
THINKING_QWEN_LIKE = _of(TAGGED, **_WITH_THOUGHT, WRITTEN_ARGUMENTS=_AS_SENT)
# The coder's writes numbers, booleans and null as Python does.
_IS_NESTED = "value is mapping or value is sequence and value is not string"
CODER_LIKE = _of(PARAMETERS, **_WITHOUT_THOUGHT, WRITTEN_VALUE=f"(value | tojson if {_IS_NESTED} else value | string)")
QWEN3_5_LIKE = _of(PARAMETERS, **_WITH_THOUGHT, WRITTEN_VALUE="(value if value is string else value | tojson)")
MIMO_LIKE = _of(
    INLINE_PARAMETERS, **_WITHOUT_THOUGHT, WRITTEN_VALUE=f"(value | tojson if {_IS_NESTED} else value | string)"
)
PICTURES_ALONE = """\
{%- for message in messages -%}
    {%- if loop.first and message.role != 'system' %}{{ '<|im_start|>system\\nBe of help.<|im_end|>\\n' }}{% endif -%}
    {{- '<|im_start|>' }}{{ message.role }}{{ '\\n' -}}
    {%- if message.content is string %}{{ message.content }}{% else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- elif 'text' in part %}{{ part.text }}{% endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
