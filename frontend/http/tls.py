"""Server certificate of the HTTPS port, reloaded when its files change."""

import logging
import math
import ssl
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
    """PEM files: the certificate with its chain, and its private key."""

    cert: Path
    key: Path


class Certificate:
    """Content of the certificate files, or their last valid content. Raises FrontendConfigError if they are invalid."""

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._seen = self._mark()
        self._context = _load(files)
        self._ends_s = _end_of(self._context, files)

    def left_s(self) -> float:
        """Return the seconds until the certificate expires: negative afterwards, NaN if unknown."""
        return self._ends_s - time.time()

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for a new connection."""
        seen = self._mark()
        if seen != self._seen:
            self._seen = seen  # a file may be half written: it is read again after its next change
            try:
                self._context = _load(self._files)
                self._ends_s = _end_of(self._context, self._files)
            except FrontendConfigError as error:
                _log.warning("keeping the previous HTTP certificate: %s", error)
            else:
                _log.info("new HTTP connections use the certificate now in %s", self._files.cert)
        return self._context

    def _mark(self) -> tuple[tuple[int, ...], ...]:
        return tuple(file_mark(path) for path in (self._files.cert, self._files.key))


def certificate_of(cert: Path | None, key: Path | None) -> Certificate | None:
    """Return the certificate, or None for plain HTTP. Raises FrontendConfigError."""
    return None if cert is None or key is None else Certificate(CertificateFiles(cert, key))


def _load(files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for name, path in (("--http-tls-cert", files.cert), ("--http-tls-key", files.key)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise FrontendConfigError(f"{name} {path} cannot be read: {error.strerror}; expected a PEM file") from error
    try:
        context.load_cert_chain(files.cert, files.key, password=lambda: _refuse_password(files))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise FrontendConfigError(
                f"--http-tls-key {files.key} does not match the certificate in --http-tls-cert {files.cert}: give the "
                "certificate's own key"
            ) from error
        raise FrontendConfigError(
            f"--http-tls-cert {files.cert} or --http-tls-key {files.key} is not valid PEM: {error}"
        ) from error
    except OSError as error:  # it was readable a moment ago
        raise FrontendConfigError(f"{files.cert} or {files.key} was removed while it was read") from error
    return context


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
    raise FrontendConfigError(f"--http-tls-key {files.key} is encrypted: expected a key without a password")
