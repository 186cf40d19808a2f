"""Rectangles, lines and labels, written as an SVG or a PNG file.

Knows nothing of what they show.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from PIL import Image, ImageDraw, ImageFont

WIDTH, FONT = 720, 12
INK = "#1d2430"
PNG_SCALE = 2
ENDINGS = (".svg", ".png")


@dataclass(frozen=True, slots=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True, slots=True)
class Line:
    """A polyline through the points."""

    points: Sequence[tuple[float, float]]
    colour: str


@dataclass(frozen=True, slots=True)
class Label:
    """`x` is the text's start, or its end if it `ends_there`; `y` is its middle."""

    x: float
    y: float
    text: str
    ends_there: bool = False
    colour: str = INK


Shape = Box | Line | Label


@dataclass(frozen=True, slots=True)
class Drawing:
    height: int
    shapes: Sequence[Shape]


def save(drawing: Drawing, path: Path) -> None:
    """Save in the format given by the file's extension, one of `ENDINGS`."""
    if path.suffix == ".svg":
        path.write_text(to_svg(drawing))
    else:
        to_png(drawing).save(path)


def to_svg(drawing: Drawing) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{drawing.height}" font-size="{FONT}"'
    lines = [f'{head} font-family="sans-serif">', '<rect width="100%" height="100%" fill="#fff"/>']
    return "\n".join([*lines, *map(_to_element, drawing.shapes), "</svg>\n"])


def _to_element(shape: Shape) -> str:
    match shape:
        case Box(x, y, width, height, colour):
            return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
        case Line(points, colour):
            places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>'
        case Label(x, y, text, ends_there, colour):
            place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{"end" if ends_there else "start"}"'
            return f'<text {place} dominant-baseline="middle" fill="{colour}">{escape(text)}</text>'


def to_png(drawing: Drawing) -> Image.Image:
    image = Image.new("RGB", (WIDTH * PNG_SCALE, drawing.height * PNG_SCALE), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(FONT * PNG_SCALE)
    for shape in drawing.shapes:
        match shape:
            case Box(x, y, width, height, colour):
                left, top, right, bottom = (side * PNG_SCALE for side in (x, y, x + width, y + height))
                pen.rectangle((left, top, right, bottom), fill=colour)
            case Line(points, colour):
                pen.line([(x * PNG_SCALE, y * PNG_SCALE) for x, y in points], colour, 2 * PNG_SCALE)
            case Label(x, y, text, ends_there, colour):
                place = (x * PNG_SCALE, y * PNG_SCALE)
                pen.text(place, text, fill=colour, font=font, anchor="rm" if ends_there else "lm")
    return image
