"""The flags that every command with a model shares; their names are `Config`'s."""

import argparse
import json

from keepsight.config import DEVICES, DTYPES, IMAGE_BACKENDS, Config
from keepsight.errors import InvalidArgumentError


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="precision (default: float32 on a CPU)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="where to compute (default: a GPU, if any)")
    parser.add_argument("--max-model-len", type=int, help="longest prompt and answer together, in tokens")
    parser.add_argument(
        "--image-backend",
        choices=IMAGE_BACKENDS,
        default="torchvision",
        help="which image processor of transformers the pixels equal (default: torchvision)",
    )
    parser.add_argument(
        "--mm-processor-kwargs", metavar="JSON", default="{}", help="""e.g. '{"do_pan_and_scan": true}'"""
    )


def config_from(arguments: argparse.Namespace) -> Config:
    try:
        processor_kwargs = json.loads(arguments.mm_processor_kwargs)
    except ValueError as error:
        raise InvalidArgumentError("--mm-processor-kwargs", f"is not JSON: {error}") from error
    return Config.from_options(
        model=arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        max_model_len=arguments.max_model_len,
        image_backend=arguments.image_backend,
        mm_processor_kwargs=processor_kwargs,
    )
