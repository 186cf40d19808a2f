"""Flags and the environment become settings, or are refused by the flag's name."""

import argparse
from pathlib import Path

import pytest

from keepsight.api_settings import ApiSettings
from keepsight.cli import api_arguments, serve
from keepsight.cli.api_arguments import api_settings_from
from keepsight.errors import InvalidArgumentError

PEM = Path(__file__).parents[1] / "frontend" / "pictures_test.pem"
EXPIRED = PEM.with_name("expired_test.pem")


# Its key, encrypted with the password "secret".
ENCRYPTED_KEY = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAhe/2XxDNwFMQICA+gw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEOPbRcVucN0hX6V9et1WPt8EgZCC
sEa0Dqkp0yYm9PU1cXI3oK3ycstXEgSC8b7DbWBbQEuUkekXszyP3caindGOUtNZ
DBUGFOdvzRnIaarOSOhf1P/ZkIizKxldJLaD+CED10x9XMwxg5U2QJK86uXnSItF
cxAUB/OINBdNXHVonJ2GrAiivpMk8htflxzJxVk9t7DoXstadKndmgcFi2bphcM=
-----END ENCRYPTED PRIVATE KEY-----
"""


def read(*flags: str) -> ApiSettings:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return api_settings_from(parser.parse_args(flags))


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEEPSIGHT_API_KEY", "KEEPSIGHT_ADMIN_API_KEY", "KEEPSIGHT_SSL_KEYFILE_PASSWORD"):
        monkeypatch.delenv(name, raising=False)


def test_without_flags_the_settings_are_the_defaults() -> None:
    assert read() == ApiSettings()
    assert (read().media_quota_bytes, read().media_quota_count) == (256 << 20, 1000)


def test_flags_become_settings() -> None:
    typed = (
        "--served-model-name a b --api-key k1 k2 --admin-api-key k3 --cache-isolation api-key --max-body-mb 0.5 "
        "--allowed-origins https://a.example * --root-path /x/y/ --no-log-requests --max-waiting-requests 3 "
        f"--trust-request-mm-processor-kwargs --slow-client-timeout 1.5 --dashboard-thumbnails --ssl-certfile {PEM} "
        "--media-quota-mb 0.5 --media-quota-count 7 --response-quota-mb 0.25"
    )
    assert read(*typed.split()) == ApiSettings(
        more_model_names=("b",),
        api_keys=("k1", "k2"),
        admin_api_key="k3",
        cache_isolation="api-key",
        max_body_bytes=2**19,
        allowed_origins=("https://a.example", "*"),
        root_path="/x/y",
        log_requests=False,
        trust_request_mm_processor_kwargs=True,
        max_waiting_requests=3,
        slow_client_seconds=1.5,
        media_quota_bytes=2**19,
        media_quota_count=7,
        response_quota_bytes=2**18,
        dashboard_thumbnails=True,
        ssl_certfile=str(PEM),
    )


@pytest.mark.parametrize(
    ("typed", "sent"),
    [
        ("https://A.example.org", "https://a.example.org"),
        ("HTTPS://a.example.org:443", "https://a.example.org"),
        ("http://a.example.org:80", "http://a.example.org"),
        ("http://a.example.org:443", "http://a.example.org:443"),
        ("https://[::1]:8443", "https://[::1]:8443"),
        ("app://a.example.org:80", "app://a.example.org:80"),
    ],
)
def test_origins_are_compared_as_browsers_send_them(typed: str, sent: str) -> None:
    assert read("--allowed-origins", typed).allowed_origins == (sent,)


def test_uploads_and_responses_may_be_disabled() -> None:
    assert read("--media-quota-mb", "0").media_quota_bytes == 0
    assert read("--response-quota-mb", "0").response_quota_bytes == 0


def test_keys_come_from_the_environment_unless_given_by_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSIGHT_API_KEY", "k1, k2,")
    monkeypatch.setenv("KEEPSIGHT_ADMIN_API_KEY", "k3")
    assert (read().api_keys, read().admin_api_key) == (("k1", "k2"), "k3")
    assert read("--api-key", "other").api_keys == ("other",)


def test_the_administrator_s_key_may_have_commas_in_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSIGHT_ADMIN_API_KEY", "x,verysecret")
    assert read().admin_api_key == read("--admin-api-key", "x,verysecret").admin_api_key == "x,verysecret"


@pytest.mark.parametrize("flag", ["--api-key", "--admin-api-key"])
@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_refused(flag: str, key: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{flag}: must not be empty"):
        read(flag, key)


@pytest.mark.parametrize("key", [" k1", "k1\r", "k1\n"])
def test_white_space_around_a_key_is_dropped_as_from_a_header(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read("--api-key", key, "--admin-api-key", "k2 ").api_keys == ("k1",)
    monkeypatch.setenv("KEEPSIGHT_ADMIN_API_KEY", key)
    assert read().admin_api_key == "k1"


@pytest.mark.parametrize("flag", ["--api-key", "--admin-api-key"])
@pytest.mark.parametrize("key", ["\N{LATIN SMALL LETTER A WITH DIAERESIS}", "k\n1", "k\x7f1"])
def test_a_key_that_clients_cannot_send_is_refused(flag: str, key: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{flag}: must be printable ASCII"):
        read(flag, key)


@pytest.mark.parametrize("names", [("",), (" ",), ("a", "")])
def test_an_empty_name_of_the_model_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^--served-model-name: must not be empty"):
        read("--served-model-name", *names)


@pytest.mark.parametrize(
    ("value", "reason"), [("inf", "must be a finite number, not inf"), ("-1", "must be at least 0, not -1")]
)
def test_a_number_out_of_range_is_refused_for_what_is_wrong_with_it(value: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^--media-quota-mb: {reason}"):
        read("--media-quota-mb", value)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KEEPSIGHT_API_KEY", ""),
        ("KEEPSIGHT_API_KEY", " , "),
        ("KEEPSIGHT_ADMIN_API_KEY", ""),
        ("KEEPSIGHT_ADMIN_API_KEY", " "),
    ],
)
def test_a_variable_without_a_key_is_refused(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidArgumentError, match=f"^{variable}: "):
        read()


@pytest.mark.parametrize(
    ("collector", "endpoint"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://collector:4318?tenant=a", "http://collector:4318/v1/traces?tenant=a"),
        ("http://collector:4318/otlp", "http://collector:4318/otlp"),
    ],
)
def test_a_collector_url_without_a_path_gets_the_default_path(
    collector: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_arguments, "find_spec", lambda _name: "is installed")
    assert read("--otlp-traces-endpoint", collector).otlp_traces_endpoint == endpoint


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ("--cache-isolation api-key", "--cache-isolation"),
        ("--api-key k --admin-api-key k", "--admin-api-key"),
        ("--max-waiting-requests 0", "--max-waiting-requests"),
        ("--max-body-mb 0", "--max-body-mb"),
        ("--max-body-mb nan", "--max-body-mb"),
        ("--media-quota-mb -1", "--media-quota-mb"),
        ("--media-quota-mb nan", "--media-quota-mb"),
        ("--media-quota-count 0", "--media-quota-count"),
        ("--slow-client-timeout 0", "--slow-client-timeout"),
        ("--slow-client-timeout inf", "--slow-client-timeout"),
        ("--root-path keepsight", "--root-path"),
        ("--root-path /a//b", "--root-path"),
        ("--allowed-origins a.example", "--allowed-origins"),
        ("--allowed-origins https://a.example/", "--allowed-origins"),
        ("--ssl-keyfile k.pem", "--ssl-keyfile"),
        ("--ssl-keyfile-password p", "--ssl-keyfile-password"),
        ("--otlp-traces-endpoint collector:4318", "--otlp-traces-endpoint"),
        ("--otlp-traces-endpoint http://", "--otlp-traces-endpoint"),
        ("--otlp-traces-endpoint http://[::1", "--otlp-traces-endpoint"),
        ("--ssl-certfile missing.pem", "--ssl-certfile"),
        (f"--ssl-certfile {__file__}", "--ssl-certfile"),
        (f"--ssl-certfile {PEM} --ssl-keyfile missing.pem", "--ssl-keyfile"),
        (f"--ssl-certfile {PEM} --ssl-keyfile {__file__}", "--ssl-certfile"),
    ],
)
def test_invalid_options_are_refused_before_anything_starts(flags: str, flag: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read(*flags.split())
    assert caught.value.field == flag


def test_the_key_s_password_comes_from_the_environment_unless_given_by_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key.pem"
    key.write_text(ENCRYPTED_KEY)
    flags = ("--ssl-certfile", str(PEM), "--ssl-keyfile", str(key))
    for wrong in ((), ("--ssl-keyfile-password", "other"), ("--ssl-keyfile-password", "x" * 2000)):
        with pytest.raises(InvalidArgumentError, match=r"^--ssl-certfile: .* or the key has another password"):
            read(*flags, *wrong)
    monkeypatch.setenv("KEEPSIGHT_SSL_KEYFILE_PASSWORD", "secret")
    assert read(*flags).ssl_keyfile_password == "secret"
    monkeypatch.setenv("KEEPSIGHT_SSL_KEYFILE_PASSWORD", "other")
    assert read(*flags, "--ssl-keyfile-password", "secret").ssl_keyfile_password == "secret"


def test_origins_as_vllm_lists_them_are_refused_with_how_to_write_them() -> None:
    with pytest.raises(InvalidArgumentError, match=r"or \*, with spaces between several, not") as caught:
        read("--allowed-origins", '["*"]')
    assert caught.value.field == "--allowed-origins"


def test_a_password_of_the_environment_without_a_certificate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSIGHT_SSL_KEYFILE_PASSWORD", "")
    assert read().ssl_keyfile_password is None
    monkeypatch.setenv("KEEPSIGHT_SSL_KEYFILE_PASSWORD", "secret")
    with pytest.raises(InvalidArgumentError, match=r"^KEEPSIGHT_SSL_KEYFILE_PASSWORD: needs --ssl-certfile"):
        read()


def test_an_expired_certificate_is_warned_of_and_served(caplog: pytest.LogCaptureFixture) -> None:
    read("--ssl-certfile", str(PEM))
    assert not caplog.records
    assert read("--ssl-certfile", str(EXPIRED)).ssl_certfile == str(EXPIRED)
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning == f"clients refuse the certificate in {EXPIRED}: certificate has expired"


@pytest.mark.parametrize("option", ["--max-body-mb", "--media-quota-mb", "--response-quota-mb"])
def test_a_size_beyond_any_machine_is_refused_by_name(option: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^{option}: must be at most \d+, not 1e\+305"):
        read(option, "1e305")
