"""The flags that every command with a model shares: `Config`'s names and defaults, with what they mean."""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from keepsight.config import (
    BLOCK_SIZES,
    CACHE_DEVICES,
    DEVICES,
    DTYPES,
    ENCODER_CACHE_POLICIES,
    HASHER_ALGORITHMS,
    IMAGE_BACKENDS,
    PERFORMANCE_MODES,
    PROCESSOR_CACHE_TYPES,
    Config,
)
from keepsight.errors import InvalidArgumentError

DEFAULTS = Config()


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model(parser.add_argument_group("model"))
    _add_batch(parser.add_argument_group("what one step computes"))
    _add_kv_cache(parser.add_argument_group("keys and values, and the prefix cache"))
    _add_pictures(parser.add_argument_group("pictures, the encoder cache and the processor cache"))
    _add_tiers(parser.add_argument_group("tiers: what keeps embeddings that the encoder cache drops"))
    _add_media_sources(parser.add_argument_group("where pictures may come from, and how much of them"))


def config_from(arguments: argparse.Namespace) -> Config:
    options = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Config)}
    try:
        options["mm_processor_kwargs"] = json.loads(arguments.mm_processor_kwargs)
    except ValueError as error:
        raise InvalidArgumentError("--mm-processor-kwargs", f"is not JSON: {error}") from error
    return Config.from_options(**options)


def _add(group: argparse._ArgumentGroup, name: str, help_text: str, **options: Any) -> None:
    """A flag whose default is the option's, which its help tells."""
    default = getattr(DEFAULTS, name)
    options.setdefault("default", default)
    if default and default != "auto":
        help_text = f"{help_text} (default: {default})"
    # argparse would read a percent sign as a format.
    group.add_argument(f"--{name.replace('_', '-')}", help=help_text.replace("%", "%%"), **options)


def _add_model(group: argparse._ArgumentGroup) -> None:
    _add(group, "dtype", "precision (default: float32 on a CPU)", choices=DTYPES)
    _add(group, "device", "where to compute (default: a GPU, if any)", choices=DEVICES)
    _add(
        group,
        "max_model_len",
        "longest prompt and answer together, in tokens (default: the checkpoint's, or what fits)",
        type=int,
    )
    _add(
        group,
        "generation_config",
        "how to sample where a request does not say: a path to a generation_config.json, or none "
        "(default: auto, the checkpoint's)",
    )


def _add_batch(group: argparse._ArgumentGroup) -> None:
    _add(
        group,
        "max_num_batched_tokens",
        "tokens of all requests in one step (default: 2048 on a CPU, 8192 on a GPU, or more where a picture needs it)",
        type=int,
    )
    _add(group, "max_num_seqs", "sequences in one step (default: 256, or fewer if the tokens are few)", type=int)
    _add(
        group,
        "max_prompt_tokens_beside_streams",
        "while answers stream, so many tokens of prompts join their steps, longer prompts are computed beside them "
        "(default: 32 on a CPU, all on a GPU)",
        type=int,
    )
    _add(
        group,
        "performance_mode",
        "each answer's own pace, or the most answers in all: then answers pause while pictures are encoded",
        choices=PERFORMANCE_MODES,
    )


def _add_kv_cache(group: argparse._ArgumentGroup) -> None:
    _add(group, "block_size", "positions in one page", type=int, choices=BLOCK_SIZES)
    _add(
        group,
        "enable_prefix_caching",
        "keep the keys and values of prompts for later ones that begin alike",
        action=argparse.BooleanOptionalAction,
    )
    _add(group, "kv_cache_memory_bytes", "memory of all pages (default: what the machine has room for)", type=int)
    _add(group, "num_gpu_blocks_override", "number of pages, instead of their memory; on a CPU too", type=int)
    _add(group, "gpu_memory_utilization", "part of a GPU's memory to use, weights included", type=float)


def _add_pictures(group: argparse._ArgumentGroup) -> None:
    _add(group, "image_backend", "the image processor of transformers that pixels equal", choices=IMAGE_BACKENDS)
    _add(group, "mm_processor_kwargs", """e.g. '{"do_pan_and_scan": true}'""", metavar="JSON", default="{}")
    _add(
        group,
        "mm_hasher_algorithm",
        "what names pictures (default: KEEPSIGHT_MM_HASHER_ALGORITHM, else blake3)",
        choices=HASHER_ALGORITHMS,
    )
    _add(
        group,
        "trust_exif_image_id",
        "take two pictures of one size whose EXIF ImageID is one UUID for the same picture, unseen",
        action="store_true",
    )
    _add(
        group,
        "enable_mm_embeds",
        "take content parts of the type image_embeds: embeddings of a picture that the caller computed",
        action="store_true",
    )
    _add(
        group,
        "enable_prompt_embeds",
        "take prompt_embeds in place of a completion's prompt: embeddings of its tokens that the caller computed",
        action="store_true",
    )
    _add(
        group,
        "encoder_cache_gb",
        "GiB of embeddings kept for later requests, 0 for none (default: 512 pictures, at most 5 % of the memory)",
        type=float,
    )
    _add(group, "encoder_cache_size", "the same, as a number of embeddings", type=int)
    _add(group, "max_mm_cache_bytes", "the same, in bytes", type=int)
    _add(group, "mm_cache_device", "where embeddings are kept (default: where the model is)", choices=CACHE_DEVICES)
    _add(
        group,
        "max_num_encoder_input_tokens",
        "embeddings whose pictures are encoded at the same time (default: as many as a step has tokens)",
        type=int,
    )
    _add(
        group,
        "disable_chunked_mm_input",
        "compute each picture in one step; Gemma 3's always are",
        action="store_true",
    )
    _add(group, "encoder_share", "part of the machine that encoding takes while answers stream", type=float)
    _add(
        group,
        "mm_processor_cache_gb",
        "GiB of decoded and resized pictures kept for later requests, 0: none",
        type=float,
    )
    _add(
        group,
        "mm_processor_cache_type",
        "where they are kept: in the engine, in a ring of shared memory, or in files of shared memory that all "
        "processes read (default: shared, or lru where there is no shared memory)",
        choices=PROCESSOR_CACHE_TYPES,
    )
    _add(group, "mm_shm_cache_max_object_size_mb", "MiB of the largest picture that the ring takes", type=float)
    _add(group, "verify_hits", "part of the processor cache's hits to make again and compare, 0 to 1", type=float)
    _add(
        group,
        "media_workers",
        "processes that decode and resize pictures, in LLM threads (default: one for each core)",
        type=int,
    )


def _add_tiers(group: argparse._ArgumentGroup) -> None:
    _add(
        group,
        "encoder_host_cache_gb",
        "GiB of host memory, 0 for none (default: 1, at most 5 % of what is available)",
        type=float,
    )
    _add(
        group,
        "encoder_disk_cache",
        "folder, and bytes of it (default: none; the flag alone: 16G of ~/.cache/keepsight/embeddings)",
        nargs="?",
        const="",
        metavar="PATH[:SIZE]",
    )
    _add(
        group,
        "encoder_remote_cache",
        "server that speaks Redis's protocol, as redis://[user:password@]host:port/database or unix:///path "
        "(default: none)",
        metavar="URL",
    )
    _add(
        group,
        "encoder_remote_cache_gb",
        "GiB of embeddings on that server, of all who are told the same (default: until its own maxmemory)",
        type=float,
    )
    _add(
        group,
        "encoder_cache_policy",
        "what goes first where host memory or disk is full: the least recently used, what is cheapest to encode again, "
        "or by simulation LRU or S3-FIFO (default: auto); the device's memory is always lru",
        choices=ENCODER_CACHE_POLICIES,
    )
    _add(
        group,
        "record_cache_trace",
        "file to add each use of a picture's embeddings to, for `keepsight cache simulate` (default: none)",
        metavar="FILE",
    )


def _add_media_sources(group: argparse._ArgumentGroup) -> None:
    _add(
        group,
        "limit_mm_per_prompt",
        """pictures of one request, those of earlier turns too: '{"image": 8}' or image=8""",
        metavar="LIMITS",
        type=_read_limits,
    )
    _add(group, "max_image_pixels", "pixels of one picture, known before it is decoded", type=int)
    _add(group, "max_media_bytes", "bytes of one picture, as it is sent or downloaded", type=int)
    _add(group, "max_request_media_bytes", "bytes of all pictures of one request", type=int)
    _add(group, "allowed_local_media_path", "folder that file: URLs may read from (default: none)", metavar="FOLDER")
    _add(
        group,
        "allowed_media_domains",
        "the only hosts that pictures are downloaded from (default: any public one)",
        nargs="+",
        metavar="HOST",
    )
    _add(
        group,
        "allowed_media_networks",
        "networks that are not public but may be reached, such as 10.0.0.0/8 (default: none)",
        nargs="+",
        metavar="NETWORK",
    )
    _add(group, "media_fetch_timeout", "seconds that all downloads of one request may take", type=float)
    _add(group, "media_url_cache_bytes", "bytes of downloads kept for when their URLs come again, 0: none", type=int)


def _read_limits(text: str) -> Mapping[str, int]:
    """JSON, or `image=8,video=0`."""
    try:
        if text.lstrip().startswith("{"):
            return dict(json.loads(text))
        return {name.strip(): int(limit) for name, _, limit in (each.partition("=") for each in text.split(","))}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither JSON such as '{{\"image\": 8}}' nor image=8") from error
