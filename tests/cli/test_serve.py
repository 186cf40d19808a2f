"""A real `keepsight serve`, queried with the official client."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from keepsight.cli import serve
from keepsight.cli.listen import listen
from keepsight.errors import InvalidArgumentError, ServerStartError
from tests.drawn import Drawn, ask, by_url, draw, list_question
from tests.frontend.sample_documents import Page, write_pdf
from tests.official_client import answer, complete, connect
from tests.place import LEEWAY
from tests.precomputed import by_embeds, embed, embed_tokens, to_npy, to_text
from tests.real_server import COMMAND


@pytest.fixture(scope="module")
def client(server_port: int) -> Iterator[openai.OpenAI]:
    with connect(server_port) as client:
        yield client


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return draw(7)


def test_the_official_client_gets_right_answers_about_a_drawn_picture(client: openai.OpenAI, drawn: Drawn) -> None:
    expected_answers = {question.text: question.answer for question in drawn.questions[:4]}
    assert {text: answer(client, ask(by_url(drawn.picture), text)) for text in expected_answers} == expected_answers


def test_texts_and_pictures_are_returned_as_vectors(client: openai.OpenAI, drawn: Drawn) -> None:
    create: Any = client.embeddings.create
    embeddings = [create(model="keepsight-demo", input=["A red circle", "A blue square"]) for _ in range(2)]
    first, again = ([each.embedding for each in body.data] for body in embeddings)
    np.testing.assert_allclose(again, first, atol=LEEWAY, rtol=0)
    assert first[0] != first[1]
    messages = ask(by_url(drawn.picture), "What is it?")
    bodies = [create(model="keepsight-demo", input=None, extra_body={"messages": messages}) for _ in range(2)]
    first, again = (body.data[0].embedding for body in bodies)
    np.testing.assert_allclose(again, first, atol=LEEWAY, rtol=0)
    assert bodies[1].usage.prompt_tokens_details["cached_tokens"] > 0


def test_image_embeds_are_answered_like_the_picture(client: openai.OpenAI, drawn: Drawn) -> None:
    [values] = embed(drawn.picture)
    question, part = drawn.questions[0], by_embeds(to_npy(values))
    assert answer(client, ask(part, question.text)) == question.answer
    again = complete(client, ask(part, question.text)).usage
    assert again.prompt_tokens_details.cached_tokens == again.prompt_tokens - 1
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, ask(question.text, by_embeds(to_npy(values[1:]))))
    assert (refused.value.param, refused.value.code) == (
        "messages[0].content[1].image_embeds", "image_embeds_refused"
    )  # fmt: skip


def test_prompt_embeds_are_continued_like_the_prompt(client: openai.OpenAI) -> None:
    token_ids = list(range(20, 60))
    create: Any = client.completions.create
    terms: Any = {"model": "keepsight-demo", "temperature": 0, "max_tokens": 8}
    body = {"prompt_embeds": to_text(to_npy(embed_tokens(token_ids)))}
    # The client requires a `prompt`.
    embedded, again = (create(prompt="", extra_body=body, **terms) for _ in range(2))
    assert embedded.choices[0].text == create(prompt=token_ids, **terms).choices[0].text == again.choices[0].text
    assert embedded.usage.prompt_tokens == 40
    assert (embedded.usage.prompt_tokens_details.cached_tokens, again.usage.prompt_tokens_details.cached_tokens) == (
        0,
        39,
    )
    with pytest.raises(openai.BadRequestError) as refused:
        create(prompt="Hello", extra_body=body, **terms)
    assert (refused.value.param, refused.value.code) == ("prompt_embeds", "invalid_argument")


def test_several_pictures_are_distinguished(client: openai.OpenAI) -> None:
    drawings = [draw(seed) for seed in (1, 2, 3)]
    question = list_question(drawings)
    assert answer(client, ask(*(by_url(each.picture) for each in drawings), question.text)) == question.answer


def test_a_conversation_continues_with_the_client_s_own_message_object(client: openai.OpenAI, drawn: Drawn) -> None:
    messages: list[Any] = ask(by_url(drawn.picture), drawn.questions[0].text)
    first = complete(client, messages).choices[0].message
    assert first.content == drawn.description
    colour = next(question for question in drawn.questions if question.kind == "colour")
    messages += [first.model_dump(), {"role": "user", "content": colour.text}]
    assert answer(client, messages) == colour.answer


def test_a_streamed_answer_equals_the_whole_one_and_counts_its_tokens(client: openai.OpenAI, drawn: Drawn) -> None:
    messages = ask(by_url(drawn.picture), drawn.questions[0].text)
    complete(client, messages)  # makes the prompt known to the caches
    whole = complete(client, messages)
    chunks = list(complete(client, messages, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content == drawn.description
    assert sum(bool(piece) for piece in pieces) > 3
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens_details.image_tokens == 16


def test_a_predicted_answer_is_the_same_and_its_tokens_are_counted(client: openai.OpenAI, drawn: Drawn) -> None:
    create: Any = client.chat.completions.create
    terms: Any = {"model": "keepsight-demo", "temperature": 0, "messages": ask(by_url(drawn.picture), "Describe it.")}
    answer = create(**terms).choices[0].message.content
    predicted = create(**terms, prediction={"type": "content", "content": answer})
    assert predicted.choices[0].message.content == answer
    details = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert details.rejected_prediction_tokens < details.accepted_prediction_tokens


def test_a_pdf_is_uploaded_once_and_asked_about_by_its_id(client: openai.OpenAI) -> None:
    document = write_pdf(Page(["A report"]), Page(["of two pages"]))
    file = client.files.create(
        file=("a.pdf", document), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (file.filename, file.bytes, file.status) == ("a.pdf", len(document), "processed")
    assert client.files.wait_for_processing(file.id) == file
    assert file in list(client.files.list(purpose="user_data"))
    messages: Any = [{"role": "user", "content": [{"type": "input_file", "file_id": file.id}]}]
    create: Any = client.responses.create
    first, again = (create(model="keepsight-demo", input=messages, max_output_tokens=1, store=False) for _ in range(2))
    assert again.output_text == first.output_text
    assert again.usage.input_tokens_details.cached_tokens == first.usage.input_tokens - 1
    assert client.files.content(file.id).read() == document
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_concurrent_questions_are_all_answered_correctly(server_port: int) -> None:
    drawings = [draw(seed) for seed in range(1, 7)]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server_port}/v1", api_key="none") as client:
            return list(await asyncio.gather(*(ask_one(client, each) for each in drawings)))

    async def ask_one(client: openai.AsyncOpenAI, drawn: Drawn) -> str:
        create: Any = client.chat.completions.create
        stream = await create(
            model="keepsight-demo",
            messages=ask(by_url(drawn.picture), drawn.questions[0].text),
            temperature=0,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask_all()) == [each.description for each in drawings]


def test_a_disconnected_client_does_not_delay_others(client: openai.OpenAI) -> None:
    endless = {"max_tokens": None, "n": 32, "extra_body": {"ignore_eos": True}}
    with complete(client, ask("Hello"), stream=True, **endless) as stream:
        next(iter(stream))
    # This request and the first one would each generate 64,000 tokens.
    with pytest.raises(openai.APITimeoutError):
        complete(client, ask("Hello"), timeout=0.5, **endless)
    assert complete(client, ask("Hello"), max_tokens=1, timeout=20).usage.completion_tokens == 1


def test_caller_errors_are_the_official_client_s_exceptions(client: openai.OpenAI, drawn: Drawn) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, ask(by_url(drawn.picture), "What?"), temperature=-1)
    assert (refused.value.param, refused.value.code) == ("temperature", "invalid_argument")
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, ask({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}))
    assert (refused.value.param, refused.value.code) == ("messages[0].content[0].image_url.url", "picture_unreadable")
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, ask("word " * 3000))
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        complete(client, ask("Hello"), model="gpt-4o")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")


def test_the_client_finds_the_model(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "keepsight-demo"
    assert client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_port_in_use_is_reported_in_one_line_before_the_model_is_loaded(server_port: int) -> None:
    done = subprocess.run([*COMMAND, "serve", "--port", str(server_port)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith(f"keepsight serve: --port: cannot listen on 127.0.0.1:{server_port}: Address already in use")


def test_too_few_open_files_are_reported_in_one_line_before_anything_is_started() -> None:
    limited = ["sh", "-c", 'ulimit -n 24; exec "$@"', "sh", *COMMAND, "serve", "--port", "0"]
    done = subprocess.run(limited, capture_output=True, text=True)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("keepsight serve: only 24 files may be open (`ulimit -n`): a server needs 64")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
def test_the_ipv6_wildcard_address_accepts_ipv4_too() -> None:
    with listen("::", 0) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=20).close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
def test_an_ipv6_address_may_be_given_in_brackets_as_in_urls() -> None:
    with listen("[::1]", 0) as listener:
        assert listener.getsockname()[0] == "::1"


def test_on_a_machine_without_ipv4_the_default_address_s_refusal_names_ipv6_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(InvalidArgumentError, match=r"^--host: cannot listen on 127\.0\.0\.1:0: .* --host ::1\)"):
        listen("127.0.0.1", 0)
    with pytest.raises(InvalidArgumentError, match=r"^--host: cannot listen on 192\.0\.2\.1:0: .* address$"):
        listen("192.0.2.1", 0)


def test_the_address_that_was_found_is_listened_on_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link-local address has the number of its network interface, too."""
    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 0, 0, 7))]
    bound: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "create_server", lambda address, **_: bound.append(address))
    listen("fe80::1%eth0", 0)
    assert bound == [("fe80::1", 0, 0, 7)]


def test_a_system_that_refuses_what_zeromq_must_do_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As systemd's SystemCallFilter=~@resources does: ZeroMQ would abort the engine."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    serve._check_scheduling_is_allowed()
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with pytest.raises(ServerStartError, match="sched_setscheduler is refused"):
        serve._check_scheduling_is_allowed()


INTERRUPTED_SERVER = """
import os, shutil, sys
from keepsight.cli import serve
from keepsight.cli.main import main

choose_size_and_mode, rmtree = serve.choose_size_and_mode, shutil.rmtree

def interrupted_choose_size_and_mode(*arguments, run_directory, **options):
    print(run_directory.path)
    os.kill(os.getpid(), int(sys.argv[1]))
    return choose_size_and_mode(*arguments, run_directory=run_directory, **options)

def interrupted_rmtree(*arguments, **options):
    os.kill(os.getpid(), int(sys.argv[1]))
    rmtree(*arguments, **options)

serve.choose_size_and_mode, shutil.rmtree = interrupted_choose_size_and_mode, interrupted_rmtree
sys.exit(main(["serve", "--port", "0"]))
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_while_the_run_directory_is_created_or_removed_leave_no_files(
    number: signal.Signals, status: int
) -> None:
    program = [sys.executable, "-c", INTERRUPTED_SERVER, str(int(number))]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert not Path(done.stdout.strip()).exists()
