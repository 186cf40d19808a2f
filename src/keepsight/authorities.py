"""The certificate authorities that the environment names, which OpenSSL trusts in place of the system's."""

import logging
import os
import ssl
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)


def report_unreadable_authorities() -> None:
    """Log which of them cannot be read: OpenSSL says nothing of it, and trusts those that are left."""
    _report("SSL_CERT_FILE", [os.environ.get("SSL_CERT_FILE", "")], _read_file)
    _report("SSL_CERT_DIR", os.environ.get("SSL_CERT_DIR", "").split(os.pathsep), os.listdir)


def _report(variable: str, paths: Iterable[str], read: Callable[[str], object]) -> None:
    for path in filter(None, paths):
        try:
            read(path)
        except OSError as error:  # includes TLS errors
            logger.warning("%s: no authorities can be read from %s: %s", variable, path, error)


def _read_file(path: str) -> None:
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
