"""The flags shared by all commands with a model: `Config`'s names and defaults, with their help texts."""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from keepsight.cli.one_line_parser import flag_of
from keepsight.config import CHOICES, LEAST_INTEGERS, NUMBERS, SWITCHES, Config
from keepsight.errors import InvalidArgumentError

DEFAULTS = Config()
# Help texts, by the groups in which help shows them.
_HELP = {
    "model": {
        "dtype": "precision of matrix products (default: bfloat16 on a GPU, the checkpoint's on a CPU)",
        "device": "where to compute (default: a GPU, if any)",
        "model_impl": "whose code computes the model (default: Keepsight's if it has any, else transformers')",
        "quantization": "on a CPU, store the decoder's matrices as int8, with a scale per row (default: as published)",
        "enforce_eager": "on a GPU, use only torch's operations: no Keepsight kernels and no CUDA graphs",
        "max_model_len": "longest prompt and answer together, in tokens (default: the checkpoint's, or what fits)",
        "generation_config": (
            "source of default sampling parameters: a path to a generation_config.json, or none (default: auto, the "
            "checkpoint's)"
        ),
    },
    "scheduling": {
        "max_num_batched_tokens": (
            "tokens of all requests in one step (default: 2048 on a CPU, 8192 on a GPU, or more where a picture needs "
            "it)"
        ),
        "max_num_seqs": "sequences in one step (default: 256, or fewer if a step has few tokens)",
        "max_prompt_tokens_beside_streams": (
            "while answers stream, up to this many prompt tokens join a step, and longer prompts are computed beside "
            "it; if at least three prompts wait, and more than half as many as answers stream, all join; 0: none ever "
            "does (default: 32 on a CPU, all on a GPU)"
        ),
        "guess_up_to": (
            "fill steps up to this many tokens with guesses of what answers say next, from what followed the same "
            "three tokens before; right guesses save steps, wrong ones change nothing; 0: none (default: 8, or 0 with "
            "recurrent layers)"
        ),
        "performance_mode": (
            "favour the pace of each answer, or total throughput, for which answers pause while pictures are encoded"
        ),
    },
    "KV cache and prefix cache": {
        "block_size": "positions per KV block",
        "enable_prefix_caching": "cache the keys and values of prompts for later prompts that begin the same",
        "prefix_disk_cache": (
            "folder where keys and values of prompts outlive the server, and its size "
            "(default: none; the flag alone: 16G in ~/.cache/keepsight/prefixes)"
        ),
        "kv_cache_memory_bytes": "bytes for all KV blocks (default: what the machine has room for)",
        "num_gpu_blocks_override": "number of KV blocks, instead of their bytes; on a CPU too",
        "gpu_memory_utilization": "fraction of a GPU's memory to use, including weights",
    },
    "pictures, encoder cache and processor cache": {
        "image_backend": "which of transformers' image processors to match exactly",
        "mm_processor_kwargs": """options of the processors, such as '{"do_pan_and_scan": true}'""",
        "mm_hasher_algorithm": "hash that identifies pictures (default: KEEPSIGHT_MM_HASHER_ALGORITHM, else blake3)",
        "trust_exif_image_id": (
            "take pictures of the same size with the same UUID as EXIF ImageID to be identical, without hashing them"
        ),
        "enable_mm_embeds": (
            "accept content parts of type image_embeds: embeddings of a picture, computed by the caller"
        ),
        "enable_prompt_embeds": (
            "accept prompt_embeds in place of a completion's prompt: embeddings of its tokens, computed by the caller"
        ),
        "encoder_cache_gb": (
            "GiB of embeddings kept for later requests, 0 for none (default: 512 pictures, at most 5 % of the memory)"
        ),
        "encoder_cache_size": "the same, as a number of embeddings",
        "max_mm_cache_bytes": "the same, in bytes",
        "mm_cache_device": "where embeddings are kept (default: where the model is)",
        "max_num_encoder_input_tokens": (
            "embeddings whose pictures are encoded at the same time (default: as many as tokens in a step)"
        ),
        "disable_chunked_mm_input": "compute each picture in one step; Gemma 3's always are",
        "encoder_share": "fraction of the machine that encoding may take while answers stream",
        "mm_processor_cache_gb": (
            "GiB of decoded and resized pictures kept for later requests, 0: none (default: 4, at most a quarter of "
            "the available memory)"
        ),
        "mm_processor_cache_type": (
            "where they are kept: in the engine (lru), in a ring of shared memory (shm), or in shared-memory files "
            "that all processes read (default: shared, or lru without shared memory)"
        ),
        "mm_shm_cache_max_object_size_mb": "largest picture in the ring of shm, in MiB",
        "verify_hits": "fraction of the processor cache's hits to recompute and compare, 0 to 1",
        "media_workers": (
            "processes for pictures, as many for films and as many for looks; threads in LLM (default: one per core)"
        ),
    },
    "tiers for embeddings that the encoder cache evicts": {
        "encoder_host_cache_gb": "GiB of host memory, 0 for none (default: 1, at most 5 % of what is available)",
        "encoder_disk_cache": (
            "folder, and its size (default: none; the flag alone: 16G in ~/.cache/keepsight/embeddings)"
        ),
        "encoder_remote_cache": (
            "server that speaks Redis's protocol, as redis://[user:password@]host:port/database or unix:///path "
            "(default: none)"
        ),
        "encoder_remote_cache_gb": (
            "GiB of embeddings there, the same for all servers that share it (default: up to its own maxmemory)"
        ),
        "encoder_cache_policy": (
            "what to evict first from full host memory or disk: the least recently used (lru), what is cheapest to "
            "encode again (cost), or LRU or S3-FIFO by simulation (default: auto); the device's memory is always lru"
        ),
        "record_cache_trace": (
            "file that records each use of a picture's embeddings, for `keepsight cache simulate` (default: none)"
        ),
    },
    "media sources and limits": {
        "limit_mm_per_prompt": (
            """pictures, videos and sounds per request, with earlier turns: '{"image": 8}' or image=8,video=1"""
        ),
        "max_image_pixels": "pixels of one picture, checked before it is decoded",
        "max_media_bytes": "bytes of one picture, as sent or downloaded",
        "max_request_media_bytes": "bytes of all pictures of one request",
        "allowed_local_media_path": "folder that file: URLs may read from (default: none)",
        "allowed_media_domains": "hosts from which pictures may be downloaded (default: any public one)",
        "allowed_media_networks": "non-public networks that may be reached, such as 10.0.0.0/8 (default: none)",
        "media_fetch_timeout": "seconds that all downloads of one request may take",
        "media_url_cache_bytes": "bytes of downloads cached by URL, 0: none",
    },
}

# Flags of `serve` only.
_HELP_OF_ADAPTERS = {
    "adapters (LoRA), each served as a model under its own name": {
        "enable_lora": "enable adapters",
        "lora_modules": (
            """their names and folders, as PEFT writes them: NAME=PATH, or '{"name": "sql", "path": "FOLDER", """
            """"base_model_name": "shown as its parent"}'"""
        ),
        "max_loras": "most adapters in memory; those of --lora-modules are loaded at the start",
        "max_lora_rank": "largest rank of an adapter",
    },
}


# As vLLM reads them.
_MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def _read_integer(text: str) -> int:
    """Parse 8192, 8k (thousands) or 8K (1024 each)."""
    try:
        return int(text) if text[-1:] not in _MULTIPLES else int(text[:-1]) * _MULTIPLES[text[-1]]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}; such as 8192, 8k or 8K") from error


def _read_limits(text: str) -> Mapping[str, int]:
    """Parse JSON, or `image=8,video=0`."""
    try:
        if text.lstrip().startswith("{"):
            return dict(json.loads(text))
        return {name.strip(): int(limit) for name, _, limit in (each.partition("=") for each in text.split(","))}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither JSON such as '{{\"image\": 8}}' nor image=8") from error


def _read_adapter(text: str) -> Mapping[str, str]:
    """Parse JSON, or `name=folder`."""
    try:
        if text.lstrip().startswith("{"):
            return dict(json.loads(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    name, _, path = text.partition("=")
    return {"name": name, "path": path}


# Several values after one flag, or the flag repeated.
_SEVERAL: dict[str, Any] = {"nargs": "+", "action": "extend"}
# Further argparse options, by flag.
_EXTRA_OPTIONS: dict[str, dict[str, Any]] = {
    "mm_processor_kwargs": {"metavar": "JSON", "default": "{}"},
    "encoder_disk_cache": {"nargs": "?", "const": True, "metavar": "PATH[:SIZE]"},
    "prefix_disk_cache": {"nargs": "?", "const": True, "metavar": "PATH[:SIZE]"},
    "encoder_remote_cache": {"metavar": "URL"},
    "record_cache_trace": {"metavar": "FILE"},
    "lora_modules": {**_SEVERAL, "metavar": "NAME=PATH", "type": _read_adapter},
    "limit_mm_per_prompt": {"metavar": "LIMITS", "type": _read_limits},
    "allowed_local_media_path": {"metavar": "FOLDER"},
    "allowed_media_domains": {**_SEVERAL, "metavar": "HOST"},
    "allowed_media_networks": {**_SEVERAL, "metavar": "NETWORK"},
}


def add_model(parser: argparse.ArgumentParser, name: str = "--model", **options: Any) -> None:
    parser.add_argument(name, help="a checkpoint's folder (default: the demo checkpoint)", **options)


def add_model_arguments(parser: argparse.ArgumentParser, *, takes_adapters: bool = False, **defaults: Any) -> None:
    """`defaults`: those of this command that are not `Config`'s."""
    for title, helps in (_HELP | _HELP_OF_ADAPTERS if takes_adapters else _HELP).items():
        group = parser.add_argument_group(title)
        for name, help_text in helps.items():
            default = defaults.get(name, getattr(DEFAULTS, name))
            if default and default != "auto":
                # Shown as it would be typed.
                help_text = f"{help_text} (default: {json.dumps(default) if isinstance(default, dict) else default})"
            options = {"default": default, **_parsing_options(name), **_EXTRA_OPTIONS.get(name, {})}
            # argparse would interpret a percent sign as a format.
            group.add_argument(flag_of(name), help=help_text.replace("%", "%%"), **options)


def _parsing_options(name: str) -> dict[str, Any]:
    """Return the argparse options for the values that `Config` allows."""
    if name in CHOICES:
        return {"choices": CHOICES[name], "type": type(CHOICES[name][0])}
    if name in SWITCHES:
        return {"action": argparse.BooleanOptionalAction if getattr(DEFAULTS, name) else "store_true"}
    if name in LEAST_INTEGERS:
        return {"type": _read_integer}
    return {"type": float} if name in NUMBERS else {}


def config_from(arguments: argparse.Namespace) -> Config:
    """Build the configuration; flags that the command lacks take their defaults."""
    known = [field.name for field in dataclasses.fields(Config) if hasattr(arguments, field.name)]
    options = {name: getattr(arguments, name) for name in known}
    try:
        options["mm_processor_kwargs"] = json.loads(arguments.mm_processor_kwargs)
    except ValueError as error:
        raise InvalidArgumentError("--mm-processor-kwargs", f"is not JSON: {error}") from error
    return Config.from_options(**options)
