"""Encrypted tcp links: TLS 1.3 with certificates of both sides, by Python's ssl over memory buffers.

OpenSSL's object must not be used by two threads at once, but a link has one that sends and one that receives. So the
object works on memory buffers, and `_tls_lock` guards both; the lock is never held while a thread waits for the socket.
Received bytes are decrypted directly into their destination; sent bytes are encrypted directly from their views, after
joining small ones.
"""

import ssl
import struct
import threading
from collections.abc import Iterator, Sequence
from socket import MSG_DONTWAIT, SO_RCVLOWAT, SOL_SOCKET, socket

from messenger.errors import EncryptionRefused, ProtocolError
from messenger.frames import MAGIC, PREFIX, ConnectionReject, Frame, Message, decode_body, decode_prefix, encode
from messenger.link import LOW_WATER_MIN_NBYTES, BufferedLink, LinkClosed
from rpc.tls import Material, carries, dns_names

__all__ = ["TlsLink"]

_CHUNK_NBYTES = 128 << 10
_RECORD_NBYTES = 16 << 10
_QUICK_NBYTES = 68 << 10  # 64 KiB with their frame
# AES-GCM keys are safe for 2^24.5 records (RFC 8446, 5.5). Python cannot renew a key, but a stream can connect again.
MAX_RECORDS = 1 << 24


class TlsLink(BufferedLink):
    """Encrypted link, which owns `sock`. `open` must have succeeded before anything is sent or received."""

    def __init__(self, sock: socket, address: str, material: Material, *, caller: bool) -> None:
        super().__init__(sock, address)
        self._name = material.name
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context, name = (material.client, material.name) if caller else (material.server, None)
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not caller, server_hostname=name)
        self._tls_lock = threading.Lock()
        self._arrived = memoryview(bytearray(_CHUNK_NBYTES))
        self._is_shaking = self._is_open = False
        self._num_sent = 0
        self._rest = memoryview(b"")

    def open(self) -> None:
        """Do the TLS handshake.

        Raises EncryptionRefused if the other side does not use TLS, or has no certificate of the cluster.
        """
        while not self._shake():
            arrived = self._await_ciphertext()
            if not arrived:
                raise LinkClosed(f"{self.address} closed the connection during the TLS handshake")
            if not self._is_shaking and arrived[: len(MAGIC)] == MAGIC:
                raise self._plain_answer(bytes(arrived))
            self._is_shaking = True
            self._incoming.write(arrived)
        self._is_open = True
        names = dns_names(self._tls)
        if not carries(names, self._name):
            raise EncryptionRefused(
                f"the certificate of {self.address} is for {', '.join(names) or 'no DNS name'}, not for {self._name!r}"
            )

    def send(self, message: Message | Frame, views: Sequence[memoryview] = (), fd: int | None = None) -> None:
        """Send a frame, then the views' bytes. Raises OSError when cut, or when the key has been used up."""
        assert fd is None, "descriptors do not leave the host"
        if not self._is_open:
            self._reject_in_the_clear(message)
            return
        for chunk in _chunks([memoryview(encode(message)), *views]):
            self._sock.sendall(self._encrypted(chunk))

    def begin(self, frame: Frame, views: Sequence[memoryview] = ()) -> bool:
        """Send without blocking; large payloads are left to `finish`, because encrypting takes as long as sending."""
        pending = [memoryview(frame), *views]
        if sum(map(len, pending)) > _QUICK_NBYTES:
            return super().begin(frame, views)
        ciphertext = self._encrypted(b"".join(pending))
        try:
            sent = self._sock.send(ciphertext, MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        self._rest = memoryview(ciphertext)[sent:]
        return not self._rest

    def finish(self) -> None:
        if not self._rest:
            super().finish()
            return
        rest, self._rest = self._rest, memoryview(b"")
        self._sock.sendall(rest)

    def _encrypted(self, chunk: bytes | memoryview) -> bytes:
        self._num_sent += -(-len(chunk) // _RECORD_NBYTES)
        if self._num_sent > MAX_RECORDS:
            raise LinkClosed(f"the connection to {self.address} has used up its encryption key and is made again")
        with self._tls_lock:
            self._tls.write(chunk)
            return self._outgoing.read()

    def _shake(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except (ssl.SSLError, ssl.CertificateError) as error:
            raise self._refused(error) from error
        finally:
            # If the handshake failed, this is the alert with the reason for the other side.
            ciphertext = self._outgoing.read()
            if ciphertext:
                self._sock.sendall(ciphertext)
        return True

    def _reject_in_the_clear(self, message: Message | Frame) -> None:
        """Send a ConnectionReject unencrypted, to a caller that is rejected before the handshake or does not use TLS.

        Nothing else is ever sent unencrypted.
        """
        if self._is_shaking or not isinstance(message, ConnectionReject):
            raise LinkClosed(f"nothing can be sent to {self.address} before the TLS handshake is done")
        self._sock.sendall(encode(message))

    def _plain_answer(self, frame: bytes) -> Exception:
        """Return the error for an unencrypted frame.

        The frame is not authenticated, so all that it can do is make the caller try again.
        """
        try:
            kind, nbytes = decode_prefix(frame)
            message = decode_body(kind, frame[PREFIX.size : PREFIX.size + nbytes])
        except (ProtocolError, struct.error):  # too short for a prefix, perhaps
            message = None
        if isinstance(message, ConnectionReject) and message.code == "full":
            return LinkClosed(f"{self.address} rejected the connection: {message.reason}")
        return EncryptionRefused(
            f"{self.address} does not speak TLS, and the other side speaks nothing else: set tls_cert, tls_key and "
            "tls_ca on both sides, or on none"
        )

    def _await_ciphertext(self) -> memoryview:
        """Receive some bytes from the socket; returns none when the other side closed."""
        if self._until_s is not None and not self._is_cut:
            self._sock.settimeout(self._left_s(self._until_s))
        return self._arrived[: self._sock.recv_into(self._arrived)]

    def _receive_some(self, view: memoryview) -> int:
        while True:
            received = self._decrypted(view)
            if received:
                return received
            if not self._take_in():
                return 0

    def _receive_views(self, views: list[memoryview]) -> None:
        left = sum(map(len, views))
        asleep = left >= LOW_WATER_MIN_NBYTES
        if asleep:
            self._set_low_water_mark(_CHUNK_NBYTES)
        for view in views:
            while view:
                received = self._decrypted(view)
                view = view[received:]
                left -= received
                if asleep and left < 3 * _CHUNK_NBYTES:
                    # Up to one record of the rest may have arrived already. A receiving call first copies what is
                    # there, up to a chunk, and then sleeps until another whole chunk is there, so that must be left.
                    asleep = False
                    self._set_low_water_mark(1)
                if view and not self._take_in():
                    raise LinkClosed(f"{self.address} closed in the middle of a payload")

    def _decrypted(self, view: memoryview) -> int:
        """Decrypt what has arrived into the view. Returns the number of bytes."""
        filled = 0
        with self._tls_lock:
            try:
                while filled < len(view):
                    received: int = self._tls.read(len(view) - filled, view[filled:])  # type: ignore[assignment]  # typeshed: bytes
                    filled += received
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError as error:
                if not filled:
                    raise LinkClosed(f"{self.address} closed the connection") from error
            except ssl.SSLError as error:
                raise self._refused(error) from error
        return filled

    def _take_in(self) -> bool:
        """Receive more ciphertext from the socket. Returns False when the other side closed."""
        arrived = self._await_ciphertext()
        with self._tls_lock:
            self._incoming.write(arrived)
        return len(arrived) > 0

    def _set_low_water_mark(self, nbytes: int) -> None:
        """Set SO_RCVLOWAT: a thread that waits for ciphertext is woken when `nbytes` are there, or at the end."""
        self._sock.setsockopt(SOL_SOCKET, SO_RCVLOWAT, nbytes)

    def _refused(self, error: ssl.SSLError | ssl.CertificateError) -> EncryptionRefused:
        if isinstance(error, ssl.SSLCertVerificationError):
            return EncryptionRefused(f"the certificate of {self.address} is not accepted: {error.verify_message}")
        reason = str(getattr(error, "reason", "") or error)
        if "ALERT" in reason:
            alert = reason.partition("ALERT_")[2].replace("_", " ").lower()
            return EncryptionRefused(f"{self.address} does not accept this node's certificate: {alert}")
        if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
            return EncryptionRefused(f"{self.address} does not speak TLS ({reason.replace('_', ' ').lower()})")
        return EncryptionRefused(f"TLS with {self.address} failed: {reason.replace('_', ' ').lower()}")


def _chunks(views: Sequence[memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the same bytes in chunks of similar size, since one TLS record per small view would be expensive."""
    joined: list[memoryview] = []
    nbytes = 0
    for view in views:
        if nbytes + len(view) <= _CHUNK_NBYTES:
            joined.append(view)
            nbytes += len(view)
            continue
        if joined:
            yield b"".join(joined)
            joined, nbytes = [], 0
        whole = len(view) - len(view) % _CHUNK_NBYTES
        for start in range(0, whole, _CHUNK_NBYTES):
            yield view[start : start + _CHUNK_NBYTES]
        if whole < len(view):
            joined, nbytes = [view[whole:]], len(view) - whole
    if joined:
        yield b"".join(joined) if len(joined) > 1 else joined[0]
