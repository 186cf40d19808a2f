"""Chat templates like Qwen3-VL's, which render tools, tool calls and tool results themselves.

The thinking variant opens a thought for each answer, and renders earlier thoughts only after the last user message.
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
        {{- '\\n</tools>\\nCall one so:\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>' -}}
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
        {{- show(message.content) -}}
        {%- for call in message.tool_calls or () -%}
            {%- if message.content or not loop.first %}{{ '\\n' }}{% endif -%}
            {{- '<tool_call>\\n{"name": "' }}{{ call.function.name }}{{ '", "arguments": ' -}}
            {{- WRITTEN_ARGUMENTS -}}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {{- BEGUN_THOUGHT -}}
{%- endif -%}
"""
_AS_SENT = "(call.function.arguments if call.function.arguments is string else call.function.arguments | tojson)"
# Qwen3's also accepts arguments as a string.  Qwen2.5's re-serializes them.
_WITHOUT_THOUGHT = TEMPLATE.replace("WRITTEN_THOUGHT", "''").replace(
    "BEGUN_THOUGHT", r"'<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else ''"
)
QWEN_LIKE = _WITHOUT_THOUGHT.replace("WRITTEN_ARGUMENTS", _AS_SENT)
OLDER_QWEN_LIKE = _WITHOUT_THOUGHT.replace("WRITTEN_ARGUMENTS", "call.function.arguments | tojson")
_IS_SHOWN = "message.reasoning_content and 'user' not in messages[loop.index0:] | map(attribute='role')"
THINKING_QWEN_LIKE = (
    TEMPLATE.replace("WRITTEN_ARGUMENTS", _AS_SENT)
    .replace(
        "WRITTEN_THOUGHT",
        rf"('<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n') if {_IS_SHOWN} else ''",
    )
    .replace("BEGUN_THOUGHT", r"'<think>\n'")
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
