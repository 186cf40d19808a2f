"""`keepsight demo-picture`: draw a picture that the demo model knows, and print what is true of it."""

import argparse
from pathlib import Path
from random import Random

from PIL import Image

from keepsight.demo.draw_scene import draw_scene
from keepsight.demo.questions import NUMBER_WORDS, Asker, describe_scene, questions_about
from keepsight.demo.scenes import (
    MAX_NUMBER,
    MAX_THINGS,
    STYLES,
    Scene,
    number_scene,
    plain_look,
    random_scene,
)
from keepsight.errors import InvalidArgumentError

MIN_SIZE, MAX_SIZE = 32, 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="file to write; its extension chooses the format"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same picture (default: 0)")
    parser.add_argument("--things", type=int, help=f"how many shapes, 1 to {MAX_THINGS} (default: 1)")
    parser.add_argument("--number", type=int, help=f"write this number, 0 to {MAX_NUMBER}, instead of drawing shapes")
    parser.add_argument("--size", type=int, default=448, help="width and height in pixels (default: 448)")
    parser.add_argument("--style", choices=STYLES, default="filled", help="how shapes are drawn (default: filled)")


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    scene = _make_scene(arguments)
    _save(draw_scene(scene), arguments.output)
    print("\n".join(_truth_lines(scene, arguments.seed)))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    limits = {"--things": (1, MAX_THINGS), "--size": (MIN_SIZE, MAX_SIZE), "--number": (0, MAX_NUMBER)}
    for flag, (lowest, highest) in limits.items():
        value = getattr(arguments, flag.removeprefix("--"))
        if value is not None and not lowest <= value <= highest:
            raise InvalidArgumentError(flag, f"must be from {lowest} to {highest}, not {value}")

    if arguments.number is not None and arguments.things is not None:
        raise InvalidArgumentError("--things", "cannot be given together with --number, which draws no shapes")


def _make_scene(arguments: argparse.Namespace) -> Scene:
    random = Random(arguments.seed)
    look = plain_look(arguments.size, arguments.style)
    if arguments.number is not None:
        return number_scene(random, arguments.number, look=look)
    return random_scene(random, arguments.things or 1, look=look)


def _save(picture: Image.Image, output: Path) -> None:
    try:
        picture.save(output)
    except (OSError, ValueError) as error:
        # ValueError: Pillow does not know the file's extension.
        raise InvalidArgumentError("--output", f"cannot write {output}: {error}") from error


def _truth_lines(scene: Scene, seed: int) -> list[str]:
    num_things = len(scene.things)
    lines = [describe_scene(scene)]
    if num_things:
        lines.append(f"{NUMBER_WORDS[num_things].capitalize()} shape{'s' * (num_things > 1)}.")
    lines += [f"- {thing.colour} {thing.shape}, {thing.size}, at the {thing.position}" for thing in scene.things]
    # A random stream of its own: the questions must not depend on how many draws the picture took.
    questions = questions_about(scene, Asker(Random(seed)))
    lines += [f"{question.text} -> {question.answer}" for question in (questions[0], questions[2])]
    return lines
