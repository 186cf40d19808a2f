"""Plots times to the first token as bars, one for each workload.

The scale is logarithmic: times for known and for new content are powers of ten apart.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from keepsight.bench.drawing import ENDINGS, WIDTH, Box, Drawing, Label, Shape, save
from keepsight.bench.summary import Spread, Summary
from keepsight.errors import InvalidArgumentError

LEFT, RIGHT, TOP, ROW = 220, 60, 44, 24
GRID, TYPICAL, LATE = "#d5dae2", "#2563a8", "#a9c8ea"


def save_plot(summaries: Mapping[str, Summary], path: Path) -> None:
    times = {name: summary.first_token for name, summary in summaries.items() if summary.first_token is not None}
    save(lay_out(times), path)


def check_ending(path: Path) -> None:
    if path.suffix not in ENDINGS:
        raise InvalidArgumentError("--plot", f"must end with {' or '.join(ENDINGS)}, not {path.name!r}")


def lay_out(times: Mapping[str, Spread]) -> Drawing:
    height = TOP + ROW * max(1, len(times)) + 10
    shapes: list[Shape] = [Label(10, 14, "first token, ms: median (dark) and 95th percentile")]
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
            shapes.append(Label(place(spread.p95) + 5, y + ROW / 2 - 3, _format_ms(spread.p50)))
    return Drawing(height, shapes)


def _format_ms(ms: float) -> str:
    """Format a time, with a decimal only where it is more than noise."""
    return f"{ms:.1f}" if ms < 10 else f"{ms:.0f}"
