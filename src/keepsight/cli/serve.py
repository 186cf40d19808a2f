"""`keepsight serve`: the model loaded, then OpenAI's API on a port."""

import argparse
import gc
import logging
import signal
import socket
import sys
import time

from keepsight.cli.model_arguments import add_model_arguments, config_from
from keepsight.errors import InvalidArgumentError

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a checkpoint's folder (default: the demo checkpoint)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for a free one (default: 8000)")
    parser.add_argument("--served-model-name", help="what clients call the model (default: its folder, as given)")
    add_model_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = config_from(arguments)
    # Before the model: a port that is taken should be told at once.
    listener = _listen(arguments.host, arguments.port)

    import uvicorn

    from keepsight.frontend.app import create_app
    from keepsight.llm import LLM

    with LLM.from_config(config) as llm:
        # All that was loaded stays: looking through it for garbage would stop every stream for some 60 ms.
        gc.freeze()
        name = arguments.served_model_name or config.model_name
        app = create_app(llm.preparer, llm.engine, name)
        # uvicorn answers what runs, then raises the signal that ended it once more: to be asked to end is no failure.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        logger.info("%s is served on %s after %.1f s", name, _url(listener), time.monotonic() - started)
        uvicorn.Server(uvicorn.Config(app, log_config=None)).run(sockets=[listener])
    return 0


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise InvalidArgumentError("--port", f"must be from 0 to 65535, not {port}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise InvalidArgumentError("--port", f"cannot listen on {host}:{port}: {error.strerror}") from error
