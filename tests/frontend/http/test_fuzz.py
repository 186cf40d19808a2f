"""Plays the fixed sessions and some drawn ones, of which `KEEPSIGHT_LONG_TESTS=N` plays N times as many.

`long_fuzz` plays any number.
"""

from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from keepsight.frontend.http import http_server
from tests.frontend.http.fuzz_server import FuzzedServer, fuzz
from tests.scheduling.long_run import LONG_FACTOR


@pytest.mark.parametrize(
    ("num_sessions", "options"),
    [(12, {}), (12, {"loop": "uvloop"}), (10, {"has_h11": True}), (6, {"is_tls": True})],
    ids=["asyncio", "uvloop", "h11", "tls"],
)
def test_each_request_gets_its_own_answer_and_nothing_is_left(
    num_sessions: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "has_h11" in options:
        monkeypatch.setattr(http_server, "AutoHTTPProtocol", H11Protocol)
    counts = fuzz(FuzzedServer(**options), seed=0, numbers=range(num_sessions * LONG_FACTOR))
    assert counts["answers"]
    assert counts["refusals"]
    assert counts["ends"]
