"""A fake OpenAI server that sends scripted answers and records requests."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = {"data": [{"id": "first"}, {"id": "second"}]}
USAGE = {"prompt_tokens": 20, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}
LIMIT_SECONDS = 20


def event(content: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": content}}]}, ensure_ascii=False).encode() + b"\n\n"


USAGE_EVENT = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
DONE = b"data: [DONE]\n\n"


def answer(*pieces: str) -> list[bytes]:
    return [*map(event, pieces), USAGE_EVENT, DONE]


# Ways of other servers to say "Hi", which both clients must read.
STREAMS_OF_OTHERS = (
    [b": a comment\n\n", b"event: message\n", b'data:{"choices":[{"delta":{"content":"Hi"}}]}\r\n\r\n', DONE],
    [b'data: {"choices": [{"delta": {"content": "Hi"}}], "usage": null}\n\n', b'data: {"choices": []}\n\n', DONE],
    [event("Hi"), DONE, b"data: nonsense\n\n"],
    [b'data: {"choices": [{"delta": {"content": "Hi"}}], "error": null}\n\n', DONE],
    [
        b'data: {"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}\n\n',
        b'data: {"choices": null}\n\n',
    ],
    [event("Hi"), b'data: {"usage": {"prompt_tokens": 5.0, "completion_tokens": 1}}\n\n', DONE],
    [event("Hi"), b'event: ping\ndata: {"type": "ping"}\n\n', DONE],
    [event("Hi"), b'data: {"choices": [{"finish_reason": "stop"}]}\n\n'],
    [b'data: {"code": "", "message": "", "request_id": "a"}\n\n', event("Hi"), DONE],
    [b'data: {"type": "status", "message": "The model is being loaded."}\n\n', event("Hi"), DONE],
)


# Ways of servers to end an answer with the error "It broke.", which no client may take for an answer.
FAILURES = (
    b'data: {"error": {"message": "It broke.", "code": 500}}\n\n',
    b'data: {"error": "It broke."}\n\n',
    b'data: {"object": "error", "message": "It broke.", "type": "InternalServerError", "code": 500}\n\n',
    b'data: {"message": "It broke.", "type": "server_error"}\n\n',
    b'event: error\ndata: {"message": "It broke."}\n\n',
    b'event: error\r\ndata: {"type": "error", "error": {"message": "It broke."}}\r\n\r\n',
    b"event:error\ndata: It broke.\n\n",
    b'error: {"code": 500, "message": "It broke.", "type": "server_error"}\n\n',
    b'data: {"choices": [{"index": 0, "finish_reason": "error", "error": {"message": "It broke."}}]}\n\n',
)


@dataclass
class Script:
    """The answers to the next requests, of which the last one repeats, and the recorded requests."""

    answers: list[list[bytes]] = field(default_factory=lambda: [answer("Hello", "!")])
    headers: dict[str, str] = field(default_factory=dict)
    models: object = field(default_factory=lambda: MODELS)
    status: int = 200
    refusal: bytes = b""
    # If set, no request is answered before this many have arrived.
    together: threading.Barrier | None = None
    # After its last chunk, an answer waits for the client to disconnect.
    is_endless: bool = False
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    client_left: threading.Event = field(default_factory=threading.Event)

    @property
    def messages(self) -> Any:
        """The messages of the last request."""
        return self.bodies[-1]["messages"]


@contextmanager
def scripted_server(script: Script) -> Iterator[Script]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            script.authorizations.append(self.headers["Authorization"])
            self._begin(json.dumps(script.models).encode())

        def do_POST(self) -> None:
            script.authorizations.append(self.headers["Authorization"])
            script.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if script.together is not None:
                script.together.wait(LIMIT_SECONDS)
            if self._begin():
                pieces = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
                for piece in pieces:
                    self.wfile.write(piece)
                if script.is_endless:
                    self._wait_for_the_end()

        def _begin(self, body: bytes = b"") -> bool:
            self.send_response(script.status)
            for name, value in script.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(script.refusal if script.status != 200 else body)
            return script.status == 200

        def _wait_for_the_end(self) -> None:
            self.connection.settimeout(LIMIT_SECONDS)
            if self.connection.recv(1) == b"":
                script.client_left.set()

        def log_message(self, *_arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        # With the default of five, further concurrent connections would be refused.
        request_queue_size = 128

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        script.url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            yield script
        finally:
            server.shutdown()
            thread.join()
