"""Server certificate of a port for clients, reloaded when its files change."""

import logging
import math
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from frontend.errors import FrontendConfigError
from rpc.tls import certificate_end_s, file_mark, shake_hands

_log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S: Final = 10.0
SHUTDOWN_TIMEOUT_S: Final = 2.0
_HAS_EXPIRED: Final = 10  # X509_V_ERR_CERT_HAS_EXPIRED


@dataclass(frozen=True)
class CertificateFiles:
    """PEM files: the certificate with its chain, and its private key.

    `flags` is the beginning of the flags that name them, for errors.
    """

    cert: Path
    key: Path
    flags: str = "--http-tls"


@dataclass(frozen=True)
class _Content:
    """Valid content of the files."""

    context: ssl.SSLContext
    cert_pem: bytes
    key_pem: bytes
    ends_s: float


class Certificate:
    """Content of the certificate files, or their last valid content. Raises FrontendConfigError if they are invalid.

    May be used by several threads.
    """

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._seen = self._mark()
        self._content = _load(files)

    def left_s(self) -> float:
        """Return the seconds until the certificate expires: negative afterwards, NaN if unknown."""
        return self._content.ends_s - time.time()

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for a new connection."""
        return self._current().context

    def pem(self) -> tuple[bytes, bytes]:
        """Return (private key, certificate with its chain) for a new connection."""
        content = self._current()
        return content.key_pem, content.cert_pem

    def _current(self) -> _Content:
        with self._lock:
            seen = self._mark()
            if seen != self._seen:
                self._seen = seen  # a file may be half written: it is read again after its next change
                try:
                    self._content = _load(self._files)
                except FrontendConfigError as error:
                    _log.warning("keeping the previous certificate: %s", error)
                else:
                    _log.info("new connections use the certificate now in %s", self._files.cert)
            return self._content

    def _mark(self) -> tuple[tuple[int, ...], ...]:
        return tuple(file_mark(path) for path in (self._files.cert, self._files.key))


def certificate_of(cert: Path | None, key: Path | None, flags: str = "--http-tls") -> Certificate | None:
    """Return the certificate; None without one, for no encryption. Raises FrontendConfigError."""
    return None if cert is None or key is None else Certificate(CertificateFiles(cert, key, flags))


def _load(files: CertificateFiles) -> _Content:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    cert_pem, key_pem = _read(f"{files.flags}-cert", files.cert), _read(f"{files.flags}-key", files.key)
    try:
        context.load_cert_chain(files.cert, files.key, password=lambda: _refuse_password(files))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise FrontendConfigError(
                f"{files.flags}-key {files.key} does not match the certificate in {files.flags}-cert {files.cert}: "
                "give the certificate's own key"
            ) from error
        raise FrontendConfigError(
            f"{files.flags}-cert {files.cert} or {files.flags}-key {files.key} is not valid PEM: {error}"
        ) from error
    except OSError as error:  # it was readable a moment ago
        raise FrontendConfigError(f"{files.cert} or {files.key} was removed while it was read") from error
    return _Content(context, cert_pem, key_pem, _end_of(context, files))


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FrontendConfigError(f"{flag} {path} cannot be read: {error.strerror}; expected a PEM file") from error


def _end_of(server: ssl.SSLContext, files: CertificateFiles) -> float:
    """Return the certificate's end in seconds since the epoch; 0 if it has expired, NaN if unknown.

    It is read in a TLS handshake with a client that trusts this certificate.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        client.load_verify_locations(files.cert)
        return certificate_end_s(shake_hands(server, client))
    except ssl.SSLCertVerificationError as error:
        return 0.0 if error.verify_code == _HAS_EXPIRED else math.nan
    except (OSError, KeyError, ValueError):
        return math.nan


def _refuse_password(files: CertificateFiles) -> bytes:
    raise FrontendConfigError(f"{files.flags}-key {files.key} is encrypted: expected a key without a password")
