"""Options of other servers: errors tell those who bring them from vLLM, SGLang or llama.cpp what to do here.

Lists only what users of these servers often type, and only names whose spelling does not suggest ours. Also knows when
it does, for all other names that callers may misspell.
"""

import re
from collections.abc import Callable, Collection
from difflib import get_close_matches

# A high cutoff, to suggest typos only: trust_remote_code must not yield trust_exif_image_id, nor input min_p.
MIN_LIKENESS = 0.8
_READ_FROM_FOLDER = "is not needed: everything is read from the model's folder"
_MODEL = "does not exist: the model's folder is the first argument of `keepsight serve` and LLM, and --model elsewhere"
_DEVICES = "does not exist: an engine uses one device; `keepsight serve --data-parallel-size` runs several engines"
_DOWNLOAD = "does not exist, as nothing is downloaded: `hf download NAME --local-dir FOLDER` fetches a model"
_TOOLS = "is not needed: the model's chat template says how tools are called"
_THOUGHTS = "is not needed: the model's chat template says how thoughts are marked"
_ALL_ANSWERED = "is not needed: every model answers chats, completions and /v1/embeddings"
_ALL_LAYERS = "is not needed: all layers are computed by one device"
_THREADS = "does not exist: OMP_NUM_THREADS in the environment sets the threads of an engine on a CPU"
# By underscored name; our own options are in angle brackets.
HINTS = {
    # vLLM's
    "chat_template": _READ_FROM_FOLDER,
    "chat_template_content_format": _READ_FROM_FOLDER,
    "convert": _ALL_ANSWERED,
    "disable_log_requests": "is <no_log_requests> here",
    "disable_log_stats": "is not needed: statistics are not logged",
    "download_dir": _DOWNLOAD,
    "enable_auto_tool_choice": _TOOLS,
    "enable_chunked_prefill": "is not needed: long prompts are always computed in pieces",
    "enable_log_requests": "is <log_requests> here, the default",
    "enable_prompt_tokens_details": "is not needed: usage always has them",
    "enable_request_id_headers": "is not needed: every answer has X-Request-Id",
    "hf_overrides": "does not exist: change config.json in a copy of the model's folder",
    "kv_cache_dtype": "does not exist: keys and values have the precision of <dtype>",
    "load_format": _READ_FROM_FOLDER,
    "max_cpu_loras": "does not exist: <max_loras> says how many are in memory",
    "max_logprobs": "does not exist: a request may ask for 20",
    "media_io_kwargs": "does not exist: <mm_processor_kwargs> has fps and num_frames",
    "mm_encoder_tp_mode": _DEVICES,
    "model": _MODEL,
    "override_generation_config": "does not exist: <generation_config> takes the path of one",
    "pipeline_parallel_size": _DEVICES,
    "pp": _DEVICES,
    "reasoning_parser": _THOUGHTS,
    "revision": _DOWNLOAD,
    "runner": _ALL_ANSWERED,
    "scheduling_policy": "is not needed: a request's priority always counts",
    "seed": "does not exist: a request may have one",
    "speculative_config": "does not exist: <guess_up_to> says how much is guessed, from the prompt and the answer",
    "task": _ALL_ANSWERED,
    "tensor_parallel_size": _DEVICES,
    "tokenizer": _READ_FROM_FOLDER,
    "tokenizer_mode": _READ_FROM_FOLDER,
    "tool_call_parser": _TOOLS,
    "tp": _DEVICES,
    "trust_remote_code": "is not needed: no code in the model's folder is run",
    # SGLang's
    "chunked_prefill_size": "is <max_num_batched_tokens> here",
    "context_length": "is <max_model_len> here",
    "disable_radix_cache": "is <no_enable_prefix_caching> here",
    "dp_size": "is <data_parallel_size> here",
    "enable_metrics": "is not needed: /metrics always exists",
    "max_running_requests": "is <max_num_seqs> here",
    "mem_fraction_static": "is <gpu_memory_utilization> here",
    "model_path": _MODEL,
    "tp_size": _DEVICES,
    # llama.cpp's
    "alias": "is <served_model_name> here",
    "c": "is <max_model_len> here",
    "ctx_size": "is <max_model_len> here",
    "hf_repo": _DOWNLOAD,
    "jinja": _READ_FROM_FOLDER,
    "m": _MODEL,
    "mmproj": _READ_FROM_FOLDER,
    "n_gpu_layers": _ALL_LAYERS,
    "ngl": _ALL_LAYERS,
    "np": "is <max_num_seqs> here",
    "parallel": "is <max_num_seqs> here",
    "t": _THREADS,
    "threads": _THREADS,
}
_OURS = re.compile(r"<(\w+)>")


def explain_option(name: str, known: Collection[str], spell: Callable[[str], str] = str) -> str | None:
    """Return what to write in place of an option, or why to leave it out; None if neither is known.

    `name` and those `known` in this place have underscores; `spell` returns one of ours as it is typed.
    """
    # Where no model is loaded, other servers' options of these names mean something else.
    hint = HINTS.get(name) if "dtype" in known else None
    if hint is not None and set(_OURS.findall(hint)) <= set(known):
        return _OURS.sub(lambda ours: spell(ours[1]), hint)
    close = find_closest(name, known)
    return f"is not an option; did you mean {spell(close)}?" if close else None


def find_closest(name: str, known: Collection[str]) -> str | None:
    """Return the name of which this one may be a misspelling, of an option or of anything else."""
    return next(iter(get_close_matches(name, known, n=1, cutoff=MIN_LIKENESS)), None)
