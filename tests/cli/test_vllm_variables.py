"""Environment variables that were set for vLLM."""

import argparse
import re

import pytest

from keepsight.cli import serve
from keepsight.cli.vllm_variables import EQUIVALENTS, warn_of_vllm_variables


def test_variables_of_vllm_are_named_with_their_equivalents(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_vllm_variables({"VLLM_USE_V1": "1", "VLLM_IMAGE_FETCH_TIMEOUT": "9", "VLLM_API_KEY": "secret", "PATH": ""})
    assert caplog.messages == [
        "these environment variables are ignored: VLLM_API_KEY (use KEEPSIGHT_API_KEY), "
        "VLLM_IMAGE_FETCH_TIMEOUT (use --media-fetch-timeout), VLLM_USE_V1"
    ]


def test_without_such_variables_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_vllm_variables({"PATH": "/", "KEEPSIGHT_API_KEY": "k"})
    assert not caplog.messages


def test_the_suggested_flags_exist() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    flags = set(re.findall(r"--[\w-]+", parser.format_help()))
    assert {name for name in EQUIVALENTS.values() if name.startswith("--")} <= flags


def test_ignored_variables_are_logged_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class EnoughError(Exception):
        pass

    def raise_enough(_arguments: argparse.Namespace) -> None:
        raise EnoughError

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    monkeypatch.setattr(serve, "config_from", raise_enough)
    with pytest.raises(EnoughError):
        serve.run(argparse.Namespace(model=None))
    assert "VLLM_CPU_KVCACHE_SPACE (use --kv-cache-memory-bytes)" in caplog.text
