"""A server's TLS certificate and its private key: loaded from their files together, and again when they are renewed.

Knows nothing of connections. Whoever renews a certificate writes two files, one after the other: until they fit again,
the former ones are used.
"""

import logging
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from keepsight.api_settings import ApiSettings

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_LOOKS = 5.0
# OpenSSL's codes.
_NOT_YET_VALID, _EXPIRED = 9, 10


def load_certificate(settings: ApiSettings) -> ssl.SSLContext:
    """Raise OSError or ValueError if the files cannot be read, or hold no key of the certificate."""
    assert settings.ssl_certfile is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Never None: OpenSSL would ask for the password at the terminal, where there may be no user.
    context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_keyfile_password or "")
    return context


class Certificate:
    def __init__(self, settings: ApiSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._context: ssl.SSLContext | None = None
        # What tells the files that were loaded from others; when to look again; the last reason not to load them.
        self._loaded: object = None
        self._look_at, self._complaint = float("-inf"), ""

    def get(self) -> ssl.SSLContext | None:
        """Return the context for a new connection; None as long as none could be loaded.

        Looks at the files only here, so that a server without new connections does nothing.
        """
        if (now := self._clock()) >= self._look_at:
            self._look_at = now + SECONDS_BETWEEN_LOOKS
            try:
                self._load_if_changed()
            except (OSError, ValueError) as error:
                self._complain(str(error))
        return self._context

    def _load_if_changed(self) -> None:
        # Before they are read: what changes meanwhile is loaded the next time.
        found = [_identify(each) for each in (self._settings.ssl_certfile, self._settings.ssl_keyfile) if each]
        if found != self._loaded:
            context = load_certificate(self._settings)
            if self._context is not None:
                warn_of_dates(context, self._settings)
                logger.info("new connections get the certificate that is now in %s", self._settings.ssl_certfile)
            self._context, self._loaded = context, found
        self._complaint = ""

    def _complain(self, reason: str) -> None:
        if reason != self._complaint:
            self._complaint = reason
            cert, key = self._settings.ssl_certfile, self._settings.ssl_keyfile or self._settings.ssl_certfile
            instead = "no connection is accepted yet" if self._context is None else "the former ones are used"
            logger.warning(
                "the certificate in %s and its key in %s cannot be loaded (%s): %s", cert, key, reason, instead
            )


def warn_of_dates(context: ssl.SSLContext, settings: ApiSettings) -> None:
    """Warn if the certificate has expired or is not yet valid. Python reads dates only as a client, so we are one."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(settings.ssl_certfile)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = client.wrap_bio(to_client, to_server)
    ours = context.wrap_bio(to_server, to_client, server_side=True)
    try:
        for end in (theirs, ours, theirs):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in (_NOT_YET_VALID, _EXPIRED):
            logger.warning("clients refuse the certificate in %s: %s", settings.ssl_certfile, error.verify_message)
    except ssl.SSLError:  # this client and the server have no algorithm in common; others may
        pass


def _identify(path: str) -> tuple[int, ...]:
    found = Path(path).stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
