"""Flags of `keepsight serve` that are in a file."""

import argparse
from pathlib import Path

import pytest

from keepsight.cli import serve
from keepsight.cli.main import main

EVERYTHING = """
model: /srv/model
port: 8001
served_model_name: [a, b]
enable-prefix-caching: false
log-requests: true
enforce-eager: false
enable-mm-embeds: true
max-model-len: 8K
limit-mm-per-prompt: {image: 3}
allowed-media-domains: [example.org, example.com]
lora-modules: [sql=/srv/sql, {name: b, path: /srv/b}]
prefix-disk-cache: true
gpu-memory-utilization: 0.5
"""


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """What `serve` was told, each time."""
    heard: list[argparse.Namespace] = []

    def run(arguments: argparse.Namespace) -> int:
        heard.append(arguments)
        return 0

    monkeypatch.setattr(serve, "run", run)
    return heard


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "flags.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_says_what_its_flags_would_say(tmp_path: Path, parsed: list[argparse.Namespace]) -> None:
    assert main(["serve", "--config", write(tmp_path, EVERYTHING)]) == 0
    typed = ["serve", "/srv/model", "--port", "8001", "--served-model-name", "a", "b", "--no-enable-prefix-caching"]
    typed += [
        "--log-requests",
        "--enable-mm-embeds",
        "--max-model-len",
        "8192",
        "--limit-mm-per-prompt",
        '{"image": 3}',
    ]
    typed += ["--allowed-media-domains", "example.org", "example.com", "--prefix-disk-cache"]
    typed += ["--gpu-memory-utilization", "0.5", "--lora-modules", "sql=/srv/sql", '{"name": "b", "path": "/srv/b"}']
    assert main(typed) == 0
    from_file, from_words = ({**vars(each), "config": None} for each in parsed)
    assert from_file == from_words


def test_values_are_the_words_as_they_are_written(tmp_path: Path, parsed: list[argparse.Namespace]) -> None:
    # YAML reads these as the numbers 83, 754 and 1.1, and as a date.
    text = "api-key: 0123\nserved-model-name: [12:34, 1.10, 2026-01-01]"
    assert main(["serve", "--config", write(tmp_path, text)]) == 0
    assert parsed[0].api_key == ["0123"]
    assert parsed[0].served_model_name == ["12:34", "1.10", "2026-01-01"]


def test_typed_flags_replace_the_file_s_wherever_they_stand(tmp_path: Path, parsed: list[argparse.Namespace]) -> None:
    path = write(tmp_path, EVERYTHING)
    # The port is the default, but typed; lists are not joined.
    more = ["--port", "8000", "--allowed-media-domains", "a.org", "--enable-prefix-caching"]
    main(["serve", "/other", "--config", path, *more])
    main(["serve", "/other", *more, "--config", path])
    for each in parsed:
        assert (each.model, each.port, each.allowed_media_domains) == ("/other", 8000, ["a.org"])
        assert (each.enable_prefix_caching, each.served_model_name) == (True, ["a", "b"])


def test_an_empty_file_says_nothing(tmp_path: Path, parsed: list[argparse.Namespace]) -> None:
    main(["serve", "--config", write(tmp_path, "# port: 8001\n")])
    main(["serve"])
    assert {**vars(parsed[0]), "config": None} == vars(parsed[1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ports: 8001", "unrecognized arguments: --ports; --ports: is not an option; did you mean --port?"),
        ("tensor-parallel-size: 2", "does not exist: an engine uses one device"),
        ("unknown: false", "unrecognized arguments: --unknown"),
        ("help: true", "unrecognized arguments: --help"),
        ("config: other.yaml", "unrecognized arguments: --config"),
        ("port: http", "argument --port: invalid int value: 'http'"),
        ("port: true", "port: cannot be true"),
        ("port: false", "port: cannot be false"),
        ("port: [1, 2]", "port: cannot be [1, 2]"),
        ("port:", "port: cannot be empty"),
        ("no-log-requests: no way", "argument --log-requests/--no-log-requests: ignored explicit argument 'no way'"),
        ("model: [a, b]", 'model: cannot be ["a", "b"]'),
        ("model: --log-requests", "model: cannot begin with a dash"),
        ("served-model-name: [a, --port=9]", "served-model-name: cannot begin with a dash"),
        ("served-model-name: []", "argument --served-model-name: expected at least one argument"),
        ("dtype: float8", "argument --dtype: invalid choice: 'float8'"),
        ("- port", "must have lines such as `port: 8001`"),
        ("port=5: 7", "port=5: is not an option"),
        ("port: 5\nseed: 1\nport: 6", "is not YAML: port is given twice"),
        ("port: [", "is not YAML: while parsing"),
    ],
)
def test_what_is_wrong_is_told_with_the_file_s_name(
    text: str, message: str, tmp_path: Path, parsed: list[argparse.Namespace], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, text)
    assert main(["serve", "--config", path]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"keepsight serve: {path}: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_file_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: cannot be read: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["chat"], ["run-batch", "-i", "a", "-o", "b"], ["route", "--ray", "1", "--"]])
def test_other_commands_have_no_such_file(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*words, "--config", "flags.yaml"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --config" in capsys.readouterr().err
