"""Other servers' names for what is here: errors propose our name to clients that come from one.

Lists only names whose spelling does not suggest ours; for all others the closest of ours is proposed.
"""

from collections.abc import Collection, Mapping

from keepsight.other_options import find_closest

# Fields of bodies: llama.cpp's, SGLang's, TGI's, Ollama's, those that Qwen's utilities put into a picture's part, and
# those of other endpoints or places of a body. Several names: the first that is known in that place.
FIELDS: Mapping[str, str | tuple[str, ...]] = {
    "content": "prompt",
    "do_pan_and_scan": "mm_processor_kwargs.do_pan_and_scan",
    "ebnf": "structured_outputs.grammar",
    "enable_thinking": "chat_template_kwargs.enable_thinking",
    "extra_key": "cache_salt",
    "fps": "mm_processor_kwargs.fps",
    "grammar": "structured_outputs.grammar",
    "guided_json_object": "structured_outputs.json_object",
    "input": ("prompt", "messages"),
    "input_ids": ("prompt", "input"),
    "input_schema": "function.parameters",
    "inputs": "prompt",
    "instructions": ("system", "messages"),
    "json_schema": "response_format",
    "lora_path": "model",
    "max_completion_tokens": ("max_tokens", "max_output_tokens"),
    "max_frames": "mm_processor_kwargs.max_frames",
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "max_output_tokens": "max_tokens",
    "max_pixels": "mm_processor_kwargs.max_pixels",
    "messages": ("input", "prompt"),
    "min_frames": "mm_processor_kwargs.min_frames",
    "min_pixels": "mm_processor_kwargs.min_pixels",
    "n_predict": "max_tokens",
    "n_probs": ("top_logprobs", "logprobs"),
    "name": "function.name",
    "nframes": "mm_processor_kwargs.num_frames",
    "no_stop_trim": "include_stop_str_in_output",
    "num_predict": "max_tokens",
    "parameters": ("input_schema", "function.parameters"),
    "prompt": ("input", "messages"),
    "reasoning_effort": "reasoning.effort",
    "reasoning": "reasoning_effort",
    "regex": "structured_outputs.regex",
    "resized_height": "mm_processor_kwargs.max_pixels",
    "resized_width": "mm_processor_kwargs.max_pixels",
    "stop_sequences": "stop",
    "system": "messages",
    "text": "prompt",
    "think": "chat_template_kwargs.enable_thinking",
    "thinking": "chat_template_kwargs.enable_thinking",
    "with_pieces": "return_token_strs",
}
# What is wrong with a field of this name, in place of the name of another.
FIELD_FAULTS = {
    "extra_body": "is an argument of OpenAI's Python client only: what it contains belongs in the body itself",
}
# Alternatives to refused fields.
FIELD_ALTERNATIVES = {
    "max_tokens": "max_output_tokens",
    "request_id": "the header X-Request-Id",
    "response_format": "text.format",
    "separate_reasoning": "a completion, whose text includes the thought,",
}
# Endpoints: vLLM's, SGLang's, llama.cpp's and Ollama's.
PATHS = {
    "/api/chat": "/v1/chat/completions",
    "/api/generate": "/v1/completions",
    "/api/tags": "/v1/models",
    "/apply-template": "/tokenize",
    "/embed": "/v1/embeddings",
    "/embedding": "/v1/embeddings",
    "/embeddings": "/v1/embeddings",
    "/encode": "/v1/embeddings",
    "/completion": "/v1/completions",
    "/flush_cache": "/reset_prefix_cache",
    "/generate": "/v1/completions",
    "/get_model_info": "/v1/models",
    "/get_server_info": "/debug/state",
    "/health_generate": "/ready",
    "/invocations": "/v1/chat/completions",
    "/load": "/metrics",
    "/model_info": "/v1/models",
    "/ping": "/health",
    "/pooling": "/v1/embeddings",
    "/props": "/v1/models",
    "/server_info": "/debug/state",
    "/slots": "/debug/state",
}


def propose_path(path: str, known: Collection[str]) -> str | None:
    if (ours := PATHS.get(path)) in known:
        return ours
    return find_closest(path, known)


def propose_field(name: str, known: Collection[str]) -> str | None:
    """Return the field that `name` may have meant, out of those known in its place; None if there is none."""
    ours = FIELDS.get(name, ())
    for each in (ours,) if isinstance(ours, str) else ours:
        if each.partition(".")[0] in known:
            return each
    return find_closest(name, known)
