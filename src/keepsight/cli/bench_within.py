"""`keepsight bench offline` and `keepsight bench parts`: measure this package within its own process.

Modules that import torch are imported only when they are needed.
"""

import argparse
from dataclasses import replace

from keepsight.bench.report import to_markdown
from keepsight.bench.workloads import AS_LONG_AS_A_PICTURE, WORKLOADS
from keepsight.cli.bench_arguments import DEFAULTS, MINIMUMS, add_picture_size, add_pictures, options_of, to_percent
from keepsight.cli.check_arguments import check_minimums
from keepsight.cli.end_on_ctrl_c import ending_on_ctrl_c
from keepsight.cli.model_arguments import add_model, add_model_arguments, config_from
from keepsight.config import CHOICES, Config

PHOTO_SIZE = (4000, 3000)
# Workloads that need a server, or requests one after the other.
ONLY_SERVED = ("multi-turn", "text-beside-pictures", "restart")


def add_offline_arguments(parser: argparse.ArgumentParser) -> None:
    names = [name for name in WORKLOADS if name not in ONLY_SERVED]
    add_model(parser)
    parser.add_argument("--workload", choices=names, default="zipf", help="workload to run (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=64, help="timed requests, all at once (default: %(default)d)")
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens of each answer (default: %(default)d)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed repeats the inputs (default: 0)")
    add_pictures(parser)
    parser.add_argument(
        "--reuse",
        type=to_percent,
        default=DEFAULTS.reuse_percent,
        metavar="PERCENT",
        help="percentage of zipf's pictures that come from the pool (default: %(default)d)",
    )
    add_model_arguments(parser)


def run_offline(arguments: argparse.Namespace) -> int:
    with ending_on_ctrl_c():
        from keepsight.bench.offline import measure_offline
        from keepsight.frontend.intake.read_header import check_size
        from keepsight.llm import LLM
        from keepsight.media import Geometry
        from keepsight.sampling_params import SamplingParams

    check_minimums(arguments, MINIMUMS)
    options = replace(options_of(arguments, arguments.seed), reuse_percent=arguments.reuse)
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens, ignore_eos=True)
    config = config_from(arguments)
    if arguments.workload not in AS_LONG_AS_A_PICTURE:
        # Before all pictures are drawn, which takes long if they are large.
        check_size(Geometry(*arguments.picture_size), "--picture-size", config.max_image_pixels)
    with LLM.from_config(config) as llm:
        print(measure_offline(llm, arguments.workload, options, params).describe())
    return 0


def add_parts_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    for name, help_text in (("device", "where the model computes"), ("dtype", "precision of its weights")):
        parser.add_argument(f"--{name}", choices=CHOICES[name], default="auto", help=f"{help_text} (default: auto)")
    parser.add_argument(
        "--runs", type=int, default=15, help="runs of each part, of which the median counts (default: %(default)d)"
    )
    add_picture_size(parser, PHOTO_SIZE)


def run_parts(arguments: argparse.Namespace) -> int:
    check_minimums(arguments, MINIMUMS)
    with ending_on_ctrl_c():
        from keepsight.bench.parts import measure_parts

    config = Config.from_options(model=arguments.model, device=arguments.device, dtype=arguments.dtype)
    costs = measure_parts(config, arguments.picture_size, arguments.runs)
    rows = [(each.name, f"{each.ms:.3f}", f"{each.num_bytes / 1e6:.2f}", f"{each.copy_ms:.3f}") for each in costs]
    print(to_markdown([("part", "ms", "MB", "ms to copy them"), *rows]))
    return 0
