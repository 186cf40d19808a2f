"""Other servers' names for what is here: errors propose our name to clients that come from one.

Lists only names whose spelling does not suggest ours; for all others the closest of ours is proposed.
"""

from collections.abc import Collection
from difflib import get_close_matches

# Fields of bodies: llama.cpp's, SGLang's, TGI's, and OpenAI's of other endpoints.
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
# Alternatives to refused fields.
FIELD_ALTERNATIVES = {
    "max_tokens": "max_output_tokens",
    "request_id": "the header X-Request-Id",
    "response_format": "text.format",
}
# Endpoints: vLLM's, SGLang's, llama.cpp's, and OpenAI's newer ones.
PATHS = {
    "/apply-template": "/tokenize",
    "/embed": "/v1/embeddings",
    "/embedding": "/v1/embeddings",
    "/embeddings": "/v1/embeddings",
    "/encode": "/v1/embeddings",
    "/pooling": "/v1/embeddings",
    "/completion": "/v1/completions",
    "/flush_cache": "/reset_prefix_cache",
    "/generate": "/v1/completions",
    "/get_model_info": "/v1/models",
    "/get_server_info": "/v1/models",
    "/health_generate": "/ready",
    "/invocations": "/v1/chat/completions",
    "/load": "/metrics",
    "/ping": "/health",
    "/props": "/v1/models",
    "/slots": "/debug/state",
}
# Paths less alike are different endpoints: /v1/batches is not /v1/messages.
MIN_LIKENESS = 0.8


def propose_path(path: str, known: Collection[str]) -> str | None:
    if (ours := PATHS.get(path)) in known:
        return ours
    return next(iter(get_close_matches(path, known, n=1, cutoff=MIN_LIKENESS)), None)


def propose_field(name: str, known: Collection[str]) -> str | None:
    """Return the field that `name` may have meant, out of those known in its place; None if there is none."""
    ours = FIELDS.get(name, "")
    if ours.partition(".")[0] in known:
        return ours
    return next(iter(get_close_matches(name, known, n=1)), None)
