"""TLS certificates of the cluster's hosts, for the messenger's TCP links and gRPC. Opens no connection.

Both sides of a connection send a certificate. It is accepted if the cluster's CA signed it and it carries the cluster's
name as a DNS name. Addresses are not checked, since hosts change them, and members are not distinguished, since each
may do everything in the cluster.

Certificates are replaced in place: the files are checked again for each new connection. Unusable files are skipped with
a warning, and the last good certificate stays in force.
"""

import contextlib
import functools
import logging
import math
import ssl
import stat
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rpc.errors import InvalidArgument
from settings.messenger import TlsSettings

_MAX_STEPS: Final = 32


def file_mark(path: Path) -> tuple[int, ...]:
    """Return a fingerprint that changes when the file may have changed; () if the file does not exist."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None = None) -> ssl.SSLObject:
    """Do a handshake between the two contexts in memory, and return the client's side. Raises ssl errors.

    `name` is the server name that the client expects.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(to_client, to_server, server_hostname=name)
    owner = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (caller, owner) * _MAX_STEPS:
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return caller


def certificate_end_s(connection: ssl.SSLObject) -> float:
    """Return the expiry of the verified peer certificate, in seconds since the epoch."""
    return float(ssl.cert_time_to_seconds(str((connection.getpeercert() or {})["notAfter"])))


DAY_S = 86400.0
EXPIRES_SOON_S = 14 * DAY_S

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of this node's certificate, its private key, and the CA that signs all nodes' certificates.

    `name` is the DNS name in every node's certificate.
    """

    cert: Path
    key: Path
    ca: Path
    name: str = "moonpool"

    @classmethod
    def of(cls, settings: TlsSettings) -> "TlsFiles | None":
        """Return the files named in the settings; None if traffic is not encrypted."""
        if settings.tls_cert is None or settings.tls_key is None or settings.tls_ca is None:
            return None
        return cls(settings.tls_cert, settings.tls_key, settings.tls_ca, settings.tls_name)


@dataclass(frozen=True)
class Material:
    """Validated contents of the files at one time."""

    name: str
    server: ssl.SSLContext
    client: ssl.SSLContext
    cert_pem: bytes
    key_pem: bytes
    ca_pem: bytes
    expires_s: float
    """Expiry of the certificate, in seconds since the epoch."""


class Identity:
    """This node's certificate, reloaded when its files change. Raises InvalidArgument for unusable files."""

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self._lock = threading.Lock()
        self._seen = _signature(files)
        self._warned_s = -math.inf
        self._material = load(files)
        _warn_of_open_key(files)
        self._warn_of_end(time.time())

    def material(self) -> Material:
        """Return the material for a new connection: the files' current contents, or the last usable ones."""
        with self._lock:
            seen = _signature(self.files)
            if seen != self._seen:
                self._renew(seen)
            self._warn_of_end(time.time())
            return self._material

    def left_s(self) -> float:
        """Return the seconds until the certificate expires; negative afterwards."""
        return self.material().expires_s - time.time()

    def _warn_of_end(self, now_s: float) -> None:
        """Warn once a day when the expiry is near; a process may run for months."""
        left_s = self._material.expires_s - now_s
        if left_s < EXPIRES_SOON_S and now_s - self._warned_s >= DAY_S:
            self._warned_s = now_s
            when = f"expires in {left_s / DAY_S:.1f} days" if left_s > 0 else "has expired: no connection can be made"
            _log.warning("the certificate in %s %s; replace it", self.files.cert, when)

    def _renew(self, seen: tuple[object, ...]) -> None:
        try:
            material = load(self.files)
        except InvalidArgument as error:
            # The file may be half written; it is read again after its next change.
            _log.warning("keeping the previous certificate: %s", error)
        else:
            self._material = material
            _log.info("new connections use the new certificate in %s", self.files.cert)
            _warn_of_open_key(self.files)
        self._seen = seen


@functools.cache
def identity(files: TlsFiles) -> Identity:
    """Return the process's identity, one for both planes. Raises InvalidArgument."""
    return Identity(files)


def load(files: TlsFiles) -> Material:
    """Read the files, and validate them by a handshake in memory. Raises InvalidArgument."""
    ca_pem = _read(files.ca, "tls_ca", b"CERTIFICATE-----")
    cert_pem = _read(files.cert, "tls_cert", b"CERTIFICATE-----")
    key_pem = _read(files.key, "tls_key", b"PRIVATE KEY-----")
    try:
        server, client = _context(files, server=True), _context(files, server=False)
    except FileNotFoundError as error:  # deleted since it was read
        raise InvalidArgument(f"{files.cert}, {files.key} or {files.ca} was deleted while it was read") from error
    expires_s = _check(files, server, client)
    return Material(files.name, server, client, cert_pem, key_pem, ca_pem, expires_s)


def carries(names: Iterable[str], name: str) -> bool:
    """Return True if `name` is among the DNS names, ignoring case."""
    return name.lower() in {own.lower() for own in names}


def dns_names(connection: ssl.SSLObject) -> list[str]:
    """Return the DNS names of the verified peer certificate."""
    certificate = connection.getpeercert() or {}
    alternatives = certificate.get("subjectAltName", ())
    return [str(entry[1]) for entry in alternatives if entry[0] == "DNS"]


def _signature(files: TlsFiles) -> tuple[object, ...]:
    return tuple(file_mark(path) for path in (files.cert, files.key, files.ca))


def _read(path: Path, key: str, mark: bytes) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"cannot read {key} {path}: {error.strerror}") from error
    if mark not in content:
        raise InvalidArgument(f"{key} {path} must contain a {mark.decode().strip('-').lower()} in PEM format")
    return content


def _context(files: TlsFiles, *, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # sessions are not resumed, and a caller that only writes would not read the tickets
    try:
        context.load_verify_locations(files.ca)
    except ssl.SSLError as error:
        raise InvalidArgument(f"tls_ca {files.ca} contains no valid certificate: {error}") from error
    try:
        context.load_cert_chain(files.cert, files.key, password=lambda: _refuse_password(files))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidArgument(
                f"tls_key {files.key} does not belong to the certificate in tls_cert {files.cert}: set both to files "
                "of the same key pair"
            ) from error
        raise InvalidArgument(f"tls_cert {files.cert} or tls_key {files.key} cannot be read: {error}") from error
    return context


def _refuse_password(files: TlsFiles) -> bytes:
    raise InvalidArgument(
        f"tls_key {files.key} must not be encrypted: decrypt it to a file that only this user can read "
        "(openssl pkey -in KEY -out KEY.plain)"
    )


def _check(files: TlsFiles, server: ssl.SSLContext, client: ssl.SSLContext) -> float:
    """Do a handshake in memory, and return the certificate's expiry in seconds since the epoch."""
    try:
        caller = shake_hands(server, client, files.name)
    except ssl.SSLCertVerificationError as error:
        raise InvalidArgument(_verdict(files, error.verify_message)) from error
    except (ssl.SSLError, ssl.CertificateError) as error:
        raise InvalidArgument(f"tls_cert {files.cert} cannot be used: {error}") from error
    if not carries(dns_names(caller), files.name):
        raise InvalidArgument(_verdict(files, "Hostname mismatch"))
    return certificate_end_s(caller)


def _verdict(files: TlsFiles, problem: str) -> str:
    if "mismatch" in problem:
        return (
            f"the certificate in tls_cert {files.cert} lacks the DNS name {files.name!r} of this cluster: "
            "issue it with that subjectAltName, or set tls_name to the name that it has"
        )
    if "expired" in problem or "not yet valid" in problem:
        return f"{problem}: tls_cert {files.cert} or tls_ca {files.ca}: issue a new one, or correct this host's clock"
    if "issuer" in problem or "self-signed" in problem:
        return (
            f"the certificate in tls_cert {files.cert} is not signed by the CA in tls_ca {files.ca} ({problem}): set "
            "tls_ca to the CA that signed it; intermediate certificates belong in tls_cert"
        )
    return f"the certificate in tls_cert {files.cert} cannot be used for both sides of a connection: {problem}"


def _warn_of_open_key(files: TlsFiles) -> None:
    with contextlib.suppress(FileNotFoundError):
        if files.key.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            _log.warning("other users of this machine can read the private key; run chmod 600 %s", files.key)
