"""The flags for what a benchmark draws, the same for a server and for `LLM`."""

import argparse

from keepsight.bench.workloads import WorkloadOptions

DEFAULTS = WorkloadOptions(seed=0)
MAX_SIDE = 20_000
# The minimum values of flags, in all commands that have them.
MINIMUMS = {
    "requests": 1,
    "concurrency": 1,
    "max_tokens": 1,
    "pictures": 1,
    "turns": 1,
    "pool": 1,
    "runs": 1,
    "warmup": 0,
}


def add_pictures(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_picture_size(parser)
    add(
        "--pictures",
        type=int,
        default=DEFAULTS.pictures_per_request,
        help="pictures per request of many-pictures (default: %(default)d)",
    )
    add("--pool", type=int, default=DEFAULTS.pool_size, help="pictures in zipf's pool (default: %(default)d)")


def add_picture_size(parser: argparse.ArgumentParser, default: tuple[int, int] = DEFAULTS.picture_size) -> None:
    help_text = f"size of the pictures (default: {default[0]}x{default[1]})"
    parser.add_argument("--picture-size", type=_to_size, default=default, metavar="WxH", help=help_text)


def options_of(arguments: argparse.Namespace, seed: int) -> WorkloadOptions:
    return WorkloadOptions(
        seed,
        num_requests=arguments.requests,
        picture_size=arguments.picture_size,
        pictures_per_request=arguments.pictures,
        pool_size=arguments.pool,
    )


def to_percent(text: str) -> int:
    if not (text.isdecimal() and int(text) <= 100):
        raise argparse.ArgumentTypeError(f"must be from 0 to 100, not {text!r}")
    return int(text)


def _to_size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and 0 < int(width) <= MAX_SIDE and 0 < int(height) <= MAX_SIDE):
        raise argparse.ArgumentTypeError(f"must be like 4000x3000, not {text!r}")
    return int(width), int(height)
