"""A slash too many leads to the path without it, wherever a proxy has put the server."""

import asyncio
from urllib.parse import urljoin

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from keepsight.frontend.api.redirect_slashes import RedirectSlashes
from tests.frontend.api.app_client import Client

PUBLIC = "https://ai.example.org/ks"


@pytest.mark.parametrize(
    ("method", "typed", "meant"),
    [
        ("GET", "/dashboard/", "/dashboard"),
        ("GET", "/dashboard/?a=%2F&b", "/dashboard?a=%2F&b"),
        ("POST", "/v1/chat/completions/", "/v1/chat/completions"),
    ],
)
def test_a_slash_too_many_is_redirected_within_a_proxy_s_scheme_host_and_prefix(
    client: Client, method: str, typed: str, meant: str
) -> None:
    answer = client.send(method, typed)
    assert answer.status_code == 307
    assert urljoin(f"{PUBLIC}{typed}", answer.headers["location"]) == f"{PUBLIC}{meant}"


def test_a_name_in_the_path_is_sent_back_as_it_came() -> None:
    async def find(_http: Request) -> Response:
        return Response()

    router = Router([Route("/things/{name}", find)])
    router.default = RedirectSlashes(router)

    async def ask(path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(router), base_url="http://localhost") as client:
            return await client.get(path)

    location = asyncio.run(ask("/things/a%3Fb%23%C3%A4/")).headers["location"]
    assert urljoin(f"{PUBLIC}/things/x/", location) == f"{PUBLIC}/things/a%3Fb%23%C3%A4"


@pytest.mark.parametrize("path", ["/nothing/", "/nothing", "/dashboard//"])
def test_what_is_no_path_without_its_slash_either_is_unknown(client: Client, path: str) -> None:
    assert client.send("GET", path).status_code == 404
