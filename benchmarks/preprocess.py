"""From bytes to uint8 and to normalized floats, one picture at a time on one thread, against transformers' backends.

    PYTHONPATH=src:. python benchmarks/preprocess.py [--torchvision FOLDER] [--runs 15]

FOLDER holds torchvision 0.28 (`pip install --no-deps --target FOLDER torchvision==0.28.0`); without it the default
backend of transformers cannot run with a CPU torch and its rows are left out.  Times are processor time, not wall-clock
time, and the contestants take turns, so that a busy machine disturbs neither more than the other.
"""

import argparse
import io
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.in_turn import time_in_turn
from keepsight.bench.draw import draw_photograph, photograph
from keepsight.frontend.pixels.decode_picture import decode_picture
from keepsight.frontend.pixels.preprocess_image import resize_pixels
from keepsight.image_processor_config import Backend, ImageProcessorConfig
from keepsight.requests import Pixels
from keepsight.runner.normalize_pixels import PixelNormalizer
from tests.frontend.sample_pictures import encode
from tests.frontend.torchvision_reference import import_torchvision

DEFAULT_TORCHVISION = Path(__file__).parents[1] / ".venv" / "torchvision-reference"
Step = Callable[[bytes], Any]

BACKENDS: tuple[Backend, ...] = ("torchvision", "pil")
SIDE = 896


def page(width: int, height: int) -> Image.Image:
    """Draw black blots on white, like a scanned page."""
    grey = draw_photograph(0, width, height).convert("L")
    return grey.point([0] * 100 + [255] * 156).convert("RGB")


def pictures() -> dict[str, bytes]:
    return {
        "4000x3000 JPEG": photograph(0, 4000, 3000),
        "1024x768 JPEG": photograph(0, 1024, 768),
        "1275x1650 PNG page": encode(page(1275, 1650), "PNG"),
    }


def our_steps(backend: Backend) -> dict[str, Step]:
    config = ImageProcessorConfig(height=SIDE, width=SIDE, backend=backend)
    normalize = PixelNormalizer(config, "cpu", torch.float32)
    batch = torch.empty(1, SIDE, SIDE, 3, dtype=torch.uint8)

    def to_uint8(data: bytes) -> Pixels:
        return resize_pixels(decode_picture(data), config)

    def to_floats(data: bytes) -> torch.Tensor:
        batch[0].numpy()[:] = to_uint8(data)
        return normalize(batch)

    return {"to uint8": to_uint8, "to floats": to_floats}


def reference_step(backend: Backend) -> Step:
    from transformers.image_utils import load_image
    from transformers.models.gemma3 import image_processing_gemma3, image_processing_pil_gemma3

    make: Any = (
        image_processing_gemma3.Gemma3ImageProcessor
        if backend == "torchvision"
        else image_processing_pil_gemma3.Gemma3ImageProcessorPil
    )
    processor = make(size={"height": SIDE, "width": SIDE}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return lambda data: processor(load_image(Image.open(io.BytesIO(data))), return_tensors="pt")["pixel_values"]


def print_table(backends: Sequence[Backend], runs: int) -> None:
    print("| picture | backend | transformers ms | to uint8 ms | ratio | to float32 ms | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name, data in pictures().items():
        for backend in backends:
            steps = {"transformers": reference_step(backend), **our_steps(backend)}
            times = time_in_turn(steps, [data] * (runs + 2), 2, time.process_time)
            theirs, *ours_ms = (statistics.median(seconds) * 1e3 for seconds in times.values())
            ours = " | ".join(f"{ms:.1f} | {theirs / ms:.2f}" for ms in ours_ms)
            print(f"| {name} | {backend} | {theirs:.1f} | {ours} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchvision", type=Path, default=DEFAULT_TORCHVISION)
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    backends = BACKENDS
    if (arguments.torchvision / "torchvision").is_dir():
        import_torchvision(arguments.torchvision)
    else:
        print(f"no torchvision in {arguments.torchvision}: its backend is left out", file=sys.stderr)
        backends = ("pil",)
    print_table(backends, arguments.runs)


if __name__ == "__main__":
    main()
