"""What an effort of reasoning, which OpenAI's clients ask for, becomes for a chat template.

A template may have a switch that turns thinking on or off, a variable for levels of its own, both, or neither.
"""

from collections.abc import Collection
from typing import Any, Literal

from keepsight.errors import UnsupportedFieldError

# OpenAI's levels, and vLLM's and SGLang's `max`.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# The names of the switch: Qwen's and GLM's, and DeepSeek's and Granite's.
SWITCHES = ("enable_thinking", "thinking")
# The name of the request's field, and of the variable for levels.
_NAME = "reasoning_effort"


def spell_effort(effort: Effort, variables: Collection[str], *, may_think: bool, always_thinks: bool) -> dict[str, Any]:
    """Return the values of a template's variables. Levels are passed as they are: a template may refuse one."""
    switches = [name for name in SWITCHES if name in variables]
    if _NAME in variables and not (effort == "none" and switches):
        return dict.fromkeys(switches, True) | {_NAME: effort}
    if switches:
        # OpenAI's `minimal` is few or no words of thought, and a switch has no other way of saying few.
        return dict.fromkeys(switches, effort not in ("none", "minimal"))
    if effort == "none" and always_thinks:
        raise UnsupportedFieldError(_NAME, "cannot be 'none': this model always thinks before it answers")
    if effort != "none" and not may_think:
        raise UnsupportedFieldError(_NAME, "must be 'none' or left out: this model does not think before it answers")
    return {}
