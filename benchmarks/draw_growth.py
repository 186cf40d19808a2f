"""Plots costs over counts as lines, one panel below the other, on log-log axes: a straight line is a power law."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepsight.bench.drawing import WIDTH, Box, Drawing, Label, Line, Shape

LEFT, RIGHT, TOP, HEIGHT = 60, 260, 44, 230
GRID = "#d5dae2"
COLOURS = ("#2563a8", "#c2410c", "#15803d", "#7c3aed", "#a16207", "#0e7490")


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    lines: Mapping[str, Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from one power of ten to another, drawn from `begin` to `end`."""

    low: int
    high: int
    begin: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], begin: float, end: float) -> "Axis":
        low = math.floor(math.log10(min(values)))
        return cls(low, max(low + 1, math.ceil(math.log10(max(values)))), begin, end)

    def place(self, value: float) -> float:
        return self.begin + (math.log10(value) - self.low) / (self.high - self.low) * (self.end - self.begin)

    @property
    def powers(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]


def lay_out(panels: Sequence[Panel]) -> Drawing:
    shapes = [shape for index, panel in enumerate(panels) for shape in lay_out_one(panel, index * HEIGHT)]
    return Drawing(HEIGHT * len(panels), shapes)


def lay_out_one(panel: Panel, top: float) -> list[Shape]:
    numbers = [number for points in panel.lines.values() for number in points]
    values = [value for points in panel.lines.values() for value in points.values()]
    across = Axis.around(numbers, LEFT, WIDTH - RIGHT)
    down = Axis.around(values, top + HEIGHT - 36, top + TOP)
    shapes: list[Shape] = [Label(10, top + 18, panel.title)]
    for power in across.powers:
        shapes.append(Box(across.place(power), down.end, 1, down.begin - down.end, GRID))
        shapes.append(Label(across.place(power) - 8, down.begin + 14, f"{power:,.0f}"))
    for power in down.powers:
        shapes.append(Box(across.begin, down.place(power), across.end - across.begin, 1, GRID))
        shapes.append(Label(across.begin - 6, down.place(power), f"{power:g}", ends_there=True))
    # Names next to the lines' ends would overlap: they are listed below each other, in the order of the ends.
    ordered = sorted(panel.lines.items(), key=lambda each: -max(each[1].items())[1])
    for row, (name, points) in enumerate(ordered):
        colour = COLOURS[row % len(COLOURS)]
        shapes.append(Line([(across.place(x), down.place(y)) for x, y in sorted(points.items())], colour))
        shapes.append(Label(across.end + 16, down.end + 8 + 18 * row, name, colour=colour))
    return shapes
