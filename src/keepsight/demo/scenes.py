"""The content of a demo picture: colored shapes on a three by three grid, or one written number.

A scene is a plain value: all that is needed to draw the picture and to describe it. Every thing has a cell of its own,
so that position words and the reading order of a description are well defined. The same seed gives the same scene.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeAlias

Rgb: TypeAlias = tuple[int, int, int]

COLOURS: dict[str, Rgb] = {
    "red": (220, 30, 35),
    "orange": (245, 135, 20),
    "yellow": (248, 222, 40),
    "green": (35, 160, 60),
    "cyan": (50, 205, 220),
    "blue": (35, 75, 215),
    "purple": (125, 45, 165),
    "pink": (248, 135, 190),
}
SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross", "heart", "ring")
SIZES = ("small", "large")
POSITIONS = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")
CENTER_CELL = 4
MAX_THINGS = 4
MAX_NUMBER = 999

TRAINED_STYLES = ("filled", "bordered", "hollow", "shaded")
# Never drawn during training: the accuracy on them is reported on a row of its own.
HELD_OUT_STYLES = ("striped", "shadowed")
STYLES = TRAINED_STYLES + HELD_OUT_STYLES
# A hollow circle would be a ring.
SHAPES_THAT_CAN_BE_HOLLOW = tuple(shape for shape in SHAPES if shape not in ("circle", "ring"))

TRAINED_BACKGROUNDS = ("plain", "gradient", "lines", "checks")
HELD_OUT_BACKGROUNDS = ("dots",)
BACKGROUNDS = TRAINED_BACKGROUNDS + HELD_OUT_BACKGROUNDS


@dataclass(frozen=True)
class Thing:
    """One colored shape. `x` and `y` are fractions of the width and height, `radius` of the shorter side."""

    shape: str
    colour: str
    size: str
    cell: int
    x: float
    y: float
    radius: float
    rgb: Rgb
    angle: float

    @property
    def position(self) -> str:
        return POSITIONS[self.cell]


@dataclass(frozen=True)
class WrittenNumber:
    """A number of one to three digits. `digit_width` is a fraction of the picture's width."""

    value: int
    x: float
    y: float
    digit_width: float
    rgb: Rgb


@dataclass(frozen=True)
class Background:
    kind: str
    rgb: Rgb
    # The other end of a gradient, or the color of lines, checks and dots.
    second_rgb: Rgb


@dataclass(frozen=True)
class Look:
    """The properties of a drawn scene on which no answer depends."""

    width: int
    height: int
    style: str
    background: Background
    noise: float = 0.0
    jpeg_quality: int | None = None


@dataclass(frozen=True)
class Scene:
    things: tuple[Thing, ...]
    number: WrittenNumber | None
    look: Look

    @property
    def single_thing(self) -> Thing | None:
        return self.things[0] if len(self.things) == 1 else None


def random_scene(
    random: Random,
    num_things: int,
    *,
    shape: str | None = None,
    colour: str | None = None,
    look: Look | None = None,
) -> Scene:
    """Return a scene of `num_things` shapes; `shape` and `colour` apply to all of them if given."""
    look = look or random_look(random)
    shapes = SHAPES_THAT_CAN_BE_HOLLOW if look.style == "hollow" else SHAPES
    if num_things == 1 and random.random() < 0.12:
        return Scene((_huge_thing(random, shape or random.choice(shapes), colour),), None, look)
    cells = sorted(random.sample(range(len(POSITIONS)), num_things))
    chosen = _choose_shapes(random, num_things, shapes)
    things = (_thing(random, cell, shape or one, colour) for cell, one in zip(cells, chosen, strict=True))
    return Scene(tuple(things), None, look)


def random_number_scene(random: Random, *, num_digits: int | None = None, look: Look | None = None) -> Scene:
    num_digits = num_digits or random.randint(1, 3)
    lowest = 0 if num_digits == 1 else 10 ** (num_digits - 1)
    return number_scene(random, random.randint(lowest, 10**num_digits - 1), look=look or random_look(random))


def number_scene(random: Random, value: int, *, look: Look) -> Scene:
    number = WrittenNumber(
        value,
        x=0.5 + random.uniform(-0.04, 0.04),
        y=0.5 + random.uniform(-0.08, 0.08),
        digit_width=random.uniform(0.25, 0.29),
        rgb=_ink(random, look.background.rgb),
    )
    return Scene((), number, look)


def random_look(
    random: Random,
    styles: Sequence[str] = TRAINED_STYLES,
    backgrounds: Sequence[str] = TRAINED_BACKGROUNDS,
) -> Look:
    """Choose a look: mostly plain filled shapes on a plain square canvas, sometimes anything else that is allowed."""
    plain = random.random() < 0.4
    kind = "plain" if "plain" in backgrounds and random.random() < 0.6 else random.choice(backgrounds)
    width, height = _canvas_size(random)
    return Look(
        width,
        height,
        style="filled" if plain and "filled" in styles else random.choice(styles),
        background=_background(random, "plain" if plain and "plain" in backgrounds else kind),
        noise=random.uniform(4, 22) if random.random() < 0.15 else 0.0,
        jpeg_quality=random.randint(55, 95) if random.random() < 0.12 else None,
    )


def plain_look(size: int, style: str = "filled") -> Look:
    white = (255, 255, 255)
    return Look(size, size, style, Background("plain", white, white))


def _canvas_size(random: Random) -> tuple[int, int]:
    side = random.choice((112, 112, 160, 224, 224, 336))
    if random.random() < 0.75:
        return side, side
    longer = round(side * random.uniform(1.1, 1.5))
    return (side, longer) if random.random() < 0.5 else (longer, side)


def _choose_shapes(random: Random, num_things: int, shapes: Sequence[str]) -> list[str]:
    """Choose shapes, often with repeats, so that "how many circles" is worth asking."""
    chosen = [random.choice(shapes) for _ in range(num_things)]
    if random.random() < 0.35:
        chosen = [chosen[0] if random.random() < 0.6 else shape for shape in chosen]
    return chosen


def _thing(random: Random, cell: int, shape: str, colour: str | None) -> Thing:
    size = random.choice(SIZES)
    radius, jitter = (random.uniform(0.08, 0.1), 0.06) if size == "small" else (random.uniform(0.14, 0.165), 0.025)
    colour = colour or random.choice(list(COLOURS))
    return Thing(
        shape,
        colour,
        size,
        cell,
        x=(cell % 3 + 0.5) / 3 + random.uniform(-jitter, jitter),
        y=(cell // 3 + 0.5) / 3 + random.uniform(-jitter, jitter),
        radius=radius,
        rgb=_vary(random, COLOURS[colour], 10),
        angle=random.uniform(-0.08, 0.08),
    )


def _huge_thing(random: Random, shape: str, colour: str | None) -> Thing:
    thing = _thing(random, CENTER_CELL, shape, colour)
    return replace(thing, size="large", x=0.5, y=0.5, radius=random.uniform(0.2, 0.38))


def _background(random: Random, kind: str) -> Background:
    kind_of_light = random.random()
    if kind_of_light < 0.4:
        rgb = (255, 255, 255)
    elif kind_of_light < 0.8:
        rgb = _vary(random, _grey(random.randint(215, 250)), 8)
    else:
        rgb = _vary(random, _grey(random.randint(0, 45)), 8)
    step = random.randint(12, 40) * (1 if rgb[0] < 128 else -1)
    return Background(kind, rgb, _vary(random, _shift(rgb, step), 4))


def _ink(random: Random, background: Rgb) -> Rgb:
    """Return a color that can be read on the background, often black or white."""
    if random.random() < 0.5:
        return _grey(random.randint(0, 40)) if background[0] > 128 else _grey(random.randint(215, 255))
    return _vary(random, COLOURS[random.choice(("red", "green", "blue", "purple", "orange"))], 10)


def _grey(level: int) -> Rgb:
    return level, level, level


def _vary(random: Random, rgb: Rgb, amount: int) -> Rgb:
    red, green, blue = (_clamp(channel + random.randint(-amount, amount)) for channel in rgb)
    return red, green, blue


def _shift(rgb: Rgb, step: int) -> Rgb:
    red, green, blue = (_clamp(channel + step) for channel in rgb)
    return red, green, blue


def _clamp(channel: int) -> int:
    return max(0, min(255, channel))
