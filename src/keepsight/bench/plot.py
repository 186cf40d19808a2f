"""Times to the first token as bars, workload by workload, in an SVG or a PNG file.

The layout is a list of rectangles and labels, which knows neither format.  The scale is logarithmic: what is known and
what is new lie powers of ten apart.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from PIL import Image, ImageDraw, ImageFont

from keepsight.bench.summary import Spread, Summary
from keepsight.errors import InvalidArgumentError

WIDTH, LEFT, RIGHT, TOP, ROW, FONT = 720, 220, 60, 44, 24, 12
INK, GRID, TYPICAL, LATE = "#1d2430", "#d5dae2", "#2563a8", "#a9c8ea"
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
class Label:
    """`x` is the text's end if it `ends_there`; `y` is its middle."""

    x: float
    y: float
    text: str
    ends_there: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    height: int
    shapes: Sequence[Box | Label]


def save_plot(summaries: Mapping[str, Summary], path: Path) -> None:
    times = {name: summary.first_token for name, summary in summaries.items() if summary.first_token is not None}
    drawing = lay_out(times)
    if path.suffix == ".svg":
        path.write_text(to_svg(drawing))
    else:
        to_png(drawing).save(path)


def check_ending(path: Path) -> None:
    if path.suffix not in ENDINGS:
        raise InvalidArgumentError("--plot", f"must end with {' or '.join(ENDINGS)}, not {path.name!r}")


def lay_out(times: Mapping[str, Spread]) -> Drawing:
    height = TOP + ROW * max(1, len(times)) + 10
    shapes: list[Box | Label] = [Label(10, 14, "first token, ms: median (dark) and 95th percentile")]
    if times:
        low = math.floor(math.log10(min(each.p50 for each in times.values())))
        high = max(low + 1, math.ceil(math.log10(max(each.p95 for each in times.values()))))

        def place(ms: float) -> float:
            return LEFT + (math.log10(ms) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

        for power in range(low, high + 1):
            shapes += [Box(place(10**power), TOP - 6, 1, height - TOP, GRID)]
            shapes += [Label(place(10**power), TOP - 14, f"{10.0**power:g}")]
        for row, (name, spread) in enumerate(times.items()):
            y = TOP + row * ROW
            shapes.append(Label(LEFT - 8, y + ROW / 2 - 3, name, ends_there=True))
            shapes.append(Box(LEFT, y, place(spread.p95) - LEFT, ROW - 6, LATE))
            shapes.append(Box(LEFT, y, place(spread.p50) - LEFT, ROW - 6, TYPICAL))
            shapes.append(Label(place(spread.p95) + 5, y + ROW / 2 - 3, f"{spread.p50:.0f}"))
    return Drawing(height, shapes)


def to_svg(drawing: Drawing) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{drawing.height}" font-size="{FONT}"'
    lines = [f'{head} font-family="sans-serif" fill="{INK}">', '<rect width="100%" height="100%" fill="#fff"/>']
    return "\n".join([*lines, *map(_to_element, drawing.shapes), "</svg>\n"])


def _to_element(shape: Box | Label) -> str:
    if isinstance(shape, Box):
        size = f'width="{shape.width:.1f}" height="{shape.height:.1f}"'
        return f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" {size} fill="{shape.colour}"/>'
    anchor = "end" if shape.ends_there else "start"
    place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" dominant-baseline="middle"'
    return f'<text {place} text-anchor="{anchor}">{escape(shape.text)}</text>'


def to_png(drawing: Drawing) -> Image.Image:
    image = Image.new("RGB", (WIDTH * PNG_SCALE, drawing.height * PNG_SCALE), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(FONT * PNG_SCALE)
    for shape in drawing.shapes:
        x, y = shape.x * PNG_SCALE, shape.y * PNG_SCALE
        if isinstance(shape, Box):
            pen.rectangle((x, y, x + shape.width * PNG_SCALE, y + shape.height * PNG_SCALE), fill=shape.colour)
        else:
            pen.text((x, y), shape.text, fill=INK, font=font, anchor="rm" if shape.ends_there else "lm")
    return image
