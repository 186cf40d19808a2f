"""The command as a whole: its output streams and exit statuses."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from keepsight import __version__, demo
from keepsight.cli import main as main_module
from keepsight.cli import serve
from keepsight.cli.main import COMMANDS, main
from keepsight.errors import InvalidArgumentError
from keepsight.supervisor import ServerSettings
from tests.drawn import draw

# stat() fails on this path, as in a folder of another user's.
UNSEEN = "/" + "long" * 100
DEMO = str(demo.checkpoint_path())


def exit_status(arguments: Sequence[str]) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(["--version"]) == 0
    assert capsys.readouterr().out == f"keepsight {__version__}\n"


def test_help_names_and_describes_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(["--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {summary}" in words for name, summary in COMMANDS.items())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_its_options_without_torch(name: str) -> None:
    program = "import sys; from keepsight.cli.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program, name, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: keepsight {name}")
    # Or it lists subcommands, which have options of their own.
    assert done.stdout.count("\n  -") > 3 or "COMMAND" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["sreve"], "invalid choice: 'sreve'"),
        (["serve", "--prot", "5"], "unrecognized arguments: --prot"),
        (["serve", "--port", "70000", "--enable-mm"], "unrecognized arguments: --enable-mm"),
        (["cache", "inspect", "--rem", "redis://a"], "unrecognized arguments: --rem redis://a"),
        (["serve", "--port", "many"], "invalid int value: 'many'"),
        (["serve", "--dtype", "int4"], "invalid choice: 'int4'"),
        (["serve", "--block-size", "24"], "invalid choice: 24 (choose from 8, 16, 32, 64, 128)"),
        (["serve", "--max-num-seqs", "all"], "invalid int value: 'all'"),
        (["demo-picture"], "required: -o"),
        (["--loud", "serve"], "unrecognized arguments: --loud"),
    ],
)
def test_an_invalid_command_line_is_reported_in_one_line_and_exits_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    named = arguments[: 2 if arguments[:1] == ["cache"] else 1]
    command = " ".join(["keepsight", *(named if named[:1] and named[0] in COMMANDS else ())])
    assert captured.err.startswith(f"{command}: ")
    assert captured.err.endswith(f"(see {command} --help)\n")
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["serve", "--ports", "5"], "--ports: is not an option; did you mean --port?"),
        (["serve", "/model", "--max_model_len=100"], "did you mean --max-model-len?"),
        (["serve", "-tp", "2"], "-tp: does not exist: an engine uses one device"),
        (["serve", "--trust-remote-code"], "--trust-remote-code: is not needed: no code"),
        (["serve", "--disable-log-requests"], "--disable-log-requests: is --no-log-requests here"),
        (["serve", "--ctx-size", "4096"], "--ctx-size: is --max-model-len here"),
        (["generate", "Hello", "--trust-remote-code", "-c", "4"], "no code in the model's folder is run; -c: is --max"),
        (["generate", "Hello", "-m", "/model"], "of `keepsight serve` and LLM, and --model elsewhere"),
        (["chat", "--temprature", "0"], "did you mean --temperature?"),
        (["bench", "serve", "--max-token", "5"], "did you mean --max-tokens?"),
    ],
)
def test_an_unknown_flag_is_refused_with_what_to_do_instead(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(arguments) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "Hello", "--disable-log-requests"],  # --no-log-requests is an option of `serve`
        ["bench", "parts", "--context-length", "5"],
        ["bench", "compare", "one", "other", "--jsn"],  # whose help mentions --json of `bench serve`
    ],
)
def test_no_option_of_another_command_is_proposed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(arguments) == 2
    assert re.search(r"unrecognized arguments: [^;]*$", capsys.readouterr().err)


def test_a_command_without_a_model_explains_no_options_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(["bench", "serve", "--tokenizer", "x"]) == 2
    assert (
        capsys.readouterr().err
        == "keepsight bench serve: unrecognized arguments: --tokenizer x (see keepsight bench serve --help)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "--port", "70000"], "keepsight serve: --port: must be from 0 to 65535, not 70000"),
        (["serve", "--shutdown-timeout", "-1"], "keepsight serve: --shutdown-timeout: must be at least 0, not -1.0"),
        (["serve", "--watchdog-timeout", "-1"], "keepsight serve: --watchdog-timeout: must be at least 10, not -1.0"),
        (["serve", "--api-server-count", "0"], "keepsight serve: --api-server-count: must be at least 1, not 0"),
        (["serve", "--data-parallel-size", "0"], "keepsight serve: --data-parallel-size: must be at least 1, not 0"),
        (["serve", "/tmp/\udcff"], "keepsight serve: model: is not UTF-8"),
        (["serve", "--served-model-name", "a", "\udcff"], "keepsight serve: --served-model-name: is not UTF-8"),
        (["serve", "--encoder-disk-cache", "/tmp/\udcff"], "keepsight serve: --encoder-disk-cache: is not UTF-8"),
        (["serve", "--mm-processor-kwargs", "{"], "keepsight serve: --mm-processor-kwargs: is not JSON"),
        (["serve", "--mm-processor-kwargs", "[]"], "keepsight serve: mm_processor_kwargs: must be a dict, not []"),
        (["serve", "--max-model-len", "0"], "keepsight serve: max_model_len: must be an integer of at least 1, not 0"),
        (["serve", "--encoder-share", "2"], "keepsight serve: encoder_share: must be a number above 0 and below 1"),
        (
            ["serve", "--encoder-cache-gb", "1", "--encoder-cache-size", "1"],
            "keepsight serve: encoder_cache_size: sets the same as encoder_cache_gb in another unit",
        ),
        (
            ["generate", "Hi", "--device", "cpu", "--max-num-batched-tokens", "9"],
            "keepsight generate: max_num_batched_tokens: must be at least 16 + 0 = 16, not 9",
        ),
        (["serve", "--host", "a..b"], "keepsight serve: --host: 'a..b' is not an address of this machine: "),
        (
            ["serve", "--host", "no.such.host.invalid"],
            "keepsight serve: --host: 'no.such.host.invalid' is not an address",
        ),
        (["serve", "--host", "192.0.2.1"], "keepsight serve: --host: cannot listen on 192.0.2.1:8000: Cannot assign"),
        (["serve", "--host", "*"], "keepsight serve: --host: '*' is not an address: :: or 0.0.0.0 means all"),
        (["serve", "--host", "fe80::1"], "keepsight serve: --host: "),
        (["serve", "--port", "0", "no/such/model"], "keepsight serve: no/such/model: no such folder"),
        (
            ["serve", "--port", "0", "google/gemma-3-4b-it"],
            "keepsight serve: google/gemma-3-4b-it: no such folder; if that is its name on the Hugging Face Hub: hf ",
        ),
        (
            ["cache", "pin", "x.png", "--encoder-disk-cache", DEMO],
            f"keepsight cache: --encoder-disk-cache: {DEMO} looks like a model",
        ),
        (["generate", "Hi", "--model", "no/such"], "keepsight generate: no/such: no such folder"),
        (
            ["generate", "Hi", "--generation-config", "vllm"],
            "keepsight generate: vllm: cannot be read: generation_config must be auto, none, or an existing file or",
        ),
        (
            ["serve", "--allowed-local-media-path", UNSEEN],
            "keepsight serve: allowed_local_media_path: must be an existing, accessible fold",
        ),
        (["generate", "Hi", "--generation-config", UNSEEN], f"keepsight generate: {UNSEEN}: cannot be read: File name"),
        (["bench", "serve", "--json", UNSEEN], "keepsight bench: --json: "),
        (["demo-picture", "-o", "x.png", "--things", "9"], "keepsight demo-picture: --things: must be from 1 to 4"),
    ],
)
@pytest.mark.usefixtures("without_a_resolver")
def test_a_usage_error_is_one_line_on_standard_error_and_exit_status_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [message] = captured.err.splitlines()
    assert message.startswith(line)


@pytest.mark.parametrize("model", [DEMO, "google/gemma-3-4b-it", "/models/mistyped", "./mistyped/", "~/mistyped"])
@pytest.mark.parametrize(
    "values",
    [
        ["--api-key", "k"],
        ["--served-model-name", "a", "b"],
        ["--allowed-origins", "*"],
        ["--allowed-media-domains", "a.example.org"],
        ["--allowed-media-networks"],
    ],
)
def test_a_model_swallowed_by_a_multi_value_flag_is_reported(
    values: list[str], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    no_port = ["--port", "70000"]
    assert main(["serve", *no_port, *values, model]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"keepsight serve: {values[0]}: its last value looks like the model: put the model first"
    assert main(["serve", DEMO, *no_port, "--api-key", model]) == 2
    assert "--port: " in capsys.readouterr().err, "any key is allowed once a model is given"


@pytest.mark.parametrize("flag", ["--encoder-disk-cache", "--prefix-disk-cache"])
def test_a_model_swallowed_by_a_cache_s_flag_is_reported(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "70000", flag, "google/gemma-3-4b-it"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"keepsight serve: {flag}: google/gemma-3-4b-it looks like the model: put the model first")


@pytest.mark.parametrize(
    "values",
    [
        ["--api-key", "pQ/8x+Tq/4aJm0c5Y1Kf2LtB7w=="],
        ["--api-key", "do6KZrq1/4aJm0c5Y1Kf2LtB"],
        ["--served-model-name", "gemma"],
        ["--allowed-origins", "https://a.example.org"],
        ["--allowed-media-networks", "10.0.0.0/8"],
        ["--encoder-disk-cache", "/var/cache/keepsight:64G"],
        ["--encoder-disk-cache", "./some/cache"],
    ],
)
def test_values_that_are_no_model_are_not_taken_for_one(values: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "70000", *values]) == 2
    assert "--port: " in capsys.readouterr().err


@pytest.mark.parametrize(("models", "is_named"), [([], True), ([DEMO], False)])
def test_the_demo_is_named_if_it_is_served_because_no_model_is_given(
    models: list[str], is_named: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(serve, "Supervisor", lambda *_, **__: SimpleNamespace(run=lambda: 0))
    assert main(["serve", *models, "--port", "0", "--served-model-name", "gemma"]) == 0
    assert ("no model is given: the built-in demo is served" in caplog.text) == is_named


@pytest.mark.parametrize(("values", "seconds"), [([], None), (["0"], 0), (["90"], 90)])
def test_the_time_that_a_step_may_take_reaches_the_server(
    values: list[str], seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[ServerSettings] = []

    def supervise(settings: ServerSettings, *_: object, **__: object) -> SimpleNamespace:
        taken.append(settings)
        return SimpleNamespace(run=lambda: 0)

    monkeypatch.setattr(serve, "Supervisor", supervise)
    assert main(["serve", "--port", "0", *(f"--watchdog-timeout={value}" for value in values)]) == 0
    assert [settings.watchdog_seconds for settings in taken] == [seconds]


@pytest.mark.parametrize(
    ("outcome", "status"), [(None, 0), (InvalidArgumentError("--x", "is wrong"), 2), (KeyboardInterrupt(), 130)]
)
def test_the_exit_status_reflects_how_a_command_ended(
    outcome: BaseException | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_arguments: object) -> int:
        if outcome is not None:
            raise outcome
        return 0

    command = SimpleNamespace(add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(main_module, "import_module", lambda _name: command)
    assert main(["serve"]) == status


def test_ctrl_c_while_a_command_is_imported_exits_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "import_module", load)
    assert main(["serve"]) == 130


INTERRUPTED_BY_A_LIBRARY = """
import os, signal, sys
from keepsight.cli import main

# Shells ignore SIGINT for background jobs, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

def import_module(name):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))
    except BaseException:
        raise ImportError("numpy is broken")

main.import_module = import_module
sys.exit(main.main(["chat"]))
"""


def test_ctrl_c_exits_even_if_a_library_turns_it_into_an_import_error() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_BY_A_LIBRARY], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


INTERRUPTED_BY_TORCH = """
import os, signal, sys
from keepsight.cli.main import main

signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupting:
    @staticmethod
    def find_spec(name, *_):
        if name == "torch":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                sum(range(1000))
            except BaseException:
                raise ImportError("torch would have crashed")

sys.meta_path.insert(0, Interrupting)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "arguments", ["generate Hi", "cache warm x.png", "cache unpin x.png", "bench offline", "bench parts"]
)
def test_ctrl_c_while_torch_is_imported_ends_every_command(arguments: str, tmp_path: Path) -> None:
    draw(1).picture.save(tmp_path / "x.png")
    command = [sys.executable, "-c", INTERRUPTED_BY_TORCH, *arguments.split()]
    home = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=home)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_output_to_a_closed_pipe_exits_as_by_sigpipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "keepsight", "demo-picture", "-o", str(tmp_path / "x.png")]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    # The status that a shell reports for SIGPIPE.
    assert (done.returncode, done.stderr) == (141, "")
    assert (tmp_path / "x.png").exists()


@pytest.mark.parametrize("buffering", [[], ["-u"]])
def test_output_to_a_full_device_fails_with_one_line(buffering: Sequence[str], tmp_path: Path) -> None:
    command = [sys.executable, *buffering, "-m", "keepsight", "demo-picture", "-o", str(tmp_path / "x.png")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (1, "keepsight demo-picture: [Errno 28] No space left on device\n")


def test_an_internal_error_is_raised_and_not_reported_as_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    command = SimpleNamespace(add_arguments=lambda parser: None, run=lambda arguments: 1 // 0)
    monkeypatch.setattr(main_module, "import_module", lambda _name: command)
    with pytest.raises(ZeroDivisionError):
        main(["serve"])


def test_python_m_keepsight_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "keepsight", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"keepsight {__version__}\n")


@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1, 2)])
def test_standard_streams_need_not_be_open(closed: Sequence[int], tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom keepsight.cli.main import main\n"
        "status = main(['demo-picture', '-o', f'{sys.argv[1]}/x.png'])\n"
        "streams = [os.fstat(each).st_rdev for each in range(3)]\n"
        "open(f'{sys.argv[1]}/written', 'w').write(f'{status} {streams}')"
    )
    closing = " ".join(f"{each}>&-" for each in closed)
    subprocess.run(
        ["sh", "-c", f'exec {closing}; exec "$@"', "sh", sys.executable, "-c", program, tmp_path], check=True
    )
    status, _, streams = (tmp_path / "written").read_text().partition(" ")
    assert status == "0"
    null_device = Path(os.devnull).stat().st_rdev
    assert {json.loads(streams)[each] for each in closed} == {null_device}
