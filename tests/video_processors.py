"""transformers' video processors, for the computations that do not need torchvision, which is not installed."""

import importlib
import sys
from types import ModuleType
from typing import Any

MODULES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


def qwen2_vl_module() -> Any:
    """Import the module as if torchvision were installed, although only resizing needs it."""
    import transformers.video_processing_utils  # noqa: F401 (where torchvision is looked for, and missed)

    missing = [name for name in MODULES if name not in sys.modules]
    sys.modules.update({name: ModuleType(name) for name in missing})
    try:
        return importlib.import_module("transformers.models.qwen2_vl.video_processing_qwen2_vl")
    finally:
        for name in missing:
            del sys.modules[name]
