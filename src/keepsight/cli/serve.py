"""`keepsight serve`: serve OpenAI's API on a port, with a supervisor over engines and frontends."""

import argparse
import dataclasses
import errno
import logging
import os
import re
import socket
from collections.abc import Callable, Collection
from functools import partial

from keepsight.checkpoint_folder import is_checkpoint, list_files
from keepsight.cli.api_arguments import add_api_arguments, api_settings_from
from keepsight.cli.check_arguments import check_arguments_are_text, check_is_text, check_minimums
from keepsight.cli.listen import add_address, add_shutdown_timeout, allow_many_open_files, listen
from keepsight.cli.model_arguments import add_model, add_model_arguments, config_from
from keepsight.cli.one_line_parser import flag_of
from keepsight.cli.vllm_variables import warn_of_vllm_variables
from keepsight.config import Config
from keepsight.errors import InvalidArgumentError, ServerStartError
from keepsight.ipc.pixel_mode import choose_size_and_mode
from keepsight.ipc.run_directory import RunDirectory
from keepsight.ipc.server_log import begin_log
from keepsight.ipc.take_signals import take_signals
from keepsight.program_identity import identify_program
from keepsight.supervisor import ServerSettings, Supervisor

# URLs have a colon.
_PATH_OR_HUB_NAME = re.compile(r"[\w.~-]*(/[\w.-]+)+/?")
# What may look like one: keys of random Base64, and networks.
_KEY_OR_NETWORK = re.compile(r"([A-Za-z0-9+/]{4}){6,}|[\d.]+/\d+")
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "model", nargs="?")
    add_address(parser)
    add_process_arguments(parser)
    add_shutdown_timeout(parser, "server")
    add_api_arguments(parser)
    add_model_arguments(parser, takes_adapters=True)


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that clients may use for the model; answers use the first (default: its folder, as given)",
    )
    parser.add_argument(
        "--api-server-count", type=int, default=1, help="processes that serve HTTP and prepare requests (default: 1)"
    )
    parser.add_argument(
        "--data-parallel-size",
        type=int,
        default=1,
        help="engines that share the requests, each with a GPU or part of the cores (default: 1)",
    )
    parser.add_argument(
        "--watchdog-timeout",
        type=float,
        help="seconds that a step of an engine may take, or all of its process stand still, before it is replaced, at "
        "least 10, or 0 for any number (default: 300 on a GPU; 0 on a CPU, where a large model's may take as long)",
    )


def run(arguments: argparse.Namespace, on_serving: Callable[[socket.socket], None] = lambda _: None) -> int:
    """`on_serving`: called with the listening socket once requests are answered. It is closed when the server ends."""
    program = identify_program()
    begin_log()
    warn_of_vllm_variables(os.environ)
    _check_model_is_no_value(arguments)
    config = config_from(arguments)
    api = api_settings_from(arguments)
    model_name = arguments.served_model_name[0] if arguments.served_model_name else config.model_name
    _check_names(config, (model_name, *api.more_model_names))
    check_is_text(arguments.model, "model")  # which is typed without a flag
    check_arguments_are_text(arguments)
    minimums = {"api_server_count": 1, "data_parallel_size": 1, "shutdown_timeout": 0}
    check_minimums(arguments, minimums | ({"watchdog_timeout": 10} if arguments.watchdog_timeout else {}))
    allow_many_open_files()
    _check_scheduling_is_allowed()
    # Before the model is loaded: a port that is in use should be reported at once.
    with (
        listen(arguments.host, arguments.port) as listener,
        # Signals are handled from before the run directory exists until it is removed.
        take_signals() as signals,
        RunDirectory.create(num_frontends=arguments.api_server_count) as directory,
    ):
        if arguments.model is None:
            logger.info("no model is given: the built-in demo is served, which sees only coloured shapes")
        config, pixel_mode = choose_size_and_mode(
            config, arguments.api_server_count, run_directory=directory, num_engines=arguments.data_parallel_size
        )
        settings = ServerSettings(
            options=_options_of(config),
            model_name=model_name,
            files=list_files(config.directory, *config.adapter_folders.values()),
            program=program,
            run_directory=directory.path,
            pixel_mode=pixel_mode,
            num_frontends=arguments.api_server_count,
            num_engines=arguments.data_parallel_size,
            shutdown_seconds=arguments.shutdown_timeout,
            watchdog_seconds=arguments.watchdog_timeout,
            api=api,
        )
        return Supervisor(settings, listener, signals, on_serving=partial(on_serving, listener)).run()


def _check_names(config: Config, model_names: Collection[str]) -> None:
    for name in config.adapter_folders:
        if name in model_names:
            raise InvalidArgumentError("--lora-modules", f"{name!r} is already a name of the model")


def _check_model_is_no_value(arguments: argparse.Namespace) -> None:
    """Raise if a flag with optional or several values seems to have taken the model: the demo would be served."""
    if arguments.model is not None:
        return
    for name, value in vars(arguments).items():
        # The value may be a key, so it is not shown.
        if isinstance(value, list) and value and _looks_like_a_model(value[-1]):
            raise InvalidArgumentError(flag_of(name), "its last value looks like the model: put the model first")
    for name in ("encoder_disk_cache", "prefix_disk_cache"):
        value = vars(arguments).get(name)
        # Any other path may well be the cache's.
        if isinstance(value, str) and _HUB_NAME.fullmatch(value) and not os.path.isdir(value):  # noqa: PTH112 - raises
            reason = f"{value} looks like the model: put the model first (./{value} would be a new folder)"
            raise InvalidArgumentError(flag_of(name), reason)


def _looks_like_a_model(value: object) -> bool:
    if not isinstance(value, str):  # an adapter
        return False
    return is_checkpoint(value) or bool(_PATH_OR_HUB_NAME.fullmatch(value) and not _KEY_OR_NETWORK.fullmatch(value))


def _check_scheduling_is_allowed() -> None:
    """Raise if the system refuses the first call of ZeroMQ's threads: without it, ZeroMQ would abort the engine."""
    if not hasattr(os, "sched_setscheduler"):  # not Linux
        return
    try:
        os.sched_setscheduler(0, os.sched_getscheduler(0), os.sched_getparam(0))
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS):
            reason = f"is refused ({error.strerror}), but ZeroMQ needs it"
            raise ServerStartError(f"the system call sched_setscheduler {reason}: see docs/operations.md") from error


def _options_of(config: Config) -> dict[str, object]:
    """Return the configuration in a form that JSON can carry, and from which the same one can be built again."""
    options = dataclasses.asdict(config)
    return options | {"model": None if config.model is None else str(config.model)}
