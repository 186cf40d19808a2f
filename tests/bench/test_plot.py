from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from keepsight.bench.drawing import Box, to_svg
from keepsight.bench.plot import TYPICAL, check_ending, lay_out, save_plot
from keepsight.bench.summary import Spread, Summary
from keepsight.errors import InvalidArgumentError

TIMES = {"cold": Spread(1000, 2000, 2500, 1100), "known <again>": Spread(10, 20, 30, 12)}


def summary(first_token: Spread | None) -> Summary:
    return Summary(1, 0, None, 1.0, first_token, None, None, 1.0, 1.0, None, None)


def test_bars_are_scaled_logarithmically() -> None:
    bars = [each for each in lay_out(TIMES).shapes if isinstance(each, Box) and each.colour == TYPICAL]
    longer, shorter = (bar.width for bar in bars)
    [tenth] = [
        bar.width
        for bar in lay_out({**TIMES, "tenth": Spread(100, 100, 100, 100)}).shapes[-2:-1]
        if isinstance(bar, Box) and bar.colour == TYPICAL
    ]
    assert tenth == pytest.approx((longer + shorter) / 2)


def test_an_svg_is_well_formed_whatever_a_workload_is_called() -> None:
    texts = [each.text for each in ElementTree.fromstring(to_svg(lay_out(TIMES))) if each.text]
    assert "known <again>" in texts


@pytest.mark.parametrize("times", [TIMES, {}, {"one": Spread(5, 5, 5, 5)}])
def test_both_formats_are_written(times: dict[str, Spread], tmp_path: Path) -> None:
    summaries = {name: summary(each) for name, each in times.items()} | {"failed": summary(None)}
    for name in ("a.svg", "a.png"):
        save_plot(summaries, tmp_path / name)
    assert ElementTree.parse(tmp_path / "a.svg").getroot().get("width") == "720"
    with Image.open(tmp_path / "a.png") as image:
        assert image.width == 1440


def test_other_endings_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="--plot"):
        check_ending(Path("a.jpg"))
