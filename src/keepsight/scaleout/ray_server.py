"""One `keepsight serve` on a node of a Ray cluster: an actor that starts it, and waits for its end.

The server is a child process, with a supervisor of its own as anywhere else. Ray kills it with the actor's process, and
the server's processes end without their supervisor.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence

import ray

from keepsight.program_identity import PYTHON

# Of the environment, which servers would take for the user's wish: Ray sets the first to the number of reserved cores,
# and the second is the router's.
_NOT_THEIRS = ("OMP_NUM_THREADS", "KEEPSIGHT_SSL_KEYFILE_PASSWORD")
# For a server to end by itself after its running answers.
GOODBYE_SECONDS = 15.0


class RayServer:
    """The actor. Each of its methods may run while another waits."""

    def __init__(self, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        """`arguments`: of `keepsight serve`. `variables`: those of its environment that the node does not decide."""
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_THEIRS}
        self._arguments, self._environment = arguments, environment | dict(variables)
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""

    def start(self) -> str:
        """Start the server unless it runs; return the address that it will listen on, if it does not fail to."""
        if self._process is None or self._process.poll() is not None:
            host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            port = _find_free_port(host)
            self._address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            command = [*PYTHON, "-m", "keepsight", "serve", *self._arguments, "--host", host, "--port", str(port)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=self._environment)
        return self._address

    def wait(self) -> int:
        """Wait for the server's end; return its exit code."""
        assert self._process is not None
        return self._process.wait()

    def stop(self, seconds: float) -> None:
        """End the server. `seconds`: that it gives running answers to finish."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(seconds + GOODBYE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _find_free_port(host: str) -> int:
    """Return a port that is free now. Should it be taken meanwhile, the server ends and is started again."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])
