"""Draws a scene with Pillow. Knows nothing of the answers; the same scene always gives the same pixels."""

import io
import math
from collections.abc import Callable
from random import Random
from typing import TypeAlias

from PIL import Image, ImageChops, ImageDraw, ImageFont

from keepsight.demo.scenes import Background, Look, Rgb, Scene, Thing, WrittenNumber

Point: TypeAlias = tuple[float, float]

RING_WIDTH = 0.38
HOLLOW_WIDTH = 0.25
BORDER_WIDTH = 0.14


def draw_scene(scene: Scene) -> Image.Image:
    look = scene.look
    canvas = _draw_background(look)
    for thing in scene.things:
        _PAINTERS[look.style](canvas, thing)
    if scene.number is not None:
        draw = ImageDraw.Draw(canvas)
        for place, digit in enumerate(str(scene.number.value)):
            paint_digit(draw, scene.number, place, digit, scene.number.rgb)
    return _spoil(canvas, look)


def paint_silhouette(draw: ImageDraw.ImageDraw, thing: Thing, fill: Rgb | int, grow: float = 1.0) -> None:
    """Paint the plain shape of a thing in one color. `grow` above 1 makes room for a border."""
    if thing.shape in ("circle", "ring"):
        width = RING_WIDTH if thing.shape == "ring" else 1.0
        _paint_round(draw, thing, fill, width + (grow - 1.0), grow)
    else:
        draw.polygon(_outline(draw, thing, grow), fill=fill)


def paint_digit(draw: ImageDraw.ImageDraw, number: WrittenNumber, place: int, digit: str, fill: Rgb | int) -> None:
    """Paint one digit of a number, `place` digits from its left end. Digits are equally spaced."""
    width, height = draw.im.size
    left = number.x - number.digit_width * (len(str(number.value)) - 1) / 2
    center = ((left + place * number.digit_width) * width, number.y * height)
    # Pillow's own font is 0.58 em wide per digit; 1.55 leaves a small gap.
    font = ImageFont.load_default(max(8, round(1.55 * number.digit_width * width)))
    draw.text(center, digit, fill=fill, font=font, anchor="mm")


def _paint_filled(canvas: Image.Image, thing: Thing) -> None:
    paint_silhouette(ImageDraw.Draw(canvas), thing, thing.rgb)


def _paint_bordered(canvas: Image.Image, thing: Thing) -> None:
    draw = ImageDraw.Draw(canvas)
    paint_silhouette(draw, thing, (25, 25, 25), 1.0 + BORDER_WIDTH)
    paint_silhouette(draw, thing, thing.rgb)


def _paint_hollow(canvas: Image.Image, thing: Thing) -> None:
    draw = ImageDraw.Draw(canvas)
    if thing.shape in ("circle", "ring"):
        _paint_round(draw, thing, thing.rgb, HOLLOW_WIDTH, 1.0)
        return
    width = max(2, round(HOLLOW_WIDTH * _radius(draw, thing)))
    draw.polygon(_outline(draw, thing), outline=thing.rgb, width=width)


def _paint_shaded(canvas: Image.Image, thing: Thing) -> None:
    """Paint a thing lighter at the top than at the bottom."""
    shade = Image.linear_gradient("L").resize(canvas.size)
    light, dark = _scaled(thing.rgb, 1.15), _scaled(thing.rgb, 0.75)
    fill = Image.composite(Image.new("RGB", canvas.size, dark), Image.new("RGB", canvas.size, light), shade)
    canvas.paste(fill, mask=_mask(canvas, thing))


def _paint_striped(canvas: Image.Image, thing: Thing) -> None:
    _paint_filled(canvas, thing)
    stripes = Image.new("L", canvas.size, 0)
    draw = ImageDraw.Draw(stripes)
    pitch = max(4, round(0.5 * _radius(draw, thing)))
    for x in range(0, canvas.width + canvas.height, pitch):
        draw.line((x, 0, x - canvas.height, canvas.height), fill=255, width=max(1, pitch // 3))
    canvas.paste(_scaled(thing.rgb, 0.7), mask=ImageChops.multiply(_mask(canvas, thing), stripes))


def _paint_shadowed(canvas: Image.Image, thing: Thing) -> None:
    mask = _mask(canvas, thing)
    distance = max(1, round(0.2 * _radius(ImageDraw.Draw(mask), thing)))
    canvas.paste((120, 120, 120), mask=ImageChops.offset(mask, distance, distance))
    _paint_filled(canvas, thing)


_PAINTERS: dict[str, Callable[[Image.Image, Thing], None]] = {
    "filled": _paint_filled,
    "bordered": _paint_bordered,
    "hollow": _paint_hollow,
    "shaded": _paint_shaded,
    "striped": _paint_striped,
    "shadowed": _paint_shadowed,
}


def _mask(canvas: Image.Image, thing: Thing) -> Image.Image:
    mask = Image.new("L", canvas.size, 0)
    paint_silhouette(ImageDraw.Draw(mask), thing, 255)
    return mask


def _paint_round(draw: ImageDraw.ImageDraw, thing: Thing, fill: Rgb | int, width: float, grow: float) -> None:
    x, y = _center(draw, thing)
    radius = _radius(draw, thing) * grow
    box = (x - radius, y - radius, x + radius, y + radius)
    if width >= 1.0:
        draw.ellipse(box, fill=fill)
    else:
        draw.ellipse(box, outline=fill, width=max(2, round(radius * width)))


def _center(draw: ImageDraw.ImageDraw, thing: Thing) -> Point:
    width, height = draw.im.size
    return thing.x * width, thing.y * height


def _radius(draw: ImageDraw.ImageDraw, thing: Thing) -> float:
    width, height = draw.im.size
    return thing.radius * float(min(width, height))


def _outline(draw: ImageDraw.ImageDraw, thing: Thing, grow: float = 1.0) -> list[Point]:
    center_x, center_y = _center(draw, thing)
    radius = _radius(draw, thing) * grow
    cos, sin = math.cos(thing.angle), math.sin(thing.angle)
    return [
        (center_x + radius * (x * cos - y * sin), center_y + radius * (x * sin + y * cos))
        for x, y in _POLYGONS[thing.shape]
    ]


def _draw_background(look: Look) -> Image.Image:
    size = (look.width, look.height)
    background = look.background
    canvas = Image.new("RGB", size, background.rgb)
    if background.kind == "gradient":
        shade = Image.linear_gradient("L").resize(size)
        return Image.composite(Image.new("RGB", size, background.second_rgb), canvas, shade)
    if background.kind == "lines":
        _draw_lines(canvas, background)
    if background.kind == "checks":
        _draw_checks(canvas, background)
    if background.kind == "dots":
        _draw_dots(canvas, background)
    return canvas


def _draw_lines(canvas: Image.Image, background: Background) -> None:
    draw = ImageDraw.Draw(canvas)
    pitch = max(6, canvas.height // 12)
    for y in range(pitch // 2, canvas.height, pitch):
        draw.line((0, y, canvas.width, y), fill=background.second_rgb, width=max(1, pitch // 5))


def _draw_checks(canvas: Image.Image, background: Background) -> None:
    draw = ImageDraw.Draw(canvas)
    side = max(4, canvas.height // 10)
    for row in range(canvas.height // side + 1):
        for column in range(row % 2, canvas.width // side + 1, 2):
            box = (column * side, row * side, (column + 1) * side - 1, (row + 1) * side - 1)
            draw.rectangle(box, fill=background.second_rgb)


def _draw_dots(canvas: Image.Image, background: Background) -> None:
    draw = ImageDraw.Draw(canvas)
    pitch = max(6, canvas.height // 14)
    for y in range(pitch // 2, canvas.height, pitch):
        for x in range(pitch // 2, canvas.width, pitch):
            draw.ellipse((x - pitch / 5, y - pitch / 5, x + pitch / 5, y + pitch / 5), fill=background.second_rgb)


def _spoil(canvas: Image.Image, look: Look) -> Image.Image:
    """Add noise and JPEG artifacts, as the look asks for."""
    if look.noise:
        canvas = _add_noise(canvas, look)
    if look.jpeg_quality is not None:
        buffer = io.BytesIO()
        canvas.save(buffer, "JPEG", quality=look.jpeg_quality)
        canvas = Image.open(buffer).convert("RGB")
    return canvas


def _add_noise(canvas: Image.Image, look: Look) -> Image.Image:
    # Pillow's effect_noise cannot be seeded, and the same scene must give the same pixels.
    grain = Image.frombytes("L", (128, 128), Random(look.noise).randbytes(128 * 128)).resize(canvas.size)
    grain = grain.point([round(level * look.noise / 64) for level in range(256)])
    middle = round(look.noise * 2)
    return ImageChops.add(canvas, Image.merge("RGB", (grain,) * 3), offset=-middle)


def _scaled(rgb: Rgb, factor: float) -> Rgb:
    red, green, blue = (max(0, min(255, round(channel * factor))) for channel in rgb)
    return red, green, blue


def _heart() -> list[Point]:
    angles = [2 * math.pi * step / 28 for step in range(28)]
    return [(math.sin(angle) ** 3 * 16 / 16.5, -(_heart_height(angle) + 2.5) / 16.5) for angle in angles]


def _heart_height(angle: float) -> float:
    return 13 * math.cos(angle) - 5 * math.cos(2 * angle) - 2 * math.cos(3 * angle) - math.cos(4 * angle)


def _star() -> list[Point]:
    radii = (1.08, 0.45)
    return [
        (radii[step % 2] * math.sin(math.pi * step / 5), -radii[step % 2] * math.cos(math.pi * step / 5))
        for step in range(10)
    ]


def _cross() -> list[Point]:
    arm = 0.32
    quarter = [(-arm, -1.0), (arm, -1.0), (arm, -arm)]
    points: list[Point] = []
    for _ in range(4):
        points += quarter
        quarter = [(-y, x) for x, y in quarter]
    return points


_POLYGONS: dict[str, list[Point]] = {
    "square": [(-0.86, -0.86), (0.86, -0.86), (0.86, 0.86), (-0.86, 0.86)],
    "triangle": [(0.0, -1.0), (1.0, 0.8), (-1.0, 0.8)],
    "diamond": [(0.0, -1.12), (0.78, 0.0), (0.0, 1.12), (-0.78, 0.0)],
    "star": _star(),
    "cross": _cross(),
    "heart": _heart(),
}
