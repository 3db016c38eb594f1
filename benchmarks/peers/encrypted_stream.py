"""Contender of benchmarks/messenger.py: the bound of an encrypted transport, AES-256-GCM over a Python socket stream.

As plain_stream.py, but each slice travels in records of up to 256 KiB, each encrypted by one call of OpenSSL's
libcrypto (the library that Python's ssl uses), with a 16-byte tag that the other side verifies while it decrypts into
the slice's place. There is no handshake, no key agreement and no record layer: the key is constant, and nonces count.
It bounds what encryption and the socket cost; it protects nothing.
"""

import ctypes
import ctypes.util
import socket
import struct
import sys

import numpy as np
from contest import REGION_NBYTES, Contender, Owner, Rows, Start, Wait, random_bytes, ready, serve
from numpy.typing import NDArray

HEADER = struct.Struct("<QQ?")  # offset, bytes (marked by READ for reads), True for the last slice of the batch
READ = 1 << 63
RECORD_NBYTES = 256 << 10
TAG_NBYTES = 16
_KEY = bytes(range(32))
_GET_TAG, _SET_TAG = 0x10, 0x11  # EVP_CTRL_AEAD_GET_TAG, EVP_CTRL_AEAD_SET_TAG

Memory = NDArray[np.uint8]


class Aead:
    """AES-256-GCM in one direction of one connection; the nonce is the number of the record."""

    def __init__(self, *, seals: bool) -> None:
        crypto = ctypes.CDLL(ctypes.util.find_library("crypto"))
        for name in ("EVP_CIPHER_CTX_new", "EVP_aes_256_gcm"):
            getattr(crypto, name).restype = ctypes.c_void_p
        kind = "Encrypt" if seals else "Decrypt"
        self._begin = getattr(crypto, f"EVP_{kind}Init_ex")
        self._update = getattr(crypto, f"EVP_{kind}Update")
        self._end = getattr(crypto, f"EVP_{kind}Final_ex")
        self._control = crypto.EVP_CIPHER_CTX_ctrl
        self._context = ctypes.c_void_p(crypto.EVP_CIPHER_CTX_new())
        self._length = ctypes.byref(ctypes.c_int())
        self._tag = ctypes.create_string_buffer(TAG_NBYTES)
        self._number = 0
        cipher = ctypes.c_void_p(crypto.EVP_aes_256_gcm())
        require(self._begin(self._context, cipher, None, _KEY, bytes(12)))

    def seal(self, source: int, nbytes: int, sealed: int) -> bytes:
        """Encrypt the bytes at one address to another; return the tag."""
        self._next(source, nbytes, sealed)
        require(self._end(self._context, None, self._length))
        require(self._control(self._context, _GET_TAG, TAG_NBYTES, self._tag))
        return self._tag.raw

    def open(self, sealed: int, nbytes: int, to: int, tag: bytes) -> None:
        """Decrypt the bytes at one address to another; ends the process if they were changed."""
        self._next(sealed, nbytes, to)
        require(self._control(self._context, _SET_TAG, TAG_NBYTES, tag))
        require(self._end(self._context, None, self._length))

    def _next(self, source: int, nbytes: int, to: int) -> None:
        require(self._begin(self._context, None, None, None, self._number.to_bytes(12, "little")))
        self._number += 1
        require(self._update(self._context, ctypes.c_void_p(to), self._length, ctypes.c_void_p(source), nbytes))


def require(result: int) -> None:
    if result != 1:
        raise SystemExit("libcrypto refuses: the bytes were changed, or it lacks AES-256-GCM")


class EncryptedSocket:
    """Socket over which runs of an array's bytes are sent and received encrypted, and headers in the clear."""

    def __init__(self, sock: socket.socket, array: Memory) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._start = int(array.ctypes.data)
        self._outgoing, self._incoming = (np.empty(RECORD_NBYTES + TAG_NBYTES, np.uint8) for _ in range(2))
        self._sealer, self._opener = Aead(seals=True), Aead(seals=False)

    def send(self, header: bytes, offset: int, nbytes: int) -> None:
        """Send a header and the array's bytes [offset, offset + nbytes)."""
        view = memoryview(self._outgoing)  # type: ignore[arg-type]
        scratch = int(self._outgoing.ctypes.data)
        for at in range(0, nbytes, RECORD_NBYTES):
            record = min(RECORD_NBYTES, nbytes - at)
            tag = self._sealer.seal(self._start + offset + at, record, scratch)
            view[record : record + TAG_NBYTES] = tag
            pending = memoryview(view[: record + TAG_NBYTES])
            if header:
                sent = self.sock.sendmsg([header, pending]) - len(header)
                header, pending = b"", pending[max(0, sent) :]
            self.sock.sendall(pending)

    def receive(self, offset: int, nbytes: int) -> None:
        """Receive the array's bytes [offset, offset + nbytes)."""
        view = memoryview(self._incoming)  # type: ignore[arg-type]
        for at in range(0, nbytes, RECORD_NBYTES):
            record = min(RECORD_NBYTES, nbytes - at)
            left = view[: record + TAG_NBYTES]
            while left:
                received = self.sock.recv_into(left, 0, socket.MSG_WAITALL)
                if not received:
                    raise ConnectionError("the encrypted stream's other side ended")
                left = left[received:]
            tag = bytes(view[record : record + TAG_NBYTES])
            self._opener.open(int(self._incoming.ctypes.data), record, self._start + offset + at, tag)


class EncryptedStream(Contender):
    def __init__(self) -> None:
        self._owner = Owner(__file__)
        self.local = np.empty(REGION_NBYTES, np.uint8)
        random_bytes(self.local)
        self._stream = EncryptedSocket(socket.create_connection(("127.0.0.1", self._owner.told["port"])), self.local)

    def prepare(self, rows: Rows, *, write: bool) -> Start:
        last = len(rows) - 1
        headers = [
            HEADER.pack(remote, nbytes | (0 if write else READ), i == last)
            for i, (_, remote, nbytes) in enumerate(rows)
        ]

        def send() -> Wait:
            for header, (local, _, nbytes) in zip(headers, rows, strict=True):
                self._stream.send(header, local, nbytes)
            return self._acknowledged

        def ask() -> Wait:
            self._stream.sock.sendall(b"".join(headers))
            return take

        def take() -> None:
            for local, _, nbytes in rows:
                self._stream.receive(local, nbytes)

        return send if write else ask

    def _acknowledged(self) -> None:
        if not self._stream.sock.recv(1):
            raise ConnectionError("the encrypted stream's owner ended")

    def close(self) -> None:
        self._stream.sock.close()
        self._owner.close()


def own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ready({"port": listener.getsockname()[1]})
        sock, _ = listener.accept()
    array = np.empty(REGION_NBYTES, np.uint8)
    random_bytes(array)
    with sock:
        stream = EncryptedSocket(sock, array)
        while len(header := sock.recv(HEADER.size, socket.MSG_WAITALL)) == HEADER.size:
            offset, nbytes, last = HEADER.unpack(header)
            if nbytes & READ:
                stream.send(b"", offset, nbytes ^ READ)
                continue
            stream.receive(offset, nbytes)
            if last:
                sock.sendall(b"a")


if __name__ == "__main__":
    own() if sys.argv[1:] == ["owner"] else serve(EncryptedStream())
