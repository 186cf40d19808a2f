from xml.etree import ElementTree

from keepsight.bench.drawing import Box, Drawing, Label, Line, to_png, to_svg

DRAWING = Drawing(
    50, [Box(10, 10, 20, 5, "#ff0000"), Line([(100, 10), (200, 10), (200, 40)], "#0000ff"), Label(5, 30, "a<b")]
)


def test_both_formats_draw_the_same() -> None:
    _, box, line, label = ElementTree.fromstring(to_svg(DRAWING))
    assert (box.get("x"), box.get("width"), box.get("fill")) == ("10.0", "20.0", "#ff0000")
    assert line.get("points") == "100.0,10.0 200.0,10.0 200.0,40.0"
    assert label.text == "a<b"
    image = to_png(DRAWING)
    assert image.getpixel((30, 24)) == (255, 0, 0)
    assert image.getpixel((300, 20)) == image.getpixel((400, 60)) == (0, 0, 255)
    assert image.getpixel((300, 60)) == (255, 255, 255)
