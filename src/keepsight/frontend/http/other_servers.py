"""What other servers call what is here: whoever comes from one is told our name for it.

Only names that nobody would guess from their spelling: of the others the nearest of ours is proposed.
"""

from collections.abc import Collection
from difflib import get_close_matches

# Of bodies: llama.cpp's, SGLang's, TGI's, and OpenAI's of other endpoints.
FIELDS = {
    "content": "prompt",
    "ebnf": "structured_outputs.grammar",
    "extra_key": "cache_salt",
    "grammar": "structured_outputs.grammar",
    "guided_json_object": "structured_outputs.json_object",
    "input_ids": "prompt",
    "inputs": "prompt",
    "json_schema": "response_format",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "n_probs": "top_logprobs",
    "no_stop_trim": "include_stop_str_in_output",
    "regex": "structured_outputs.regex",
    "text": "prompt",
    "with_pieces": "return_token_strs",
}


def propose_field(name: str, known: Collection[str]) -> str | None:
    """What may have been meant, of the fields that are known where `name` stands."""
    ours = FIELDS.get(name, "")
    if ours.partition(".")[0] in known:
        return ours
    return next(iter(get_close_matches(name, known, n=1)), None)
