"""The router over real sockets, before replicas that answer as the test says."""

import asyncio
import re
import socket
import threading
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from keepsight.frontend.api.access import ADMIN_PATHS
from keepsight.scaleout import forward, owners
from keepsight.scaleout.router_app import RESET_PATHS
from tests.scaleout.fake_replica import Asked, FakeReplica, fakes, reset, respond, routed, routing, say_who
from tests.wait_until import wait_until

CHAT = "/v1/chat/completions"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBO" * 5000}}
Writer = asyncio.StreamWriter


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}], **fields}


def wait_for_ready(url: str, count: int) -> None:
    wait_until(lambda: httpx.get(f"{url}/health").json()["ready"] == count)


# Forwarding -----------------------------------------------------------------------------------------------------


def test_a_request_and_its_answer_arrive_as_they_were_sent() -> None:
    async def answer(_: FakeReplica, asked: Asked, writer: Writer) -> None:
        writer.write(
            respond({"a": 1}, 418, "X-Thing: Yes", "Set-Cookie: a", "Set-Cookie: b", "X-Hop: 1", "Connection: X-Hop")
        )

    with routed(answer) as (url, [replica]):
        body = b'{ "odd":   [1,2]}'
        headers = {b"X-Own": b"\xe9", b"TE": b"trailers"}
        found = httpx.request("PATCH", f"{url}/any%2Fpath?q=%20&r", content=body, headers=headers)
        assert (found.status_code, found.json()) == (418, {"a": 1})
        assert found.headers.get_list("set-cookie") == ["a", "b"]
        assert found.headers["x-thing"] == "Yes"
        assert "x-hop" not in found.headers
        [asked] = replica.asked
        assert (asked.method, asked.target, asked.body) == ("PATCH", "/any%2Fpath?q=%20&r", body)
        assert asked.header("host") == [url.removeprefix("http://")]
        assert asked.header("via") == ["1.1 keepsight"]
        assert not asked.header("te")
        assert asked.header("x-own") == ["\xe9"]


def test_a_chunked_request_is_forwarded_with_its_length() -> None:
    with routed(say_who) as (url, [replica]):
        pieces = (b"a" * size for size in (1, 70_000, 3))
        assert httpx.post(url, content=pieces).status_code == 200
        [asked] = replica.asked
        assert asked.body == b"a" * 70_004
        assert asked.header("content-length") == ["70004"]
        assert not asked.header("transfer-encoding")


def test_a_client_that_expects_it_is_told_to_send_its_body() -> None:
    with routed(say_who) as (url, [replica]), _connect(url) as connection:
        connection.sendall(b"POST /a HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"ab")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        assert replica.asked[0].body == b"ab"


def test_heads_and_preflights_pass() -> None:
    async def answer(_: FakeReplica, asked: Asked, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\nAccess-Control-Allow-Origin: *\r\n\r\n")
        writer.write(b"" if asked.method == "HEAD" else b"x" * 12)

    with routed(answer) as (url, [replica]), httpx.Client() as client:
        for method in ("HEAD", "OPTIONS", "HEAD"):
            found = client.request(method, f"{url}/v1/models", headers={"Origin": "http://a"})
            assert found.headers["content-length"] == "12"
            assert found.headers["access-control-allow-origin"] == "*"
        assert [asked.method for asked in replica.asked] == ["HEAD", "OPTIONS", "HEAD"]


def test_a_client_of_http_1_0_is_answered() -> None:
    with routed(say_who) as (url, [replica]), _connect(url) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert b"replica" in _read_to_end(connection)
        assert len(replica.asked[0].header("host")) == 1


def test_what_cannot_be_forwarded_is_refused_and_no_fault_of_the_replica() -> None:
    with routed(say_who) as (url, _), _connect(url) as connection:
        wait_for_ready(url, 1)
        connection.sendall(b"GET /\xff HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert _read_to_end(connection).startswith(b"HTTP/1.1 400 ")
        assert httpx.get(f"{url}/health").json()["ready"] == 1


def test_white_space_around_a_header_is_no_part_of_it() -> None:
    with routed(say_who) as (url, [replica]), _connect(url) as connection:
        connection.sendall(b"GET /a HTTP/1.1\r\nHost: x\r\nAuthorization: \t Bearer a b \t\r\nX-Empty: \t\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        [asked] = replica.asked
        assert ("authorization", "Bearer a b") in asked.headers
        assert ("x-empty", "") in asked.headers


def test_the_routers_own_answers_have_the_requests_id() -> None:
    with routed(say_who, max_body_bytes=10) as (url, _):
        for method, path, body in (
            ("GET", "/health", b""),
            ("GET", "/dashboard", b""),
            ("POST", "/v1/messages", b"a" * 11),
        ):
            found = httpx.request(method, f"{url}{path}", content=body, headers={"X-Request-Id": "mine"})
            assert found.headers.get_list("x-request-id") == ["mine"]
            assert found.headers.get_list("request-id") == (["mine"] if path == "/v1/messages" else [])
        ids = [
            httpx.get(f"{url}/ready", headers={"X-Request-Id": given}).headers["x-request-id"] for given in ("", "a b")
        ]
        assert [len(each) for each in ids] == [32, 32]


def test_events_arrive_one_by_one() -> None:
    with routed(_stream_two) as (url, [replica]), httpx.stream("POST", f"{url}{CHAT}", json=chat()) as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == b"data: 1\n\n"
        replica.let_go()
        assert b"".join(pieces) == b"data: 2\n\n"


async def _stream_two(replica: FakeReplica, asked: Asked, writer: Writer) -> None:
    _begin_events(writer)
    await replica.go.wait()
    writer.write(_chunk(b"data: 2\n\n") + _chunk(b""))


def _begin_events(writer: Writer, first: bytes = b"data: 1\n\n") -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    writer.write(_chunk(first))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _connect(url: str) -> socket.socket:
    port = int(url.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), 30)


def _read_to_end(connection: socket.socket) -> bytes:
    read = b""
    while piece := connection.recv(65536):
        read += piece
    return read


# Choice ---------------------------------------------------------------------------------------------------------


def test_requests_about_one_picture_go_to_one_replica() -> None:
    with routed(say_who, say_who, say_who) as (url, replicas):
        wait_for_ready(url, 3)
        questions = [chat(PICTURE, {"type": "text", "text": f"What is it, {number}?"}) for number in range(8)]
        found = {httpx.post(f"{url}{CHAT}", json=each).json()["replica"] for each in questions}
        assert len(found) == 1
        texts = [chat({"type": "text", "text": f"{number} " * 200}) for number in range(30)]
        assert len({httpx.post(f"{url}{CHAT}", json=each).json()["replica"] for each in texts}) == 3
        metrics = httpx.get(f"{url}/metrics").text
        [address] = [each.address for each in replicas if each.port in found]
        assert f'keepsight_router_requests_total{{replica="{address}",chosen_by="media"}} 7\n' in metrics
        assert f'keepsight_router_requests_total{{replica="{address}",chosen_by="cache_key"}} 0\n' in metrics
        assert f'keepsight_router_retries_total{{replica="{address}"}} 0\n' in metrics
        assert f'keepsight_router_replica_ready{{replica="{address}"}} 1\n' in metrics
        assert f'keepsight_router_requests_in_flight{{replica="{address}"}} 0\n' in metrics


def _holder(*ids: str) -> Any:
    async def answer(replica: FakeReplica, asked: Asked, writer: Writer) -> None:
        if asked.method == "HEAD":
            status = 200 if asked.target.rpartition("/")[2] in ids else 404
            writer.write(b"HTTP/1.1 %d OK\r\nContent-Length: 7\r\n\r\n" % status)
        elif asked.header("x-missing"):
            writer.write(respond({}, 404))
        else:
            await say_who(replica, asked, writer)

    return answer


def test_a_request_goes_where_the_upload_is_that_it_names() -> None:
    with routed(_holder(), _holder("media_1"), _holder("media_2", "resp_1")) as (url, replicas):
        wait_for_ready(url, 3)
        named = chat({"type": "image", "media_id": "media_1"})
        headers = {"Authorization": "Bearer mine"}
        for _ in range(2):
            assert httpx.post(f"{url}{CHAT}", json=named, headers=headers).json()["replica"] == replicas[1].port
        asked = [each for replica in replicas for each in replica.asked if each.method == "HEAD"]
        assert [each.target for each in asked] == ["/v1/files/media_1"] * 3
        assert all(each.header("authorization") == ["Bearer mine"] for each in asked)
        continued = {"previous_response_id": "resp_1", "input": "a"}
        assert httpx.post(f"{url}/v1/responses", json=continued).json()["replica"] == replicas[2].port
        assert httpx.delete(f"{url}/v1/media/media_2").json()["replica"] == replicas[2].port
        assert httpx.get(f"{url}/v1/files/media_3").json()["replica"]  # any of them says that there is none
        assert 'chosen_by="owner"} 2\n' in httpx.get(f"{url}/metrics").text


def test_who_has_what_a_request_names_is_known_once_one_replica_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "MAX_SECONDS", 1000)

    async def say_nothing(replica: FakeReplica, asked: Asked, writer: Writer) -> bool:
        await replica.wait_until_left(writer)
        return True

    with routed(_holder("resp_1"), say_nothing) as (url, [owner, _]):
        wait_for_ready(url, 2)
        continued = {"previous_response_id": "resp_1", "input": "a"}
        assert httpx.post(f"{url}/v1/responses", json=continued, timeout=30).json() == {"replica": owner.port}


def test_a_request_about_uploads_on_two_replicas_is_refused() -> None:
    with routed(_holder("media_1"), _holder("media_2")) as (url, _):
        wait_for_ready(url, 2)
        both = [{"type": "image", "media_id": name} for name in ("media_1", "media_2")]
        found = httpx.post(f"{url}{CHAT}", json=chat(*both))
        assert found.status_code == 400
        assert "media_1 and media_2" in found.json()["error"]["message"]


def test_a_caller_whom_the_replicas_refuse_does_not_learn_what_they_have() -> None:
    def of_owner(*ids: str) -> Any:
        async def answer(replica: FakeReplica, asked: Asked, writer: Writer) -> None:
            if asked.header("authorization"):
                await _holder(*ids)(replica, asked, writer)
            else:
                writer.write(respond({} if asked.method != "HEAD" else "", 401))

        return answer

    with routed(of_owner("media_1"), of_owner("media_2")) as (url, replicas):
        wait_for_ready(url, 2)
        both = chat(*({"type": "image", "media_id": name} for name in ("media_1", "media_2")))
        assert httpx.post(f"{url}{CHAT}", json=both, headers={"Authorization": "Bearer mine"}).status_code == 400
        assert httpx.post(f"{url}{CHAT}", json=both).status_code == 401
        for replica in replicas:
            replica.asked.clear()
        many = chat(*({"type": "image", "media_id": f"media_x{number}"} for number in range(64)))
        assert httpx.post(f"{url}{CHAT}", json=many).status_code == 401
        assert sum(each.method == "HEAD" for replica in replicas for each in replica.asked) == 2


def test_the_uploads_of_one_key_go_to_one_replica_in_whichever_header_clients_send_it() -> None:
    with routed(*[say_who] * 4) as (url, _):
        wait_for_ready(url, 4)
        used: dict[str, set[int]] = {}
        for key in map(str, range(8)):
            openais, padded = ({"Authorization": f"{scheme} {key}"} for scheme in ("Bearer", "bearer  "))
            anthropics = {"x-api-key": key, "anthropic-version": "2023-06-01"}
            for headers in (openais, padded, anthropics):
                answer = httpx.post(f"{url}/v1/files", content=b"a", headers=headers)
                used.setdefault(key, set()).add(answer.json()["replica"])
        assert [len(each) for each in used.values()] == [1] * 8
        assert len(set().union(*used.values())) > 1


def test_more_ids_than_any_request_has_are_not_looked_for() -> None:
    with routed(_holder(), _holder()) as (url, replicas):
        wait_for_ready(url, 2)
        many = chat(*({"type": "image", "media_id": f"media_{number}"} for number in range(65)))
        assert httpx.post(f"{url}{CHAT}", json=many).status_code == 200
        assert [each.method for replica in replicas for each in replica.asked] == ["POST"]


def test_an_upload_whose_replica_may_be_one_that_does_not_say_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "MAX_WAIT_SECONDS", 0.1)

    async def fail(replica: FakeReplica, asked: Asked, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")

    with routed(_holder("media_1"), _holder()) as (url, [owner, other]):
        wait_for_ready(url, 2)
        owner.state = {"status": "overloaded"}
        wait_for_ready(url, 1)
        found = httpx.get(f"{url}/v1/files/media_1")
        assert (found.status_code, found.json()["error"]["code"]) == (503, "no_replica")
        monkeypatch.setattr(forward, "MAX_WAIT_SECONDS", 30)
        with _connect(url) as connection:
            connection.sendall(b"GET /v1/files/media_1 HTTP/1.1\r\nHost: x\r\n\r\n")
            wait_until(lambda: len(other.asked) > 1)
            owner.state = {"status": "ok"}
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        monkeypatch.setattr(forward, "MAX_WAIT_SECONDS", 0.1)
        other.script = fail
        assert httpx.get(f"{url}/v1/files/media_2").status_code == 503
        assert httpx.get(f"{url}/v1/files/media_1").json() == {"replica": owner.port}


def test_an_owner_that_knows_it_no_more_is_asked_for_anew() -> None:
    with routed(_holder("media_1"), _holder("media_1")) as (url, replicas):
        wait_for_ready(url, 2)

        def count_looks() -> int:
            assert httpx.get(f"{url}/v1/files/media_1", headers=missing).status_code in (200, 404)
            return sum(each.method == "HEAD" for replica in replicas for each in replica.asked)

        missing: dict[str, str] = {}
        assert [count_looks(), count_looks()] == [2, 2]
        missing["X-Missing"] = "1"
        assert [count_looks(), count_looks()] == [2, 4]


# Faults ---------------------------------------------------------------------------------------------------------


async def die_before_the_head(replica: FakeReplica, asked: Asked, writer: Writer) -> bool:
    reset(writer)
    return True


def test_a_request_is_given_to_another_replica_if_the_connection_fails_before_an_answer() -> None:
    with routed(die_before_the_head, say_who, say_who) as (url, replicas):
        wait_for_ready(url, 3)
        for number in range(12):
            question = chat({"type": "text", "text": f"{number} " * 200})
            assert httpx.post(f"{url}{CHAT}", json=question).status_code == 200
        assert replicas[0].asked
        lost = f'retries_total{{replica="{replicas[0].address}"}} [^0]'
        assert re.search(lost, httpx.get(f"{url}/metrics").text)


def test_an_upload_within_which_a_replica_is_lost_is_given_whole_to_another() -> None:
    with routed(say_who, say_who) as (url, replicas):
        wait_for_ready(url, 2)
        [used] = [
            each for each in replicas if httpx.post(f"{url}/v1/files", content=b"a").json()["replica"] == each.port
        ]
        used.breaks_uploads = True
        content = b"ab" * 2**22
        found = httpx.post(f"{url}/v1/files", content=content).json()["replica"]
        [other] = [each for each in replicas if each is not used]
        assert found == other.port
        assert other.asked[-1].body == content


def test_a_request_that_two_replicas_died_of_is_given_to_no_third() -> None:
    async def die(replica: FakeReplica, asked: Asked, writer: Writer) -> bool:
        await replica.end()
        return True

    with routed(*[die] * 4) as (url, replicas):
        wait_for_ready(url, 4)
        found = httpx.post(f"{url}{CHAT}", json=chat())
        assert (found.status_code, found.json()["error"]["code"]) == (503, "engine_lost")
        assert sum(len(replica.asked) for replica in replicas) == 2


def test_a_replica_without_room_is_left_for_another_and_the_refusal_counts_if_all_have_none() -> None:
    async def refuse(replica: FakeReplica, asked: Asked, writer: Writer) -> None:
        writer.write(respond({"refused": True}, 503, "Retry-After: 2"))

    with routed(refuse, say_who) as (url, [refusing, other]):
        wait_for_ready(url, 2)
        for number in range(12):
            question = chat({"type": "text", "text": f"{number} " * 200})
            assert httpx.post(f"{url}{CHAT}", json=question).json() == {"replica": other.port}
        assert refusing.asked
        other.script = refuse
        found = httpx.post(f"{url}{CHAT}", json=chat())
        assert (found.status_code, found.json(), found.headers["retry-after"]) == (503, {"refused": True}, "2")


def test_a_refusal_that_breaks_off_is_a_loss() -> None:
    async def refuse(replica: FakeReplica, asked: Asked, writer: Writer) -> bool:
        writer.write(b"HTTP/1.1 503 No\r\nContent-Length: 100\r\n\r\nabc")
        return True

    with routed(refuse, say_who) as (url, [_, other]):
        wait_for_ready(url, 2)
        for _ in range(6):
            assert httpx.post(f"{url}{CHAT}", json=chat()).json() == {"replica": other.port}
        other.script = refuse
        wait_for_ready(url, 2)
        assert httpx.post(f"{url}{CHAT}", json=chat()).json()["error"]["code"] == "engine_lost"


@pytest.mark.parametrize(
    ("said", "status", "content"),
    [
        (b"HTTP/1.1 999 OK\r\nContent-Length: 0\r\n\r\n", 503, None),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
            200,
            b"abcde",
        ),
        (b"HTTP/1.1 304 Same\r\nContent-Length: 7\r\n\r\n", 304, b""),
        (b"HTTP/1.1 204 None\r\nContent-Length: 2\r\n\r\nok", 204, b""),
    ],
)
def test_strange_answers_pass_or_are_losses(
    said: bytes, status: int, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(replica: FakeReplica, asked: Asked, writer: Writer) -> None:
        writer.write(said)

    with routed(answer) as (url, _):
        wait_for_ready(url, 1)
        found = httpx.get(f"{url}/v1/models")
        assert found.status_code == status
        assert content in (None, found.content)
    assert "Traceback" not in caplog.text


def test_a_connection_closed_just_as_a_request_is_sent_costs_nothing() -> None:
    async def answer_once(replica: FakeReplica, asked: Asked, writer: Writer) -> bool:
        if writer in used:
            reset(writer)
            return True
        used.add(writer)
        await say_who(replica, asked, writer)
        return False

    used = set[Writer]()
    with routed(answer_once) as (url, [replica]):
        wait_for_ready(url, 1)
        for _ in range(5):
            assert httpx.post(f"{url}{CHAT}", json=chat()).json() == {"replica": replica.port}
        assert re.search(r"retries_total{.*} [^0]", httpx.get(f"{url}/metrics").text) is None


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            CHAT,
            b'data: {"error":{"message":"the server that was answering was lost","type":"server_error",'
            b'"param":null,"code":"engine_lost"}}\n\ndata: [DONE]\n\n',
        ),
        (
            "/v1/messages",
            b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":'
            b'"the server that was answering was lost"}}\n\n',
        ),
        (
            "/v1/responses",
            b'event: error\ndata: {"type":"error","code":"engine_lost","message":'
            b'"the server that was answering was lost","param":null,"sequence_number":1}\n\n',
        ),
    ],
)
def test_a_stream_that_breaks_off_ends_with_an_error_in_the_form_of_its_api(path: str, expected: bytes) -> None:
    async def break_off(replica: FakeReplica, asked: Asked, writer: Writer) -> bool:
        _begin_events(writer)
        await replica.go.wait()
        return True

    with routed(break_off) as (url, [replica]), httpx.stream("POST", f"{url}{path}", json=chat()) as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == b"data: 1\n\n"
        replica.let_go()
        assert b"".join(pieces) == expected


@pytest.mark.parametrize("kind", ["whole", "within an event"])
def test_any_other_answer_that_breaks_off_has_no_end_for_the_client_either(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def break_off(replica: FakeReplica, asked: Asked, writer: Writer) -> bool:
        if kind == "whole":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{")
        else:
            _begin_events(writer, b"data: 1\n\ndata: ")
        await replica.go.wait()
        return True

    with routed(break_off) as (url, [replica]), httpx.stream("POST", f"{url}{CHAT}", json=chat()) as answer:
        pieces = answer.iter_raw()
        assert next(pieces)
        replica.let_go()
        with pytest.raises(httpx.RemoteProtocolError):
            list(pieces)
    assert "an answer broke off" in caplog.text
    assert "ERROR" not in [each.levelname for each in caplog.records]


def test_requests_wait_a_moment_for_a_replica_that_is_started_again() -> None:
    with routed(say_who) as (url, [replica]):
        wait_for_ready(url, 1)
        replica.die()
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503)
        with _connect(url) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            replica.listen()
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_without_a_ready_replica_a_request_is_refused_with_a_time_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "MAX_WAIT_SECONDS", 0.1)
    with routed(say_who) as (url, [replica]):
        wait_for_ready(url, 1)
        replica.state = {"status": "overloaded"}
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503)
        assert 'keepsight_router_refusals_total{code="no_replica"} 0\n' in httpx.get(f"{url}/metrics").text
        found = httpx.get(f"{url}/v1/models")
        assert (found.status_code, found.json()["error"]["code"]) == (503, "no_replica")
        assert found.headers["retry-after"]
        assert 'keepsight_router_refusals_total{code="no_replica"} 1\n' in httpx.get(f"{url}/metrics").text


@pytest.mark.parametrize(
    "said", [b"SSH-2.0-OpenSSH_9\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<p/>", b"", None]
)
def test_what_is_no_keepsight_server_gets_no_requests(said: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with socket.create_server(("127.0.0.1", 0)) as other, fakes(say_who) as [replica]:
        port = other.getsockname()[1]
        if said is None:
            other.close()
        with routing(f"http://127.0.0.1:{port}", replica.address) as own:
            if said is not None:
                with other.accept()[0] as connection:
                    connection.recv(1000)
                    connection.sendall(said)
            wait_until(lambda: "is unready" in caplog.text)
            url = f"http://127.0.0.1:{own}"
            wait_for_ready(url, 1)
            assert httpx.get(f"{url}/v1/models").json() == {"replica": replica.port}


# Clients --------------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_ends_its_request_at_the_replica() -> None:
    async def answer_for_ever(replica: FakeReplica, asked: Asked, writer: Writer) -> bool:
        if asked.target == CHAT:
            _begin_events(writer)
        replica.told.set()
        await replica.wait_until_left(writer)
        left.append(asked.target)
        return True

    left: list[str] = []
    with routed(answer_for_ever) as (url, [replica]):
        for target in (CHAT, "/v1/completions"):
            replica.told.clear()
            with _connect(url) as connection:
                connection.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" % target.encode())
                assert replica.told.wait(30)
                if target == CHAT:
                    assert connection.recv(1000)
            wait_until(lambda: left[-1:] == [target])  # noqa: B023
        wait_until(lambda: f'in_flight{{replica="{replica.address}"}} 0\n' in httpx.get(f"{url}/metrics").text)


def test_an_answer_that_its_client_does_not_read_stays_at_the_replica() -> None:
    async def answer_hugely(replica: FakeReplica, asked: Asked, writer: Writer) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for number in range(size // 2**20):
            writer.write(bytes([number]) * 2**20)
            await writer.drain()
            sent.append(number)
        return False

    size, sent = 2**27, list[int]()
    with routed(answer_hugely) as (url, _), _connect(url) as connection:
        connection.sendall(b"GET /v1/files/x/content HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert connection.recv(10)
        for _ in range(50):  # the router works meanwhile
            httpx.get(f"{url}/health")
        assert len(sent) < 64
        num_read = 0
        while piece := connection.recv(2**20):
            num_read += len(piece)
        assert num_read > size - 10


def test_running_answers_may_finish_as_the_router_shuts_down() -> None:
    with fakes(_stream_two) as [replica], ExitStack() as router:
        port = router.enter_context(routing(replica.address))
        with httpx.stream("POST", f"http://127.0.0.1:{port}{CHAT}", json=chat()) as answer:
            pieces = answer.iter_raw()
            assert next(pieces) == b"data: 1\n\n"
            ending = threading.Thread(target=router.close)
            ending.start()
            wait_until(lambda: _is_refused(port))
            replica.let_go()
            assert b"".join(pieces) == b"data: 2\n\n"
        ending.join()


def _is_refused(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=0.2)
    except httpx.TransportError:
        return True
    return False


def test_those_that_do_not_finish_in_time_are_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    with fakes(_stream_two) as [replica], ExitStack() as router:
        port = router.enter_context(routing(replica.address, shutdown_seconds=0.1))
        with httpx.stream("POST", f"http://127.0.0.1:{port}{CHAT}", json=chat()) as answer:
            pieces = answer.iter_raw()
            assert next(pieces)
            router.close()
            with pytest.raises(httpx.RemoteProtocolError):
                list(pieces)
    assert "Traceback" not in caplog.text


# The whole ------------------------------------------------------------------------------------------------------


def test_a_reset_goes_to_all_and_the_worst_status_is_answered() -> None:
    async def refuse(replica: FakeReplica, asked: Asked, writer: Writer) -> None:
        writer.write(respond({}, 401))

    with routed(say_who, refuse, say_who) as (url, replicas):
        wait_for_ready(url, 3)
        assert httpx.post(f"{url}/reset_mm_cache").status_code == 401
        assert [[asked.target for asked in replica.asked] for replica in replicas] == [["/reset_mm_cache"]] * 3


def test_the_paths_of_resets_are_the_servers() -> None:
    assert RESET_PATHS == ADMIN_PATHS


def test_what_a_replica_held_is_forgotten_only_as_it_resets_its_caches() -> None:
    async def refuse_resets(replica: FakeReplica, asked: Asked, writer: Writer) -> None:
        writer.write(respond({"replica": replica.port}, status if "reset" in asked.target else 200))

    def choose() -> str:
        httpx.post(f"{url}{CHAT}", json=chat(PICTURE))
        return "media" if f'chosen_by="media"}} {len(chosen) + 1}\n' in httpx.get(f"{url}/metrics").text else "load"

    status = 401
    with routed(refuse_resets) as (url, _):
        wait_for_ready(url, 1)
        httpx.post(f"{url}{CHAT}", json=chat(PICTURE))
        chosen = list[str]()
        for path, status in (("/reset_mm_cache", 401), ("/reset_nothing", 200), ("/reset_mm_cache", 200)):  # noqa: B007
            httpx.post(f"{url}{path}")
            chosen.append(choose())
        assert chosen == ["media", "media", "load"]


def test_a_reset_that_a_replica_is_lost_in_fails() -> None:
    with routed(say_who, die_before_the_head) as (url, _):
        wait_for_ready(url, 2)
        assert httpx.post(f"{url}/reset_mm_cache").status_code == 503


@pytest.mark.parametrize("said", [[1], {"data": 1}, {"data": [{}], "has_more": False}, "<p/>"])
def test_what_is_no_list_of_uploads_is_an_error(said: object, caplog: pytest.LogCaptureFixture) -> None:
    async def answer(replica: FakeReplica, asked: Asked, writer: Writer) -> None:
        writer.write(respond(said))

    with routed(answer) as (url, _):
        wait_for_ready(url, 1)
        assert httpx.get(f"{url}/v1/files").status_code == 503
    assert "Traceback" not in caplog.text


def test_uploads_of_all_replicas_are_listed_as_one_page() -> None:
    def lists(*ids: str, has_more: bool = False) -> Any:
        async def answer(replica: FakeReplica, asked: Asked, writer: Writer) -> None:
            uploads = [{"id": f"media_{each}"} for each in ids]
            writer.write(
                respond({"object": "list", "data": uploads, "first_id": None, "last_id": None, "has_more": has_more})
            )

        return answer

    with routed(lists("9", "2"), lists("7", "1")) as (url, replicas):
        wait_for_ready(url, 2)
        page = httpx.get(f"{url}/v1/media?limit=3").json()
        assert [each["id"] for each in page["data"]] == ["media_9", "media_7", "media_2"]
        assert (page["first_id"], page["last_id"], page["has_more"]) == ("media_9", "media_2", True)
        assert replicas[0].asked[-1].target == "/v1/media?limit=3"


def test_the_router_answers_for_itself_what_concerns_each_server() -> None:
    with routed(say_who) as (url, [replica]):
        wait_for_ready(url, 1)
        for path in ("/dashboard", "/debug/state"):
            found = httpx.get(f"{url}{path}")
            assert found.status_code == 404
            assert "of its own" in found.json()["error"]["message"]
        assert httpx.get(f"{url}/health").json() == {"status": "ok", "replicas": 1, "ready": 1}
        assert not replica.asked


def test_bodies_have_the_limit_of_the_router() -> None:
    with routed(say_who, max_body_bytes=1000) as (url, [replica]):
        assert httpx.post(f"{url}{CHAT}", content=b"a" * 1001).status_code == 413
        assert not replica.asked
