"""Authorities that the environment names and that cannot be read are reported, as OpenSSL says nothing."""

from pathlib import Path

import pytest

from keepsight.authorities import report_unreadable_authorities

CERTIFICATE = Path(__file__).parent / "frontend" / "pictures_test.pem"


def test_authorities_of_the_environment_that_cannot_be_read_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "empty.pem").touch()
    for variable, named, unreadable in (
        ("SSL_CERT_FILE", [CERTIFICATE], []),
        ("SSL_CERT_FILE", [tmp_path / "nowhere.pem"], [tmp_path / "nowhere.pem"]),
        ("SSL_CERT_FILE", [tmp_path / "empty.pem"], [tmp_path / "empty.pem"]),
        ("SSL_CERT_DIR", [tmp_path, tmp_path / "nowhere", CERTIFICATE], [tmp_path / "nowhere", CERTIFICATE]),
    ):
        caplog.clear()
        with monkeypatch.context() as patched:
            patched.setenv(variable, ":".join(map(str, named)))
            report_unreadable_authorities()
        assert len(caplog.messages) == len(unreadable)
        for line, path in zip(caplog.messages, unreadable, strict=True):
            assert line.startswith(f"{variable}: no authorities can be read from {path}: ")
