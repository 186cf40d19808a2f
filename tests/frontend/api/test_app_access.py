"""Access control: which caller may use which path, with the app in process."""

import asyncio
import threading
from collections.abc import Callable

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from keepsight.api_settings import ApiSettings
from keepsight.frontend.api.access import ADMIN_PATHS, METRICS_PATH, OPEN_PATHS, is_for_admins
from keepsight.frontend.api.request_log import RequestLog
from keepsight.requests import TierStatus
from tests.frontend.api.app_client import MODEL, Client, FakeEngine, error_of

OPEN = ("/", "/health", "/ready", "/version", "/openapi.json")
RESETS = {
    "/reset_prefix_cache": {"prefix": True},
    "/reset_encoder_cache": {"encoder": True},
    "/reset_mm_cache": {"processor": True},
}

PATIENCE = 5  # seconds


def bearing(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_without_a_known_key_only_open_paths_answer(client: Client) -> None:
    client.settings = ApiSettings(api_keys=("one", "two"))
    for path in OPEN:
        assert client.send("GET", path).status_code == 200
    for path in ("/v1/models", "/nothing", "/v1/chat/completions", "/tokenize", "/tokenize/", "/health//", "/HEALTH"):
        assert error_of(client.send("GET", path)) == (401, None, "missing_api_key"), path
        assert error_of(client.send("GET", path, headers=bearing("three"))) == (401, None, "invalid_api_key")
    for key in ("one", "two"):
        assert client.send("GET", "/v1/models", headers=bearing(key)).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/dashboard"])
def test_a_slash_too_many_leads_to_an_open_path_without_a_key_too(client: Client, path: str) -> None:
    client.settings = ApiSettings(api_keys=("one",))
    answer = client.send("GET", f"{path}/")
    assert (answer.status_code, answer.headers["location"]) == (307, f"..{path}")


def test_without_a_key_health_says_nothing_about_callers(client: Client, engine: FakeEngine) -> None:
    reason = "OSError: [Errno 28] No space left on device: '/secret/place'"
    engine.tiers = {
        0: (
            TierStatus("encoder", "host", None, 10, 100, 1, 5, 0, 0),
            TierStatus("encoder", "disk", reason, 0, 9, 0, 0, 0, 0),
        )
    }
    client.settings = ApiSettings(api_keys=("one", "two"), admin_api_key="admin")
    words = [
        {"engine": 0, "status": "ok", "cache": "encoder", "name": "host"},
        {"engine": 0, "status": "set aside", "cache": "encoder", "name": "disk"},
    ]
    for headers in ({}, bearing("three"), {"Authorization": "Basic one"}):
        response = client.send("GET", "/health", headers=headers)
        assert (response.status_code, response.json()) == (
            200,
            {"status": "ok", "engines": 1, "silent_engines": 0, "tiers": words},
        )
    for key in ("one", "two", "admin"):
        body = client.send("GET", "/health", headers=bearing(key)).json()
        assert (body["requests"], body["tiers"][0]["num_entries"], body["tiers"][1]["reason"]) == (0, 1, reason)


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "one", "Basic one", "Bearer one two", "Bearer oné", "Bearer on", "Bearer One"]
)
def test_an_unknown_key_is_refused(client: Client, header: str) -> None:
    client.settings = ApiSettings(api_keys=("one",))
    response = client.send("GET", "/v1/models", headers={"Authorization": header.encode()})
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"


def test_a_caller_without_a_key_does_not_reach_the_engine(client: Client, engine: FakeEngine) -> None:
    client.settings = ApiSettings(api_keys=("one",))
    assert client.chat().status_code == 401
    assert not engine.requests


@pytest.mark.parametrize("path", RESETS)
def test_caches_are_reset_only_with_the_administrator_s_key(client: Client, engine: FakeEngine, path: str) -> None:
    client.settings = ApiSettings(api_keys=("one",), admin_api_key="admin")
    for headers in ({}, bearing("one")):
        refused = client.send("POST", path, headers=headers)
        assert refused.status_code == 401
        assert "the administrator's key is needed" in refused.json()["error"]["message"]
    assert not engine.resets
    assert client.send("POST", path, headers=bearing("admin")).json() == {}
    assert engine.resets == [RESETS[path]]
    assert client.send("GET", "/v1/models", headers=bearing("admin")).status_code == 401


@pytest.mark.parametrize("path", RESETS)
def test_a_reset_does_not_block_other_requests(
    client: Client, engine: FakeEngine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reset may have gigabytes to free, so it runs outside the event loop."""
    threads: list[threading.Thread] = []
    monkeypatch.setattr(engine, "reset_caches", lambda **_: threads.append(threading.current_thread()))
    assert client.send("POST", path).json() == {}
    [thread] = threads
    assert thread is not threading.main_thread(), "which runs the event loop"


def test_resets_that_wait_for_an_engine_leave_the_threads_to_other_requests(
    client: Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(engine, "reset_caches", lambda **_: may_end.wait(PATIENCE))

    async def run() -> None:
        transport = httpx.ASGITransport(client.make_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            resets = [asyncio.create_task(http.post("/reset_prefix_cache")) for _ in range(50)]
            await asyncio.sleep(0)
            assert (await http.post("/detokenize", json={"tokens": [5]})).status_code == 200
            assert not may_end.is_set()
            assert not any(each.done() for each in resets)
            may_end.set()
            assert {each.status_code for each in await asyncio.gather(*resets)} == {200}

    asyncio.run(run())


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
        {"X-Forwarded-For": "203.0.113.5"},
        {"Forwarded": "for=203.0.113.5"},
        {"Via": "1.1 proxy.example"},
        # A domain whose owner points it at this machine (DNS rebinding).
        {"Host": "evil.example"},
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"Host": "[localhost"},
    ],
)
def test_without_an_administrator_s_key_only_local_callers_may_reset(
    client: Client, engine: FakeEngine, headers: dict[str, str]
) -> None:
    assert error_of(client.send("POST", "/reset_mm_cache", headers=headers)) == (403, None, "admin_only")
    client.address = "203.0.113.5"
    assert error_of(client.send("POST", "/reset_mm_cache")) == (403, None, "admin_only")
    assert not engine.resets
    client.address = "::ffff:203.0.113.5"
    assert error_of(client.send("POST", "/reset_mm_cache")) == (403, None, "admin_only")
    assert not engine.resets
    # The second is how a dual-stack socket reports an IPv4 address.
    for address in ("::1", "::ffff:127.0.0.1"):
        client.address = address
        assert client.send("POST", "/reset_mm_cache").status_code == 200


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000"])
def test_the_server_s_own_page_may_reset_when_opened_locally(client: Client, engine: FakeEngine, host: str) -> None:
    own = {"Host": host, "Origin": f"http://{host}"}
    assert client.send("POST", "/reset_mm_cache", headers=own).status_code == 200
    assert engine.resets


@pytest.mark.parametrize("path", ["/debug/state", "/debug/whatever/comes"])
def test_paths_that_show_the_server_s_inside_are_for_administrators(client: Client, path: str) -> None:
    client.settings = ApiSettings(api_keys=("one",), admin_api_key="admin")
    assert client.send("GET", path, headers=bearing("one")).status_code == 401
    client.settings, client.address = ApiSettings(), "203.0.113.5"
    assert error_of(client.send("GET", path)) == (403, None, "admin_only")


SPELLINGS: list[Callable[[str], str]] = [
    lambda path: path,
    *(lambda path, end=end: path + end for end in ("%0A", "%0D", "%0D%0A", "%00", "%1F", "%C2%85", "%E2%80%A8")),
    *(lambda path, end=end: path + end for end in ("/", "//", "%2F", "%20", ".", "/.", ";a", "?a", "%3Fa", "%23")),
    *(lambda path, end=end: end + path for end in ("/", "/.", "/%2e", "/x/..", "%0A", "/%0A")),
    str.upper,
    lambda path: path.replace("e", "%65"),
    lambda path: path.replace("e", "%2565"),
    lambda path: "/" + path[1:].replace("/", "%2F"),
    lambda path: "/" + path[1:].replace("/", "//"),
    lambda path: path.replace("e", "%0Ae"),
    lambda path: path.replace("s", "ſ"),
]


def guarded_routes(app: ASGIApp) -> list[tuple[str, str]]:
    """Return method and path of each route that not every caller with a key may use, and of the metrics."""
    assert isinstance(app, RequestLog)
    assert isinstance(app._app, Starlette)
    paths = [each for each in app._app.routes if isinstance(each, Route) and each.path not in OPEN_PATHS]
    guarded = [each for each in paths if is_for_admins(each.path) or each.path == METRICS_PATH]
    return [(method, each.path) for each in guarded for method in sorted(each.methods or ())]


@pytest.mark.parametrize("has_root_path", [False, True])
def test_no_spelling_of_a_guarded_path_opens_it(client: Client, engine: FakeEngine, has_root_path: bool) -> None:
    """The router and the rule of access must see one path."""
    root = "/keepsight" if has_root_path else ""
    guarded = guarded_routes(client.make_app())
    assert {path for _, path in guarded} >= {*ADMIN_PATHS, "/debug/state", METRICS_PATH}

    async def ask(settings: ApiSettings, headers: dict[str, str]) -> None:
        client.settings = settings
        transport = httpx.ASGITransport(client.make_app(), root_path=root, client=("203.0.113.5", 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for method, path in guarded:
                for spell in SPELLINGS:
                    url = f"http://localhost{root}{spell(path)}"
                    response = await http.request(method, url, headers=headers)
                    may_watch = path == METRICS_PATH and bool(headers or not settings.api_keys)
                    assert may_watch or response.status_code in (307, 401, 403, 404), url

    for settings in (
        ApiSettings(api_keys=("one",), admin_api_key="admin"),
        ApiSettings(admin_api_key="admin"),
        ApiSettings(api_keys=("one",)),
    ):
        for headers in ({}, bearing("one")):
            asyncio.run(ask(settings, headers))
    assert not engine.resets


@pytest.mark.parametrize("path", ["/reset_mm_cache%0A", "/health%0A", "/v1/models/a%00b"])
def test_a_path_with_a_control_character_is_not_found_whoever_asks(client: Client, path: str) -> None:
    assert error_of(client.send("GET", path)) == (404, None, "no_such_path")


def test_callers_of_different_keys_share_no_salt_and_cannot_name_another_s(client: Client, engine: FakeEngine) -> None:
    client.settings = ApiSettings(api_keys=("one", "two"), cache_isolation="api-key")
    for key in ("one", "two"):
        for salt in (None, "a", "b"):
            client.chat(headers=bearing(key), **({} if salt is None else {"cache_salt": salt}))
    salts = [request.cache_salt for request in engine.requests]
    assert len(set(salts)) == 6
    assert None not in salts
    client.chat(headers=bearing("two"), cache_salt=salts[0])
    client.chat(headers=bearing("one"), cache_salt="a")
    assert engine.requests[-2].cache_salt not in salts
    assert engine.requests[-1].cache_salt == salts[1]
    response = client.chat(headers=bearing("one"), cache_salt="")
    assert error_of(response) == (400, "cache_salt", "invalid_argument")


def test_completions_are_isolated_as_chats_are(client: Client, engine: FakeEngine) -> None:
    client.settings = ApiSettings(api_keys=("one", "two"), cache_isolation="api-key")
    for key in ("one", "two"):
        client.send("POST", "/v1/completions", headers=bearing(key), json={"prompt": "Hello"})
    first, second = engine.requests
    assert first.cache_salt != second.cache_salt


def test_a_web_page_may_ask_only_if_its_origin_is_allowed(client: Client) -> None:
    asking = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in client.send("OPTIONS", "/v1/chat/completions", headers=asking).headers
    client.settings = ApiSettings(allowed_origins=("https://a.example",), api_keys=("one",))
    allowed = client.send("OPTIONS", "/v1/chat/completions", headers=asking)
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    private = asking | {"Access-Control-Request-Private-Network": "true"}
    allowed = client.send("OPTIONS", "/v1/chat/completions", headers=private)
    assert (allowed.status_code, allowed.headers["access-control-allow-private-network"]) == (200, "true")
    other = client.send("OPTIONS", "/v1/chat/completions", headers=private | {"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_without_api_keys_forms_of_other_pages_are_refused(client: Client, path: str) -> None:
    """Browsers send a request that a form could make without a preflight, and name its origin."""
    form = {"Content-Type": "text/plain", "Host": "localhost:8000", "Origin": "https://a.example"}
    for origin in ("https://a.example", "null", "http://localhost:3000"):
        refused = client.send("POST", path, headers=form | {"Origin": origin}, content=b"{}")
        assert error_of(refused) == (403, None, "origin_not_allowed")
        assert repr(origin) in refused.json()["error"]["message"]
    # The server's own page, also through a proxy that changes the host; a client that is no page; one with a key.
    own = form | {"Origin": "http://localhost:8000"}
    proxied = form | {"Sec-Fetch-Site": "same-origin"}
    forwarded = form | {"X-Forwarded-Host": "A.example:443"}
    twice = form | {"X-Forwarded-Host": "a.example, inner.proxy"}
    port_apart = form | {"Origin": "https://a.example:8443"}
    port_apart |= {"X-Forwarded-Host": "a.example", "X-Forwarded-Port": "8443, 80"}
    with_port = form | {"Host": "A.example:443"}
    no_page = {"Content-Type": "text/plain"}
    for headers in (own, proxied, forwarded, twice, port_apart, with_port, no_page):
        assert client.send("POST", path, headers=headers, content=b"{}").status_code == 400
    for settings in (ApiSettings(allowed_origins=("https://a.example",)), ApiSettings(allowed_origins=("*",))):
        client.settings = settings
        assert client.send("POST", path, headers=form, content=b"{}").status_code == 400
    client.settings = ApiSettings(api_keys=("one",))
    assert client.send("POST", path, headers=form | bearing("one"), content=b"{}").status_code == 400


@pytest.mark.parametrize(
    "forwarded",
    [
        {"X-Forwarded-Host": "inner.proxy, a.example"},
        {"X-Forwarded-Host": ", a.example"},
        {"X-Forwarded-Host": "a.example", "X-Forwarded-Port": "8443"},
        {"X-Forwarded-Port": "3000"},
    ],
)
def test_what_proxies_state_admits_no_page_of_another_host_or_port(client: Client, forwarded: dict[str, str]) -> None:
    form = {"Content-Type": "text/plain", "Host": "localhost:8000", "Origin": "https://a.example:3000"}
    refused = client.send("POST", "/tokenize", headers=form | forwarded, content=b"{}")
    assert error_of(refused) == (403, None, "origin_not_allowed")


def test_the_settings_do_not_show_their_keys() -> None:
    assert "secret" not in repr(ApiSettings(api_keys=("secret",), admin_api_key="secret"))


def test_several_names_are_one_model_that_answers_by_the_first(client: Client) -> None:
    client.settings = ApiSettings(more_model_names=("other",))
    assert client.chat(model="other").json()["model"] == MODEL
    assert [each["id"] for each in client.send("GET", "/v1/models").json()["data"]] == [MODEL, "other"]
    assert client.send("GET", "/v1/models/other").json()["id"] == "other"


def test_the_root_of_each_name_is_the_first_as_vllm_s_benchmark_reads_it(client: Client) -> None:
    client.settings = ApiSettings(more_model_names=("other",))
    assert [each["root"] for each in client.send("GET", "/v1/models").json()["data"]] == [MODEL, MODEL]
    assert client.send("GET", "/v1/models/other").json()["root"] == MODEL
