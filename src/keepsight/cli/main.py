"""The `keepsight` command: runs the subcommand and reports Keepsight's own errors in one clear line."""

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from keepsight import __version__
from keepsight.cli.add_command import add_command
from keepsight.cli.config_file import add_config_file, fill_from_file
from keepsight.cli.end_on_ctrl_c import ending_on_ctrl_c
from keepsight.cli.one_line_parser import OneLineParser
from keepsight.cli.strip_controls import strip_controls
from keepsight.errors import KeepsightError
from keepsight.ipc.take_signals import INTERRUPTED

# A command's module is imported only when it is called: most need neither torch nor a web server.
COMMANDS = {
    "serve": "start the server",
    "route": "put one address before several servers",
    "chat": "chat with a running server in the terminal, with or without pictures",
    "generate": "ask the model once, with or without pictures",
    "run-batch": "answer a file of requests in OpenAI's batch format",
    "bench": "measure any OpenAI server, and compare the results",
    "cache": "show what caches hold, and what another size or policy would save",
    "demo-picture": "draw a picture for the demo model, and print what it shows",
}
# No room for output or files: a fault of the machine, not of the program.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def main(arguments: Sequence[str] | None = None) -> int:
    _fill_standard_streams()
    _escape_unencodable_output()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        parsed = _parse(arguments)
        status = int(_load(parsed.command).run(parsed))
        # Flush here, and not at interpreter exit, which would print a warning if it fails.
        sys.stdout.flush()
        return status
    except KeepsightError as error:
        print(f"keepsight {arguments[0]}: {strip_controls(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return 141
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _discard_output()
        print(f"keepsight {arguments[0]}: {strip_controls(str(error))}", file=sys.stderr)
        return 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser: argparse.ArgumentParser = OneLineParser(prog="keepsight", description="A multimodal inference server.")
    parser.add_argument("--version", action="version", version=f"keepsight {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        subparser = add_command(subparsers, name, summary)
        if name in arguments[:1]:
            _load(name).add_arguments(subparser)
            if name == "serve":
                add_config_file(subparser)
    parsed = parser.parse_args(arguments)
    if parsed.command == "serve" and parsed.config is not None:
        fill_from_file(parsed, _load("serve").add_arguments, arguments[1:])
    return parsed


def _load(command: str) -> Any:
    with ending_on_ctrl_c():
        return import_module(f"keepsight.cli.{command.replace('-', '_')}")


def _fill_standard_streams() -> None:
    """Open missing standard streams (`<&-`) on /dev/null: other files would take their place, in children too."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
            os.set_inheritable(descriptor, True)
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode))


def _escape_unencodable_output() -> None:
    """Escape characters that the terminal's encoding lacks instead of failing, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Redirect standard output to /dev/null, as its reader is gone or it is full; unflushed output is dropped."""
    with suppress(OSError):
        sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
