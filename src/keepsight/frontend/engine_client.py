"""What the frontend needs of an engine, wherever it runs."""

from collections.abc import AsyncGenerator
from typing import Protocol

from keepsight.requests import EngineRequest, TokenOutput


class EngineClient(Protocol):
    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        """Closing the generator abandons the request."""
        ...
