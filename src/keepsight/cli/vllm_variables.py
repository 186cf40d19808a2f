"""Warns about vLLM's environment variables, which this server does not read, and names the equivalents."""

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)

_PREFIX = "VLLM_"
EQUIVALENTS = {
    "VLLM_API_KEY": "KEEPSIGHT_API_KEY",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-cache-memory-bytes",
    "VLLM_IMAGE_FETCH_TIMEOUT": "--media-fetch-timeout",
    "VLLM_MAX_IMAGE_PIXELS": "--max-image-pixels",
    "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB": "--max-media-bytes",
    "VLLM_MM_HASHER_ALGORITHM": "KEEPSIGHT_MM_HASHER_ALGORITHM",
}


def warn_of_vllm_variables(environment: Mapping[str, str]) -> None:
    """Log the variables' names in one line, but not their values, which may be secret."""
    found = sorted(name for name in environment if name.startswith(_PREFIX))
    if found:
        names = (f"{name} (use {EQUIVALENTS[name]})" if name in EQUIVALENTS else name for name in found)
        logger.warning("these environment variables are ignored: %s", ", ".join(names))
