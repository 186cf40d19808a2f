"""A certificate that is renewed while its server runs, file by file."""

import logging
import ssl
from pathlib import Path

import pytest

from keepsight.api_settings import ApiSettings
from keepsight.certificate import SECONDS_BETWEEN_LOOKS, Certificate
from tests.clock import Clock

# Each with its key.
OLD, NEW = (
    (Path(__file__).parent / "frontend" / name).read_text() for name in ("pictures_test.pem", "expired_test.pem")
)


class Renewed:
    """A certificate in two files that are written by hand, and looked at again at each `get`."""

    def __init__(self, folder: Path, certificate: str, key: str) -> None:
        self.cert, self.key, self.clock = folder / "cert.pem", folder / "key.pem", Clock()
        self.write(certificate, key)
        settings = ApiSettings(ssl_certfile=str(self.cert), ssl_keyfile=str(self.key))
        self.certificate = Certificate(settings, self.clock)

    def write(self, certificate: str, key: str) -> None:
        """Write new files, as whoever renews a certificate does."""
        for path, content in ((self.cert, certificate), (self.key, key)):
            fresh = path.with_suffix(".new")
            fresh.write_text(content)
            fresh.rename(path)

    def get(self) -> str | None:
        """Return the certificate that a new connection gets."""
        self.clock.now += SECONDS_BETWEEN_LOOKS
        context = self.certificate.get()
        return None if context is None else shown_by(context)


def shown_by(context: ssl.SSLContext) -> str:
    """Return the certificate that clients are shown, in PEM."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl._create_unverified_context().wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for end in (client, server, client):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    shown = client.getpeercert(binary_form=True)
    assert shown is not None
    return ssl.DER_cert_to_PEM_cert(shown)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_new_connections_get_a_renewed_certificate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    renewed = Renewed(tmp_path, OLD, OLD)
    before = renewed.get()
    assert before is not None
    assert before in OLD
    renewed.write(NEW, NEW)
    after = renewed.get()
    assert after is not None
    assert after in NEW
    assert "new connections get the certificate that is now in" in caplog.text


def test_files_are_looked_at_once_in_some_seconds_and_loaded_only_if_they_changed(tmp_path: Path) -> None:
    renewed = Renewed(tmp_path, OLD, OLD)
    context = renewed.certificate.get()
    renewed.write(NEW, NEW)
    assert renewed.certificate.get() is context
    renewed.clock.now += SECONDS_BETWEEN_LOOKS
    changed = renewed.certificate.get()
    assert changed is not context
    renewed.clock.now += SECONDS_BETWEEN_LOOKS
    assert renewed.certificate.get() is changed


@pytest.mark.parametrize("half", [(NEW, OLD), (OLD, NEW), ("", OLD)])
def test_until_a_renewed_certificate_is_whole_the_former_is_used_with_one_warning(
    half: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    renewed = Renewed(tmp_path, OLD, OLD)
    before = renewed.get()
    renewed.write(*half)
    assert [renewed.get() for _ in range(3)] == [before] * 3
    [warning] = warnings_in(caplog)
    assert warning.startswith(f"the certificate in {renewed.cert} and its key in {renewed.key} cannot be loaded")
    assert warning.endswith("the former ones are used")
    renewed.write(NEW, NEW)
    assert renewed.get() != before


def test_a_missing_key_leaves_the_former_certificate_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    renewed = Renewed(tmp_path, OLD, OLD)
    before = renewed.get()
    renewed.key.unlink()
    assert renewed.get() == renewed.get() == before
    assert len(warnings_in(caplog)) == 1


def test_a_certificate_that_does_not_fit_at_first_is_loaded_once_it_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    renewed = Renewed(tmp_path, NEW, OLD)
    assert [renewed.get(), renewed.get()] == [None, None]
    [warning] = warnings_in(caplog)
    assert warning.endswith("no connection is accepted yet")
    renewed.write(OLD, OLD)
    assert renewed.get() is not None


def test_a_renewed_certificate_that_has_expired_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    renewed = Renewed(tmp_path, OLD, OLD)
    renewed.get()
    assert not warnings_in(caplog)
    renewed.write(NEW, NEW)
    renewed.get()
    assert warnings_in(caplog) == [f"clients refuse the certificate in {renewed.cert}: certificate has expired"]
