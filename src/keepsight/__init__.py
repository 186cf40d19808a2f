"""Keepsight: a multimodal inference server that never does the same media work twice.

`LLM` is imported on first access: it imports torch, which most of the package does not need.
"""

import os
from typing import TYPE_CHECKING, Any

from keepsight.outputs import CompletionOutput, EmbeddingRequestOutput, RequestOutput
from keepsight.pooling_params import PoolingParams
from keepsight.sampling_params import SamplingParams
from keepsight.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from keepsight.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

# libgomp reads this when torch loads it: how often a thread polls for the others of its team before it yields the core.
# A sixtieth of the default: longer than the gap between two matrix products, and not much longer than a wake-up.
# If another program competes for a core, steps take a fifth of the time; on an idle machine, as long as before.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from keepsight.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
