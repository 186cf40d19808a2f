"""`keepsight run-batch`: answer a file of requests, in the formats of OpenAI's batch API.

Asks a server like that of `keepsight serve`, with a port and a key of its own. The supervisor has the main thread, as
signals arrive there; requests are sent by another, which ends the server once all are answered.
"""

import argparse
import asyncio
import io
import os
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from tqdm import tqdm

from keepsight.api_settings import ApiSettings
from keepsight.batch.answer_batch import BatchAnswerer, Server, Tally
from keepsight.batch.batch_lines import read_requests
from keepsight.batch.input_file import InputFile
from keepsight.batch.output_file import OutputFile
from keepsight.bench.address import Address
from keepsight.cli import serve
from keepsight.cli.api_arguments import add_limits, api_settings_from
from keepsight.cli.check_arguments import check_arguments_are_text, check_minimums
from keepsight.cli.listen import add_shutdown_timeout, allow_many_open_files
from keepsight.cli.model_arguments import add_model, add_model_arguments
from keepsight.cli.one_line_parser import flag_of
from keepsight.cli.openai_server import choose_api_key
from keepsight.errors import InvalidArgumentError
from keepsight.supervisor import url_of

# Options of a server that is started which also limit what is sent to one that runs already.
_LIMITS_OF_BOTH = ("max_body_mb", "max_waiting_requests")
# Bodies of the largest size that may be under way together: a part of what a server reads at once.
MOST_LARGEST_BODIES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-i", "--input-file", required=True, metavar="FILE", help="requests, each a line of JSON; a pipe will do")
    add("-o", "--output-file", required=True, metavar="FILE", help="where one run writes answers, as they come")
    add("--resume", action="store_true", help="keep the answers in the output file, and ask for the others")
    add(
        "--concurrency",
        type=int,
        help="requests under way at once (default: 512 for each engine, at most --max-waiting-requests)",
    )
    group = parser.add_argument_group("a running server, in place of one that is started with the options below")
    group.add_argument("--base-url", metavar="URL", help="its URL, such as http://127.0.0.1:8000/v1")
    group.add_argument("--api-key", metavar="KEY", help="its key (default: OPENAI_API_KEY in the environment)")
    _add_server_arguments(parser)


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    serve.add_process_arguments(parser)
    add_shutdown_timeout(parser, "server")
    add_limits(parser.add_argument_group("request limits"))
    add_model_arguments(parser, takes_adapters=True, performance_mode="throughput")


def run(arguments: argparse.Namespace) -> int:
    check_arguments_are_text(arguments)
    _check_go_together(arguments)
    if arguments.concurrency is not None:
        check_minimums(arguments, {"concurrency": 1})
    served = _as_served(arguments)
    settings = api_settings_from(served)
    with (
        _open_input(arguments.input_file) as requests,
        closing(OutputFile(Path(arguments.output_file), arguments.resume)) as output,
    ):
        batch = _Batch(requests, output, settings, arguments.concurrency, Tally())
        try:
            status = _ask_own(served, batch) if arguments.base_url is None else _ask_running(arguments, batch)
        finally:
            if batch.tally.is_whole is not None:
                rest = "" if batch.tally.is_whole else "; --resume does the rest"
                # Not where the answers may go: `-o /dev/stdout`.
                print(f"{arguments.output_file}: {batch.tally}{rest}", file=sys.stderr)
    return status or int(not batch.tally.is_whole)


def _check_go_together(arguments: argparse.Namespace) -> None:
    if arguments.base_url is None:
        if arguments.api_key is not None:
            raise InvalidArgumentError("--api-key", "is that of a running server: --base-url is missing")
        return
    parser = argparse.ArgumentParser()
    _add_server_arguments(parser)
    for name, default in vars(parser.parse_args([])).items():
        if name not in _LIMITS_OF_BOTH and getattr(arguments, name) != default:
            raise InvalidArgumentError(flag_of(name), "cannot be given with --base-url: that server has its own")


@dataclass(frozen=True, slots=True)
class _Batch:
    requests: InputFile
    output: OutputFile
    settings: ApiSettings
    concurrency: int | None
    tally: Tally

    def answer(
        self,
        address: Address,
        api_key: str | None,
        num_engines: int = 1,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        max_bytes = self.settings.max_body_bytes
        most = self.concurrency or min(512 * num_engines, self.settings.max_waiting_requests)
        server = Server(address, api_key, is_ending, most, MOST_LARGEST_BODIES * max_bytes)
        size = os.fstat(self.requests.fileno()).st_size  # a pipe has none, nor a position
        file = io.BufferedReader(self.requests)
        # The progress bar is shown only on a terminal.
        with tqdm(total=size or None, disable=None, leave=False, unit="B", unit_scale=True) as bar:

            def show() -> None:
                bar.set_postfix_str(str(self.tally), refresh=False)
                bar.update(file.tell() - bar.n if size else 0)

            answerer = BatchAnswerer(server, self.output, self.tally, show)
            self.requests.is_over = lambda: answerer.has_ended or is_ending()
            asyncio.run(answerer.run(read_requests(file, max_bytes)))


def _ask_running(arguments: argparse.Namespace, batch: _Batch) -> int:
    allow_many_open_files()
    batch.answer(Address.parse(arguments.base_url), choose_api_key(arguments.api_key))
    return 0


def _ask_own(served: argparse.Namespace, batch: _Batch) -> int:
    def answer(listener: socket.socket) -> None:
        def is_ending() -> bool:
            return listener.fileno() < 0

        try:
            address = Address.parse(url_of("http", *listener.getsockname()))
            batch.answer(address, served.api_key[0], served.data_parallel_size, is_ending)
        finally:
            if not is_ending():
                os.kill(os.getpid(), signal.SIGTERM)

    begun: list[Future[None]] = []
    with ThreadPoolExecutor(1) as thread:
        status = serve.run(served, lambda listener: begun.append(thread.submit(answer, listener)))
    for each in begun:
        each.result()
    return status


def _as_served(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments of `serve`: those that this command lacks have its defaults, or are a private server's."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    parser.set_defaults(model=arguments.model, port=0, log_requests=False)
    return parser.parse_args([], argparse.Namespace(**{**vars(arguments), "api_key": [token_hex(32)]}))


def _open_input(name: str) -> InputFile:
    try:
        return InputFile(name)
    except OSError as error:
        raise InvalidArgumentError("--input-file", f"cannot read {name}: {error.strerror}") from error
