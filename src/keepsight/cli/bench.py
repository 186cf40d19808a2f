"""`keepsight bench`: measure any OpenAI server, or this one's parts, and compare measurements."""

import argparse
import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import SystemRandom

from keepsight.bench.address import Address
from keepsight.bench.ask import Server
from keepsight.bench.measure import ClientLoad
from keepsight.bench.plot import check_ending, save_plot
from keepsight.bench.report import Report, comparison, notes, table, to_markdown
from keepsight.bench.run_workloads import RunSettings, WorkloadRun, restart_by_command
from keepsight.bench.workloads import WORKLOADS
from keepsight.cli.add_command import add_command
from keepsight.cli.bench_arguments import DEFAULTS, MINIMUMS, add_pictures, options_of, to_percent
from keepsight.cli.bench_within import add_offline_arguments, add_parts_arguments, run_offline, run_parts
from keepsight.cli.check_arguments import check_minimums
from keepsight.cli.openai_server import DEFAULT_URL, OpenAIServer, choose_api_key
from keepsight.cli.strip_controls import strip_controls
from keepsight.errors import InvalidArgumentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")
    _add_serve(add_command(commands, "serve", "measure an OpenAI server, workload by workload"))
    add_offline_arguments(add_command(commands, "offline", "measure LLM on a workload, without a server"))
    add_parts_arguments(
        add_command(commands, "parts", "measure each step of processing a picture, next to a plain copy of its bytes")
    )
    _add_compare(add_command(commands, "compare", "compare two reports"))


def run(arguments: argparse.Namespace) -> int:
    runners = {"serve": _run_serve, "offline": run_offline, "parts": run_parts, "compare": _run_compare}
    return runners[arguments.bench_command](arguments)


# serve --------------------------------------------------------------------------------------------------------


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    _add_load(parser)
    _add_inputs(parser)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write the report, for `bench compare`")
    add("--plot", type=Path, metavar="FILE", help="plot the times to the first token; .svg or .png")
    add("--restart-command", metavar="COMMAND", help="command that restarts the server in the background, and ends")


def _add_server(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base-url", default=DEFAULT_URL, metavar="URL", help="URL of the server (default: %(default)s)")
    add("--model", metavar="NAME", help="model to use (default: the server's first)")
    add("--api-key", metavar="KEY", help="key, if the server needs one (default: OPENAI_API_KEY in the environment)")


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--workload",
        nargs="+",
        choices=(*WORKLOADS, "all"),
        default=["all"],
        help="workloads to run (default: all, restart only with --restart-command)",
    )
    add(
        "--requests", type=int, default=DEFAULTS.num_requests, help="timed requests per workload (default: %(default)d)"
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=int,
        # A string: argparse would take a typed 1 for the default, and not notice that it excludes the other flag.
        default="1",
        help="clients, each waiting for its answer (default: %(default)s)",
    )
    load.add_argument(
        "--request-rate",
        type=_to_rate,
        metavar="PER_SECOND",
        help="mean rate of new clients, which come at random moments, whether or not others have their answers",
    )
    add("--max-tokens", type=int, default=16, help="longest answer, in tokens (default: %(default)d)")
    add("--ignore-eos", action="store_true", help="make all answers that long; not every server knows the field")
    add("--warmup", type=int, default=DEFAULTS.num_warm_up, help="untimed requests beforehand (default: %(default)d)")


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--seed",
        type=int,
        help="the same seed repeats the inputs, which the server may have cached (default: a new seed)",
    )
    add("--turns", type=int, default=DEFAULTS.num_turns, help="turns of multi-turn (default: %(default)d)")
    add_pictures(parser)
    add(
        "--reuse",
        type=to_percent,
        nargs="+",
        default=[DEFAULTS.reuse_percent],
        metavar="PERCENT",
        help=f"percentages of zipf's pictures that come from the pool (default: {DEFAULTS.reuse_percent})",
    )


def _run_serve(arguments: argparse.Namespace) -> int:
    _check(arguments)
    server = _server_of(arguments)
    run = WorkloadRun(server, _settings_of(arguments, server))
    try:
        asyncio.run(run.run())
    finally:
        # Also after Ctrl-C, as measuring takes long.
        _print_run(run)
        _keep(run, arguments)
    return 1 if run.failures or any(summary.num_errors for summary in run.summaries.values()) else 0


def _print_run(run: WorkloadRun) -> None:
    lines = [
        ", ".join(f"{name} {value}" for name, value in run.report.facts.items()),
        to_markdown(table(run.summaries)),
    ]
    for name, summary in run.summaries.items():
        if summary.num_errors:
            lines.append(f"{name}: {summary.num_errors} failed; the first: {summary.first_error}")
    lines += [f"{name}: could not be measured: {reason}" for name, reason in run.failures.items()]
    if run.words_per_picture_error is not None:
        lines.append(f"words_per_picture is a guess: {run.words_per_picture_error}")
    print(strip_controls("\n".join(lines)))


def _keep(run: WorkloadRun, arguments: argparse.Namespace) -> None:
    """Write the report and the plot. A run that measured nothing leaves the files of an earlier one."""
    if not run.summaries:
        return
    if arguments.json is not None:
        with _writing("--json", arguments.json):
            run.report.save(arguments.json)
    if arguments.plot is not None:
        with _writing("--plot", arguments.plot):
            save_plot(run.summaries, arguments.plot)


@contextmanager
def _writing(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidArgumentError(flag, f"cannot write {path}: {error.strerror}") from error


def _check(arguments: argparse.Namespace) -> None:
    check_minimums(arguments, MINIMUMS)
    if arguments.plot is not None:
        check_ending(arguments.plot)
    for flag, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path is not None:
            _check_writable(flag, path)
    if "restart" in arguments.workload and arguments.restart_command is None:
        raise InvalidArgumentError("--workload", "restart needs --restart-command")


def _check_writable(flag: str, path: Path) -> None:
    """Check before measuring that the file can be written, without changing it."""
    with _writing(flag, path):
        was_there = path.exists()
        path.open("ab").close()
    if not was_there:
        path.unlink()


def _server_of(arguments: argparse.Namespace) -> Server:
    address = Address.parse(arguments.base_url)
    key = choose_api_key(arguments.api_key)
    model = arguments.model or OpenAIServer(arguments.base_url, key).first_model()
    sampling = {"temperature": 0, "max_tokens": arguments.max_tokens}
    if arguments.ignore_eos:
        sampling["ignore_eos"] = True
    return Server(address, model, key, sampling)


def _settings_of(arguments: argparse.Namespace, server: Server) -> RunSettings:
    seed = SystemRandom().getrandbits(32) if arguments.seed is None else arguments.seed
    options = replace(options_of(arguments, seed), num_warm_up=arguments.warmup, num_turns=arguments.turns)
    command = arguments.restart_command
    restart = None if command is None else partial(restart_by_command, command, server)
    load = ClientLoad(arguments.concurrency, arguments.request_rate, seed)
    return RunSettings(_names_of(arguments), options, load, list(dict.fromkeys(arguments.reuse)), restart)


def _to_rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a number above 0, not {text!r}; to send all at once, set --concurrency as high as --requests"
        )
    return rate


def _names_of(arguments: argparse.Namespace) -> list[str]:
    if "all" not in arguments.workload:
        return list(dict.fromkeys(arguments.workload))
    return [name for name in WORKLOADS if name != "restart" or arguments.restart_command is not None]


# compare ------------------------------------------------------------------------------------------------------


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs=2, type=Path, metavar="FILE", help="report written by `bench serve --json`")
    parser.add_argument(
        "--labels", default="", metavar="A,B", help="names for the reports (default: their files' names)"
    )


def _run_compare(arguments: argparse.Namespace) -> int:
    one, other = arguments.reports
    labels = arguments.labels.split(",") if arguments.labels else [one.stem, other.stem]
    if len(labels) != 2:
        raise InvalidArgumentError("--labels", f"must be two, separated by a comma, not {arguments.labels!r}")
    ours, theirs = Report.load(one), Report.load(other)
    if not ours.summaries.keys() & theirs.summaries.keys():
        raise InvalidArgumentError("FILE", f"{one} and {other} have no workload in common")
    pair = labels[0], labels[1]
    print(strip_controls("\n".join([to_markdown(comparison(ours, theirs, pair)), *notes(ours, theirs, pair)])))
    return 0
