"""An HTTP server that runs beside its test, in a thread of its own."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from keepsight.frontend.http.fair_accept import FairAcceptServer


@contextmanager
def running_in_thread(server: FairAcceptServer, end_seconds: float) -> Iterator[int]:
    """Yield its port; then it has to end within `end_seconds`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(end_seconds)
            assert not thread.is_alive()
