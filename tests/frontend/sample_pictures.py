"""Pictures of every mode, format and awkward size, each with the options under which it is prepared.

They are made from a seed, so that `all_cases` returns the same bytes in every process.
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from keepsight.frontend.intake.open_picture import PictureSource
from keepsight.image_processor_config import DEFAULTS_WHERE_SIZES_FOLLOW
from keepsight.requests import Pixels
from keepsight.shown_sizes import ShownSizes

SIZES = (
    *((1, 1), (1, 2), (2, 1), (1, 97), (97, 1), (3, 500), (500, 3), (1, 3000)),
    *((7, 11), (53, 37), (37, 53), (127, 131), (211, 89), (300, 20), (401, 311)),
)
ORIENTATION = 0x0112


@dataclass(frozen=True)
class Case:
    name: str
    source: PictureSource
    # Fields of ImageProcessorConfig that differ from BASE.
    options: dict[str, Any] = field(default_factory=dict)


BASE: dict[str, Any] = {"height": 37, "width": 53}


def random_picture(mode: str, size: tuple[int, int], seed: int = 0) -> Image.Image:
    """Return a picture of coarse areas and fine noise, so that smoothing has an effect."""
    channels = 4 if mode in ("RGBA", "CMYK") else 2 if mode == "LA" else 3
    pixels = _random_pixels(size, seed, channels)
    if channels != 3:
        return Image.frombytes(mode, size, pixels.tobytes())
    image = Image.fromarray(pixels)
    # The fastest method; the choice of colors does not matter.
    return image.quantize(17, Image.Quantize.FASTOCTREE) if mode == "P" else image.convert(mode)


@cache
def _random_pixels(size: tuple[int, int], seed: int, channels: int) -> Pixels:
    rng = np.random.default_rng(abs(hash((size, seed))))  # integers only: the same hash in every process
    width, height = size
    coarse = np.kron(rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, channels)), np.ones((8, 8, 1), np.int64))
    noise = rng.integers(-40, 41, (height, width, channels))
    return (coarse[:height, :width] + noise).clip(0, 255).astype(np.uint8)


def encode(image: Image.Image, format_: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format_, **options)
    return buffer.getvalue()


def encode_turned(image: Image.Image, format_: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encode(image, format_, exif=exif)


ENCODINGS: dict[str, Callable[[tuple[int, int]], bytes]] = {
    "png 1": lambda size: encode(random_picture("1", size), "PNG"),
    "png L": lambda size: encode(random_picture("L", size), "PNG"),
    "png LA": lambda size: encode(random_picture("LA", size), "PNG"),
    "png P": lambda size: encode(random_picture("P", size), "PNG"),
    "png P one transparent": lambda size: encode(random_picture("P", size), "PNG", transparency=0),
    "png P alphas": lambda size: encode(random_picture("P", size), "PNG", transparency=bytes(range(0, 170, 10))),
    "png RGB": lambda size: encode(random_picture("RGB", size), "PNG"),
    "png RGB transparent": lambda size: encode(random_picture("RGB", size), "PNG", transparency=(255, 0, 255)),
    "png L transparent": lambda size: encode(random_picture("L", size), "PNG", transparency=255),
    "png RGBA": lambda size: encode(random_picture("RGBA", size), "PNG"),
    "png turned": lambda size: encode_turned(random_picture("RGBA", size), "PNG", 6),
    "jpeg L": lambda size: encode(random_picture("L", size), "JPEG"),
    "jpeg 4:2:0": lambda size: encode(random_picture("RGB", size), "JPEG"),
    "jpeg 4:4:4": lambda size: encode(random_picture("RGB", size), "JPEG", subsampling=0, quality=95),
    "jpeg 4:2:2 progressive": lambda size: encode(random_picture("RGB", size), "JPEG", subsampling=1, progressive=True),
    "jpeg RGB": lambda size: encode(random_picture("RGB", size), "JPEG", keep_rgb=True),
    "jpeg CMYK": lambda size: encode(random_picture("CMYK", size), "JPEG"),
    "jpeg turned": lambda size: encode_turned(random_picture("RGB", size), "JPEG", 1 + sum(size) % 8),
    "webp": lambda size: encode(random_picture("RGB", size), "WEBP", method=0),
    "webp alpha": lambda size: encode(random_picture("RGBA", size), "WEBP", lossless=True, method=0, quality=0),
    "gif": lambda size: encode(random_picture("P", size), "GIF"),
    "gif transparent": lambda size: encode(random_picture("P", size), "GIF", transparency=1),
    "bmp": lambda size: encode(random_picture("RGB", size), "BMP"),
    "tiff": lambda size: encode(random_picture("RGB", size), "TIFF"),
    "tiff CMYK": lambda size: encode(random_picture("CMYK", size), "TIFF", compression="tiff_lzw"),
    "tiff turned": lambda size: encode_turned(random_picture("RGB", size), "TIFF", 1 + sum(size) % 8),
}
PIL_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV")
COLOURFUL = {"image_mean": (0.48, 0.45, 0.4), "image_std": (0.26, 0.27, 0.28), "rescale_factor": 1 / 256}
CROPPING = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20}


def all_cases() -> tuple[Case, ...]:
    return (*_encoded(), *_from_pil(), *_from_arrays(), *_under_other_options(), *_shown_at_sizes_of_their_own())


def _encoded() -> Iterator[Case]:
    for name, encode_size in ENCODINGS.items():
        for size in SIZES:
            yield Case(f"{name} {size}", encode_size(size))


def _from_pil() -> Iterator[Case]:
    for mode in PIL_MODES:
        for size in ((1, 1), (61, 43)):
            yield Case(f"PIL {mode} {size}", random_picture(mode, size))
    turned = Image.open(io.BytesIO(encode_turned(random_picture("RGB", (61, 43)), "JPEG", 6)))
    yield Case("PIL turned", turned)
    palette = random_picture("P", (61, 43))
    palette.info["transparency"] = 3
    yield Case("PIL P transparent", palette)


def _from_arrays() -> Iterator[Case]:
    # In the last three, either the first or the last axis could be the channels.
    shapes = (
        (43, 61, 3),
        (3, 43, 61),
        (1, 43, 61),
        (43, 61, 1),
        (37, 53, 3),
        (3, 37, 53),
        (3, 9, 3),
        (1, 9, 3),
        (3, 9, 4),
    )
    for shape in shapes:
        array = np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)
        yield Case(f"array {shape}", array)
    wide = np.random.default_rng(0).integers(0, 256, (3, 64, 200), dtype=np.uint8)
    yield Case("array pan and scan", wide, CROPPING)
    yield Case("array pan and scan, not contiguous", np.moveaxis(wide, 0, -1).repeat(2, 1)[:, ::2], CROPPING)


def _under_other_options() -> Iterator[Case]:
    for size in SIZES:
        png = encode(random_picture("RGB", size, seed=1), "PNG")
        jpeg = encode(random_picture("RGB", size, seed=2), "JPEG")
        yield Case(f"bicubic {size}", png, {"resample": 3})
        yield Case(f"bicubic jpeg {size}", jpeg, {"resample": 3, "height": 61, "width": 31})
        yield Case(f"nearest {size}", png, {"resample": 0})
        yield Case(f"colourful {size}", jpeg, COLOURFUL)
    for size in ((200, 64), (64, 200), (333, 50), (53, 333), (41, 40), (161, 40), (37, 53), (1000, 31)):
        picture = random_picture("RGB", size, seed=3)
        yield Case(f"pan and scan png {size}", encode(picture, "PNG"), CROPPING)
        yield Case(f"pan and scan jpeg {size}", encode(picture, "JPEG"), CROPPING)
    for size in ((1024, 768), (20, 30), (896, 896)):
        picture = random_picture("RGB", size, seed=4)
        yield Case(f"896 jpeg {size}", encode(picture, "JPEG"), {"height": 896, "width": 896})


def _shown_at_sizes_of_their_own() -> Iterator[Case]:
    small = {"resample": 3, "sizes": ShownSizes(4, 2, 500, 20_000)}
    for size in (*(size for size in SIZES if max(size) <= 200 * min(size)), (200, 1), (64, 40), (600, 400)):
        picture = random_picture("RGB", size, seed=5)
        yield Case(f"of its own png {size}", encode(picture, "PNG"), small)
        yield Case(f"of its own jpeg {size}", encode(picture, "JPEG"), {**small, **COLOURFUL})
    for size in ((61, 43), (1023, 767)):
        picture = random_picture("RGB", size, seed=6)
        yield Case(f"of its own, as published {size}", picture, {"sizes": ShownSizes(16, 2, 65_536, 16_777_216)})
        smaller = DEFAULTS_WHERE_SIZES_FOLLOW | {"sizes": ShownSizes(14, 2, 3136, 12_845_056)}
        yield Case(f"of its own, as Qwen2.5-VL's {size}", picture, smaller)
    turned = encode_turned(random_picture("RGB", (61, 43)), "JPEG", 6)
    yield Case("of its own, turned", turned, small)
