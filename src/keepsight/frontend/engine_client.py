"""What the frontend needs of an engine, wherever it runs."""

from collections.abc import AsyncGenerator
from typing import Protocol

from keepsight.frontend.prepare_request import PreparedRequest
from keepsight.requests import TokenOutput


class EngineClient(Protocol):
    def generate(self, prepared: PreparedRequest) -> AsyncGenerator[TokenOutput, None]:
        """Closing the generator abandons the request.

        Raises what making its pixels raised (before the first token), and RequestFailedError.
        """
        ...

    def stop_choice(self, request_id: str, choice: int) -> None:
        """No more tokens of this choice are needed; nothing happens if it has ended."""
        ...
