"""The certificate that clients are shown, read again when its files change. Opens no connection."""

import logging
import math
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from frontend.errors import ConfigError
from rpc.tls import certificate_end_s, file_mark, shake_hands

HANDSHAKE_TIMEOUT_S: Final = 10.0
SHUTDOWN_TIMEOUT_S: Final = 2.0
_HAS_EXPIRED: Final = 10  # X509_V_ERR_CERT_HAS_EXPIRED

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CertificateFiles:
    """PEM files: the certificate with what links it to a CA that clients know, and its private key."""

    cert: Path
    key: Path


class Certificate:
    """What is in the files, or was when they could last be used. Raises ConfigError for files that cannot be."""

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._seen = self._mark()
        self._context = _load(files)
        self._ends_s = _end_of(self._context, files)

    def left_s(self) -> float:
        """Until it ends; below 0 once it has, and not a number where that cannot be told."""
        return self._ends_s - time.time()

    def context(self) -> ssl.SSLContext:
        """For a new connection."""
        seen = self._mark()
        if seen != self._seen:
            self._seen = seen  # a file may be half written: it is looked at again once it has changed
            try:
                self._context = _load(self._files)
                self._ends_s = _end_of(self._context, self._files)
            except ConfigError as error:
                _log.warning("going on with the HTTP certificate from before: %s", error)
            else:
                _log.info("new HTTP connections are shown the certificate now in %s", self._files.cert)
        return self._context

    def _mark(self) -> tuple[tuple[int, ...], ...]:
        return tuple(file_mark(path) for path in (self._files.cert, self._files.key))


def certificate_of(cert: Path | None, key: Path | None) -> Certificate | None:
    """None where clients are spoken to in the clear. Raises ConfigError."""
    return None if cert is None or key is None else Certificate(CertificateFiles(cert, key))


def _load(files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for name, path in (("--http-tls-cert", files.cert), ("--http-tls-key", files.key)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"{name} {path} cannot be read: {error.strerror}; expected a PEM file") from error
    try:
        context.load_cert_chain(files.cert, files.key, password=lambda: _refuse_password(files))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"--http-tls-key {files.key} does not belong to the certificate in --http-tls-cert {files.cert}: name "
                "the two that were made together"
            ) from error
        raise ConfigError(
            f"--http-tls-cert {files.cert} or --http-tls-key {files.key} is no certificate and key in PEM: {error}"
        ) from error
    except OSError as error:  # since it was read just now
        raise ConfigError(f"{files.cert} or {files.key} has just been taken away") from error
    return context


def _end_of(server: ssl.SSLContext, files: CertificateFiles) -> float:
    """Seconds since the epoch, as a client finds it that trusts this very certificate; 0 if it has ended."""
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
    raise ConfigError(f"--http-tls-key {files.key} is encrypted, and nobody is there to give its password")
