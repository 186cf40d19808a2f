"""The flags of the HTTP side of a server, parsed into `ApiSettings`."""

import argparse
import math
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from keepsight.api_settings import ApiSettings
from keepsight.certificate import load_certificate, warn_of_dates
from keepsight.cli.check_arguments import check_is_text, check_minimums
from keepsight.config import MOST_GIB
from keepsight.errors import InvalidArgumentError

DEFAULTS = ApiSettings()
KEY_VARIABLE, ADMIN_KEY_VARIABLE = "KEEPSIGHT_API_KEY", "KEEPSIGHT_ADMIN_API_KEY"
PASSWORD_VARIABLE = "KEEPSIGHT_SSL_KEYFILE_PASSWORD"
# Plain HTTP would be served to someone who meant to encrypt.
NEEDS_CERTIFICATE = "needs --ssl-certfile"
MIB = 2**20


def add_api_arguments(parser: argparse.ArgumentParser) -> None:
    _add_access(parser.add_argument_group("access"))
    _add_http(parser.add_argument_group("HTTP"))
    add_limits(parser.add_argument_group("request limits"))
    _add_uploads(parser.add_argument_group("uploads and stored responses"))


def add_tls_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificates, in PEM; enables HTTPS")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="their private key, if it is in another file")
    group.add_argument(
        "--ssl-keyfile-password", metavar="PASSWORD", help=f"password of the private key (also {PASSWORD_VARIABLE})"
    )


def add_body_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-body-mb",
        type=float,
        default=DEFAULTS.max_body_bytes / MIB,
        help="largest request body, in MiB (default: %(default)g)",
    )
    group.add_argument(
        "--slow-client-timeout",
        type=float,
        default=DEFAULTS.slow_client_seconds,
        help="seconds that a client may take for the TLS handshake and for its headers, or may pause while sending "
        "or receiving (default: %(default)g)",
    )


def _add_access(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY",
        help=f"keys, of which callers must send one (also {KEY_VARIABLE}, which other users of the machine cannot see)",
    )
    group.add_argument(
        "--admin-api-key",
        metavar="KEY",
        help=f"key for resetting caches, /debug/ and the dashboard (also {ADMIN_KEY_VARIABLE}; default: no key, but "
        "only from the server's own machine)",
    )
    group.add_argument(
        "--cache-isolation",
        choices=("none", "api-key"),
        default=DEFAULTS.cache_isolation,
        help="api-key: callers with different keys share no cache (default: none)",
    )
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        action="extend",
        default=[],
        metavar="ORIGIN",
        help="origins of web pages that may send requests (CORS), such as https://a.example.org, or '*' (default: only "
        "the server's own)",
    )


def _add_http(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dashboard-thumbnails",
        action="store_true",
        help="show administrators at /dashboard the pictures in the processor cache",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="where to export each request as OpenTelemetry spans, by OTLP over HTTP (without a path: /v1/traces); "
        "needs the extra 'otel'",
    )
    add_tls_arguments(group)
    group.add_argument(
        "--root-path", default="", metavar="PATH", help="path prefix that a proxy removes, such as /keepsight"
    )
    group.add_argument(
        "--log-requests",
        action=argparse.BooleanOptionalAction,
        default=DEFAULTS.log_requests,
        help="log a line for each request (default: yes)",
    )


def add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trust-request-mm-processor-kwargs",
        action="store_true",
        help="let a request's mm_processor_kwargs change what a picture costs or how it is resized (pan_and_scan_*, "
        "resample), not only do_pan_and_scan",
    )
    group.add_argument(
        "--max-waiting-requests",
        type=int,
        default=DEFAULTS.max_waiting_requests,
        help="requests per frontend whose answers have not begun; more are refused at once with 503 "
        "(default: %(default)d)",
    )
    add_body_arguments(group)


def _add_uploads(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--media-quota-mb",
        type=float,
        default=DEFAULTS.media_quota_bytes / MIB,
        help="MiB of uploaded pictures (POST /v1/media) that the callers of one key may keep, 0: none "
        "(default: %(default)g)",
    )
    group.add_argument(
        "--media-quota-count",
        type=int,
        default=DEFAULTS.media_quota_count,
        help="number of uploaded pictures that the callers of one key may keep (default: %(default)d)",
    )
    group.add_argument(
        "--response-quota-mb",
        type=float,
        default=DEFAULTS.response_quota_bytes / MIB,
        help="MiB of responses and their inputs, stored for each key to be continued by previous_response_id, 0: none "
        "(default: %(default)g)",
    )


def api_settings_from(arguments: argparse.Namespace) -> ApiSettings:
    _check_numbers(arguments)
    names = arguments.served_model_name or []
    if not all(name.strip() for name in names):
        # As with keys: an unset shell variable must not leave the model without the name that clients ask for.
        raise InvalidArgumentError("--served-model-name", "must not be empty")
    settings = ApiSettings(
        more_model_names=tuple(names[1:]),
        adapter_parents={
            each["name"]: each["base_model_name"] for each in arguments.lora_modules if "base_model_name" in each
        },
        api_keys=tuple(_keys_of(arguments.api_key)),
        admin_api_key=_admin_key_of(arguments.admin_api_key),
        cache_isolation=arguments.cache_isolation,
        allowed_origins=tuple(map(_as_browsers_send, arguments.allowed_origins)),
        root_path=arguments.root_path.rstrip("/"),
        dashboard_thumbnails=arguments.dashboard_thumbnails,
        otlp_traces_endpoint=_read_traces_endpoint(arguments.otlp_traces_endpoint),
        log_requests=arguments.log_requests,
        trust_request_mm_processor_kwargs=arguments.trust_request_mm_processor_kwargs,
        max_waiting_requests=arguments.max_waiting_requests,
        media_quota_bytes=_to_bytes(arguments.media_quota_mb, "--media-quota-mb"),
        media_quota_count=arguments.media_quota_count,
        response_quota_bytes=_to_bytes(arguments.response_quota_mb, "--response-quota-mb"),
        **_http_settings_from(arguments),
    )
    _check(settings)
    return settings


def router_settings_from(arguments: argparse.Namespace) -> ApiSettings:
    """Return the settings of a server that has only the flags of TLS and of bodies."""
    _check_numbers(arguments)
    settings = ApiSettings(**_http_settings_from(arguments))
    _check_certificate(settings)
    return settings


def _http_settings_from(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "ssl_certfile": _absolute(arguments.ssl_certfile),
        "ssl_keyfile": _absolute(arguments.ssl_keyfile),
        "ssl_keyfile_password": _password_of(arguments),
        "max_body_bytes": _to_bytes(arguments.max_body_mb, "--max-body-mb"),
        "slow_client_seconds": arguments.slow_client_timeout,
    }


def _to_bytes(megabytes: float, option: str) -> int:
    if megabytes > MOST_GIB * 1024:
        raise InvalidArgumentError(option, f"must be at most {MOST_GIB * 1024}, not {megabytes:g}")
    return int(megabytes * MIB)


def _keys_of(given: list[str]) -> list[str]:
    """Return the keys of the flag, or else those in the environment variable, separated by commas."""
    if given or KEY_VARIABLE not in os.environ:
        return _check_keys(given, "--api-key")
    keys = [key for key in os.environ[KEY_VARIABLE].split(",") if key.strip()]
    if not keys:
        raise InvalidArgumentError(KEY_VARIABLE, "is set in the environment, but holds no key")
    return _check_keys(keys, KEY_VARIABLE)


def _check_keys(keys: list[str], source: str) -> list[str]:
    """Return the keys as headers carry them; refuse what none can carry, and without showing it.

    An empty key is refused, too: an unset shell variable (`--api-key "$UNSET"`) must not leave the server open.
    """
    keys = [key.strip() for key in keys]
    if not all(keys):
        raise InvalidArgumentError(source, "must not be empty")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise InvalidArgumentError(source, "must be printable ASCII: clients send other characters in different ways")
    return keys


def _admin_key_of(given: str | None) -> str | None:
    """Return the key of the flag, or else the whole value of the variable: a part of it would be easier to guess."""
    key, source = given, "--admin-api-key"
    if key is None:
        key, source = os.environ.get(ADMIN_KEY_VARIABLE), ADMIN_KEY_VARIABLE
    return None if key is None else _check_keys([key], source)[0]


def _password_of(arguments: argparse.Namespace) -> str | None:
    """Return the private key's password of the flag, or else the variable's; an empty variable holds none."""
    given: str | None = arguments.ssl_keyfile_password
    if given is not None or not (password := os.environ.get(PASSWORD_VARIABLE)):
        return given
    check_is_text(password, PASSWORD_VARIABLE)
    if arguments.ssl_certfile is None:
        raise InvalidArgumentError(PASSWORD_VARIABLE, NEEDS_CERTIFICATE)
    return password


def _as_browsers_send(origin: str) -> str:
    """Origins are compared as text; browsers send them in lower case, and without the default port."""
    origin = origin.lower()
    default_port = {"http": ":80", "https": ":443"}.get(origin.partition(":")[0], "")
    return origin.removesuffix(default_port)


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def _check_numbers(arguments: argparse.Namespace) -> None:
    check_minimums(
        arguments, {"max_waiting_requests": 1, "media_quota_count": 1, "media_quota_mb": 0, "response_quota_mb": 0}
    )
    for flag, value in (
        ("--max-body-mb", arguments.max_body_mb),
        ("--slow-client-timeout", arguments.slow_client_timeout),
    ):
        if not 0 < value < math.inf:
            raise InvalidArgumentError(flag, f"must be above 0, not {value}")


def _check(settings: ApiSettings) -> None:
    if settings.cache_isolation == "api-key" and not settings.api_keys:
        raise InvalidArgumentError("--cache-isolation", "api-key needs --api-key")
    if settings.admin_api_key in settings.api_keys:
        raise InvalidArgumentError("--admin-api-key", "must differ from every --api-key")
    if settings.root_path and not re.fullmatch(r"(/[\w.~-]+)+", settings.root_path, re.ASCII):
        raise InvalidArgumentError("--root-path", f"must be a path such as /keepsight, not {settings.root_path!r}")
    for origin in settings.allowed_origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise InvalidArgumentError(
                "--allowed-origins",
                f"must be like https://a.example.org, or *, with spaces between several, not {origin!r}",
            )
    _check_certificate(settings)


def _check_certificate(settings: ApiSettings) -> None:
    """Check the certificate and its key, before a model is loaded."""
    certfile, keyfile = settings.ssl_certfile, settings.ssl_keyfile
    if certfile is None:
        for flag, value in (("--ssl-keyfile", keyfile), ("--ssl-keyfile-password", settings.ssl_keyfile_password)):
            if value is not None:
                raise InvalidArgumentError(flag, NEEDS_CERTIFICATE)
        return
    keyfile = keyfile or certfile
    for flag, file in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        try:
            Path(file).read_bytes()
        except OSError as error:
            raise InvalidArgumentError(flag, f"cannot be read: {error}") from error
    try:
        context = load_certificate(settings)
    except (OSError, ValueError) as error:  # does not say which file is at fault
        reason = f"has no certificate for the private key in {keyfile}, or the key has another password"
        raise InvalidArgumentError("--ssl-certfile", f"{reason}: {error}") from error
    warn_of_dates(context, settings)


def _read_traces_endpoint(endpoint: str | None) -> str | None:
    """Check the endpoint; a URL without a path gets the usual one, as in OpenTelemetry's own variable."""
    if endpoint is None:
        return None
    try:
        url = urlsplit(endpoint)
    except ValueError:
        url = urlsplit("")
    if url.scheme not in ("http", "https") or not url.netloc:
        raise InvalidArgumentError("--otlp-traces-endpoint", f"must be an http or https URL, not {endpoint!r}")
    try:
        is_there = find_spec("opentelemetry.exporter.otlp.proto.http") and find_spec("opentelemetry.sdk")
    except ModuleNotFoundError:
        is_there = None
    if not is_there:
        raise InvalidArgumentError("--otlp-traces-endpoint", "needs OpenTelemetry: pip install 'keepsight[otel]'")
    return endpoint if url.path.strip("/") else url._replace(path="/v1/traces").geturl()
