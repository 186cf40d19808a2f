"""`keepsight route` before two real `keepsight serve`, with the official client."""

import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from keepsight.cli.main import main
from keepsight.demo import checkpoint_path
from tests.cli.test_serve_metrics import read_counter
from tests.drawn import Drawn, ask, by_url, draw, to_png
from tests.official_client import answer, complete, connect
from tests.real_server import END_SECONDS, routing, serving
from tests.wait_until import wait_until


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--replica: is needed"),
        (["--replica", "ftp://a"], "--replica: must be like http://10.0.0.1:8000, not"),
        (["--replica", "http://a/v1"], "--replica: must not have a path"),
        (["--replica", "http://a?b"], "--replica: must not contain a query"),
        (["--replica", "http://secret@a"], "--replica: must not contain credentials"),
        (["--replica", 'http://a"b'], "--replica: 'a\"b' is no name of a host"),
        (["--replica", "http://a", "--replica", "http://a:80"], "--replica: http://a:80 is given twice"),
        (
            ["--replica", "http://localhost:8123", "--port", "8123"],
            "--replica: http://localhost:8123 is the router's own",
        ),
        (["--replica", "http://a", "--max-body-mb", "0"], "--max-body-mb: must be above 0"),
        (["--replica", "http://a", "--ssl-keyfile", "a"], "--ssl-keyfile: needs --ssl-certfile"),
        (["--replica", "http://a", "--shutdown-timeout", "-1"], "--shutdown-timeout: must be at least 0"),
    ],
)
def test_flags_without_sense_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["route", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"keepsight route: {message}")
    assert "secret" not in line


def test_authorities_for_replicas_that_cannot_be_read_are_reported_at_the_start(tmp_path: Path) -> None:
    log, environment = tmp_path / "router", {"SSL_CERT_FILE": str(tmp_path / "nowhere.pem")}
    for scheme, is_reported in (("http", False), ("https", True)):
        with routing(log, f"{scheme}://127.0.0.1:1", environment=environment):
            assert ("SSL_CERT_FILE: no authorities can be read from " in log.read_text()) is is_reported


@dataclass(frozen=True)
class Pair:
    """Two servers behind a router."""

    port: int
    servers: list[subprocess.Popen[str]]
    urls: list[str]

    def count_encoded(self) -> float:
        return sum(read_counter(url, "media_encoded_total", modality="image") for url in self.urls)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("route")
    with ExitStack() as running:
        servers = [running.enter_context(serving(folder / f"server{number}")) for number in range(2)]
        urls = [f"http://127.0.0.1:{port}" for _, port in servers]
        process, port = running.enter_context(routing(folder / "router", *urls))
        wait_until(lambda: httpx.get(f"http://127.0.0.1:{port}/health").json()["ready"] == 2)
        yield Pair(port, [server for server, _ in servers], urls)
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_SECONDS) == 0
    assert not re.search("Traceback|does not serve the same", (folder / "router").read_text())


@pytest.fixture(scope="module")
def client(pair: Pair) -> Iterator[openai.OpenAI]:
    with connect(pair.port) as client:
        yield client


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return draw(7)


def test_a_picture_that_many_ask_about_is_encoded_once_in_all(pair: Pair, client: openai.OpenAI) -> None:
    drawn, before = draw(4711), pair.count_encoded()
    for question in drawn.questions[:6]:
        assert answer(client, ask(by_url(drawn.picture), question.text)) == question.answer
    assert pair.count_encoded() == before + 1


def test_pictures_are_spread_over_the_servers(pair: Pair, client: openai.OpenAI) -> None:
    for seed in range(20, 32):
        answer(client, ask(by_url(draw(seed).picture), "What is this?"), max_tokens=2)
    assert all(read_counter(url, "media_encoded_total", modality="image") for url in pair.urls)


def test_streams_pass(client: openai.OpenAI, drawn: Drawn) -> None:
    question = drawn.questions[0]
    chunks = complete(client, ask(by_url(drawn.picture), question.text), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == question.answer


def test_uploads_are_found_listed_and_deleted(client: openai.OpenAI, drawn: Drawn) -> None:
    uploads = [client.files.create(file=("a.png", to_png(draw(seed).picture)), purpose="vision") for seed in (7, 8)]
    parts: list[Any] = [{"type": "image", "media_id": each.id} for each in uploads]
    question = drawn.questions[0]
    assert answer(client, ask(parts[0], question.text)) == question.answer
    assert answer(client, ask(*parts, "What is in each picture?"), max_tokens=4)
    assert {each.id for each in client.files.list()} >= {each.id for each in uploads}
    assert [each.id for each in client.files.list(limit=1)][:2] == [uploads[1].id, uploads[0].id]
    for each in uploads:
        assert client.files.delete(each.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(uploads[0].id)


def test_a_kept_conversation_goes_on(client: openai.OpenAI, drawn: Drawn) -> None:
    create: Any = client.responses.create
    look = {"type": "input_image", "image_url": drawn.data_url, "detail": "auto"}
    first = create(model="keepsight-demo", input=[{"role": "user", "content": [look]}], max_output_tokens=8)
    for _ in range(3):
        second = create(model="keepsight-demo", input="And?", previous_response_id=first.id, max_output_tokens=4)
        assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output_text == first.output_text


def test_a_server_with_another_model_is_warned_of(pair: Pair, tmp_path: Path) -> None:
    other, log = tmp_path / "keepsight-demo", tmp_path / "router"
    shutil.copytree(checkpoint_path(), other)
    with (other / "config.json").open("a") as config:
        config.write("\n")
    with serving(tmp_path / "server", str(other)) as (_, port):
        url = f"http://127.0.0.1:{port}"
        with routing(log, pair.urls[0], url):
            wait_until(lambda: "does not serve the same" in log.read_text())
            warning = r"WARNING .*: (\S+) does not serve the same as (\S+): they differ in (.*)\. Each"
            said = re.findall(warning, log.read_text())
    assert [({first, second}, fields) for first, second, fields in said] == [({pair.urls[0], url}, "model, names")]


# The last, as one server is lost.
def test_every_caller_gets_its_answer_though_a_server_is_killed_under_load(pair: Pair, client: openai.OpenAI) -> None:
    drawings = [draw(seed) for seed in range(40, 52)]
    answers: dict[int, list[str]] = {number: [] for number in range(len(drawings))}

    def go_on_asking(number: int) -> None:
        drawn = drawings[number]
        for question in drawn.questions[:4]:
            answers[number].append(answer(client, ask(by_url(drawn.picture), question.text)))

    callers = [threading.Thread(target=go_on_asking, args=(number,)) for number in answers]
    for caller in callers:
        caller.start()
    wait_until(lambda: any(answers.values()))
    pair.servers[0].send_signal(signal.SIGKILL)
    for caller in callers:
        caller.join()
    expected = [[question.answer for question in drawn.questions[:4]] for drawn in drawings]
    assert list(answers.values()) == expected
    [ready] = {httpx.get(f"http://127.0.0.1:{pair.port}/health").json()["ready"]}
    assert ready == 1
