"""`keepsight chat` with input from a pipe and from a terminal, and with a real server."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keepsight.cli.main import main
from tests.cli.scripted_server import DONE, Script, answer, event, scripted_server
from tests.drawn import draw, to_data_url
from tests.real_server import START_SECONDS

HELLO = {"role": "user", "content": "Hello"}


@pytest.fixture
def script() -> Iterator[Script]:
    with scripted_server(Script()) as script:
        yield script


class Terminal:
    """Types lines into the command and records its output."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str) -> None:
        self._monkeypatch, self._capsys, self._url = monkeypatch, capsys, url
        self.out = self.err = ""

    def type(self, *lines: str, options: tuple[str, ...] = ()) -> int:
        self._monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = main(["chat", "--url", self._url, *options])
        self.out, self.err = self._capsys.readouterr()
        return status


@pytest.fixture
def terminal(script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return Terminal(monkeypatch, capsys, script.url)


def test_answers_go_to_standard_output_and_timings_to_standard_error(terminal: Terminal) -> None:
    assert terminal.type("Hello", "", "Again") == 0
    assert terminal.out == "Hello!\nHello!\n"
    assert terminal.err.startswith("first at http://127.0.0.1:")
    assert terminal.err.count(" s in all, 3 tokens, 16 of 20 prompt tokens cached]\n") == 2
    assert terminal.err.count("[first token ") == 2


def test_a_truncated_answer_is_marked(terminal: Terminal, script: Script) -> None:
    cut = b'data: {"choices": [{"delta": {"content": "!"}, "finish_reason": "length"}]}\n\n'
    script.answers = [[event("Hello"), cut, DONE], answer("Hello")]
    assert terminal.type("Hello", "Hello") == 0
    assert terminal.out == "Hello!\nHello\n"
    assert terminal.err.count("cut at the token limit") == 1


def test_a_thought_goes_to_standard_error_and_not_into_the_conversation(terminal: Terminal, script: Script) -> None:
    thought = b'data: {"choices": [{"delta": {"reasoning_content": "Hm. ", "reasoning": "Hm. "}}]}\n\n'
    script.answers = [[thought, thought, *answer("Hello", "!")], [thought, DONE], answer("Fine.")]
    assert terminal.type("Hello", "And?", "How are you?") == 0
    assert terminal.out == "Hello!\nFine.\n"
    assert "\nHm. Hm. \n[first token " in terminal.err
    assert terminal.err.count("\nHm. \n[first token ") == 1
    answered = {"role": "assistant", "content": "Hello!"}
    assert script.messages == [HELLO, answered, {"role": "user", "content": "How are you?"}]


def test_the_whole_conversation_is_sent_with_every_message(terminal: Terminal, script: Script) -> None:
    script.answers = [answer("Hello", "!"), answer("Fine.")]
    terminal.type("Hello", "How are you?", options=("--system", "Be kind."))
    assert script.messages == [
        {"role": "system", "content": "Be kind."},
        HELLO,
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "How are you?"},
    ]


def test_attachments_are_sent_only_with_the_next_message(terminal: Terminal, script: Script, tmp_path: Path) -> None:
    picture = draw(7).picture
    picture.save(tmp_path / "my cat.png")
    url = to_data_url((tmp_path / "my cat.png").read_bytes())
    (tmp_path / "cat.webm").write_bytes(b"a film")
    (tmp_path / "cat.wav").write_bytes(b"a sound")
    shown = [f"/image {tmp_path}/my cat.png", "/image http://x/y.png", f"/video {tmp_path}/cat.webm"]
    shown.append(f"/audio {tmp_path}/cat.wav")
    terminal.type(*shown, "What is this?", "And now?")
    assert script.messages[0]["content"] == [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
        {"type": "video_url", "video_url": {"url": to_data_url(b"a film", "video/webm")}},
        {"type": "audio_url", "audio_url": {"url": to_data_url(b"a sound", "audio/x-wav")}},
        {"type": "text", "text": "What is this?"},
    ]
    assert script.messages[2] == {"role": "user", "content": "And now?"}
    assert "4 attached to the next message" in terminal.err


def test_only_given_options_are_sent_to_the_server(terminal: Terminal, script: Script) -> None:
    terminal.type("Hello")
    assert script.bodies[-1].keys() == {"model", "messages", "stream", "stream_options"}
    terminal.type("Hello", options=("--model", "second", "--temperature", "0", "--max-tokens", "9", "--api-key", "k"))
    assert {"model": "second", "temperature": 0, "max_tokens": 9}.items() <= script.bodies[-1].items()


@pytest.mark.parametrize("number", ["nan", "inf", "warm"])
def test_a_temperature_that_no_request_can_hold_is_refused_by_its_flag(
    number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["chat", "--temperature", number])
    assert f"--temperature: must be a finite number, not '{number}'" in capsys.readouterr().err


def test_a_key_may_come_from_the_environment(
    terminal: Terminal, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    terminal.type("Hello")
    assert script.authorizations == ["Bearer secret"] * 2  # for the model's name, and with the question


def test_clear_begins_a_new_conversation_without_pictures(terminal: Terminal, script: Script) -> None:
    terminal.type("One", "/image http://x/y.png", "/clear", "Two", options=("--system", "Be kind."))
    assert script.messages == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Two"}]


def test_a_saved_conversation_is_the_body_of_a_request(terminal: Terminal, tmp_path: Path) -> None:
    saved = tmp_path / "my chat.json"
    assert terminal.type("Hello", f"/save {saved}", options=("--temperature", "0")) == 0
    messages = [HELLO, {"role": "assistant", "content": "Hello!"}]
    assert json.loads(saved.read_text()) == {"model": "first", "messages": messages, "temperature": 0}


def test_help_names_every_command_and_quit_leaves(terminal: Terminal, script: Script) -> None:
    assert terminal.type("/help", "/quit", "Hello") == 0
    assert all(name in terminal.err for name in ("/image", "/clear", "/save", "/help", "/quit"))
    assert script.bodies == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/image missing.png", "error: /image: cannot read missing.png"),
        ("/image", "error: /image: needs"),
        ("/video missing.mp4", "error: /video: cannot read missing.mp4"),
        ("/save", "error: /save: needs a file"),
        ("/save no/such/folder/x", "error: /save: cannot write no/such/folder/x"),
        ("/sing", "error: /sing: is not a command; /help lists them"),
    ],
)
def test_a_mistake_is_reported_and_the_chat_continues(terminal: Terminal, line: str, message: str) -> None:
    assert terminal.type(line, "Hello") == 1
    assert message in terminal.err
    assert terminal.out == "Hello!\n"


def test_a_message_that_got_no_answer_is_removed_from_the_conversation(terminal: Terminal, script: Script) -> None:
    script.answers = [[b'data: {"error": {"message": "It broke."}}\n\n'], answer("Hello!")]
    assert terminal.type("/image http://x/y.png", "What is this?", "Hello") == 1
    assert "error: It broke.\n" in terminal.err
    assert script.messages == [HELLO]


def test_the_beginning_of_an_answer_that_broke_off_is_kept(terminal: Terminal, script: Script) -> None:
    script.answers = [[event("Hel")], answer("Hello!")]
    terminal.type("Hello", "Again")
    assert terminal.out == "Hel\nHello!\n"
    assert script.messages[:2] == [HELLO, {"role": "assistant", "content": "Hel"}]


def test_a_server_without_usage_counts_is_accepted(terminal: Terminal, script: Script) -> None:
    script.answers = [[event("Hello!"), DONE]]
    assert terminal.type("Hello") == 0
    assert terminal.err.endswith(" s in all]\n")


def test_control_characters_in_an_answer_do_not_reach_the_terminal(terminal: Terminal, script: Script) -> None:
    script.answers = [answer("\x1b[2Jred\x07\x9b1m\tand\nblue")]
    terminal.type("Hello")
    assert terminal.out == "[2Jred1m\tand\nblue\n"


def test_control_characters_in_an_error_do_not_reach_the_terminal(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.status, script.refusal = 500, b"\x1b[2Jno"
    assert main(["chat", "--url", script.url]) == 2
    assert capsys.readouterr().err == "keepsight chat: 500: [2Jno\n"


def test_without_a_server_the_error_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9/v1"]) == 2
    assert "keepsight chat: nothing answers at http://127.0.0.1:9/v1\n" in (error_output := capsys.readouterr().err)
    assert "`keepsight serve`" in error_output


def restore_sigint() -> None:
    """Restore the default handling of SIGINT: shells ignore it for background jobs, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def run_chat(url: str, stdin: int = subprocess.PIPE, encoding: str = "utf-8") -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "keepsight", "chat", "--url", url]
    with subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=restore_sigint,
        # Independent of the machine's locale: with the C locale, any bytes are accepted as text.
        env={**os.environ, "PYTHONIOENCODING": encoding},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_ctrl_c_stops_the_answer_but_not_the_chat(script: Script) -> None:
    script.is_endless, script.answers = True, [[event("Once")], [event("Twice"), DONE]]
    with run_chat(script.url) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write(b"Hello\n")
        chat.stdin.flush()
        assert chat.stdout.read(4) == b"Once"
        chat.send_signal(signal.SIGINT)
        assert script.client_left.wait(20)
        out, err = chat.communicate(b"Again\n", timeout=START_SECONDS)
    assert out == b"\nTwice\n"
    assert b"stopped]" in err
    assert script.messages[1] == {"role": "assistant", "content": "Once"}
    assert chat.returncode == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_treated_as_empty(closed: str, script: Script) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "keepsight", "chat", "--url", script.url]
    done = subprocess.run(command, input="" if "<" in closed else "Hello\n", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "Hello!\n" if closed == "2>&-" else "")
    assert "Traceback" not in done.stderr


def test_undecodable_input_is_reported_in_one_line(script: Script) -> None:
    with run_chat(script.url) as chat:
        out, err = chat.communicate(b"caf\xe9\n", timeout=START_SECONDS)
    assert (chat.returncode, out, script.bodies) == (2, b"", [])
    assert err.splitlines()[-1] == b"keepsight chat: standard input: is not utf-8: invalid continuation byte"
    assert b"Traceback" not in err


def test_with_surrogateescape_a_question_must_be_utf8_and_a_file_name_need_not(script: Script, tmp_path: Path) -> None:
    picture = bytes(tmp_path) + b"/caf\xe9.png"
    draw(1).picture.save(picture)
    with run_chat(script.url, encoding="utf-8:surrogateescape") as chat:
        out, err = chat.communicate(b"caf\xe9\n/image %b\nHello\n" % picture, timeout=START_SECONDS)
    assert (chat.returncode, out, len(script.bodies)) == (1, b"Hello!\n", 1)
    assert b"\nerror: standard input: is not UTF-8\n1 attached to the next message\n" in err


def test_the_system_message_must_be_utf8(terminal: Terminal, script: Script) -> None:
    assert terminal.type("Hello", options=("--system", "caf\udce9")) == 2
    assert terminal.err == "keepsight chat: --system: is not UTF-8\n"
    assert script.bodies == []


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "caf\u00e9"), ("utf-8", "half of a pair: \ud83d")])
def test_characters_that_standard_output_cannot_encode_do_not_end_the_conversation(
    script: Script, encoding: str, shown: str
) -> None:
    # Sent as JSON escapes, so that the stream itself is valid UTF-8.
    script.answers = [
        [json.dumps({"choices": [{"delta": {"content": shown}}]}).join(("data: ", "\n\n")).encode(), DONE]
    ]
    with run_chat(script.url, encoding=encoding) as chat:
        out, _err = chat.communicate(b"Hello\nAgain\n", timeout=START_SECONDS)
    assert out == 2 * (shown.encode(encoding, "backslashreplace") + b"\n")
    assert chat.returncode == 0


def test_a_terminal_is_prompted_for_lines_until_ctrl_d(script: Script) -> None:
    master, slave = pty.openpty()
    with run_chat(script.url, stdin=slave) as chat:
        os.close(slave)
        os.write(master, b"Hello\n\x04")
        out, err = chat.communicate(timeout=START_SECONDS)
    os.close(master)
    # Standard output may be redirected to a file while the user types.
    assert out == b"Hello!\n"
    assert err.count(b"> ") == 2
    assert chat.returncode == 0


@pytest.mark.parametrize(
    ("variable", "value", "is_dim"), [("TERM", "xterm", True), ("TERM", "dumb", False), ("NO_COLOR", "1", False)]
)
def test_notes_are_dim_only_on_a_terminal_with_colours_enabled(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, is_dim: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    terminal.type("/help")
    assert ("\x1b[2m/image" in terminal.err) == is_dim


def test_a_real_server_answers_correctly_and_caches_the_picture(
    server_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = draw(7)
    drawn.picture.save(tmp_path / "x.png")
    colour = next(question for question in drawn.questions if question.kind == "colour")
    terminal = Terminal(monkeypatch, capsys, f"http://127.0.0.1:{server_port}/v1")
    lines = f"/image {tmp_path}/x.png", drawn.questions[0].text, colour.text
    # With sampling, one answer in a hundred calls the small heart large.
    assert terminal.type(*lines, options=("--temperature", "0")) == 0
    assert terminal.out == f"{drawn.description}\n{colour.answer}\n"
    assert "keepsight-demo at" in terminal.err
    assert terminal.err.count("prompt tokens cached") == 2
