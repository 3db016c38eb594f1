"""Targets: the messenger's frames, alone and over each transport, and RDMA's handshake.

Over tcp and unix sockets, every case goes to two messengers, one with the compiled responder and one with the reference
alone. They must give the same answers, notifications, counts and memory.
"""

import itertools
import random
import shutil
import socket
import ssl
import struct
import tempfile
import time
from abc import abstractmethod
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest import mock

import msgpack
import numpy as np

from kvpool.local import protocol as local_protocol
from kvpool.local.protocol import Attach, GetIndex, PutBlocks, RegisterMemory, TouchBlocks
from messenger import Messenger, MessengerConfig, SharedMemory, frames
from messenger.errors import ProtocolError
from messenger.frames import (
    PREFIX,
    Ack,
    ConnectionReject,
    Fabric,
    Goodbye,
    Hello,
    KeyInfo,
    KeyQuery,
    Notify,
    Offer,
    Read,
    Refused,
    Welcome,
    Write,
    encode,
)
from messenger.link import Link
from messenger.native.responder_loop import CompiledLoop
from messenger.rdma import handshake
from messenger.rdma.policy.facts import Rail
from messenger.rdma.policy.rail_choice import pair
from messenger.shm.grant_page import PAGE_ID
from messenger.shm.transport import ShmResponder
from messenger.tcp.transport import TcpResponder
from messenger.transport import NoPath
from settings.keys import assemble
from tools.fuzz import mutation
from tools.fuzz.target import ROOT, FuzzTarget, Misjudged

_NBYTES = 4096
_KEYS = (b"<<all>>.", b"<window>", b"<reads>.", b"<writes>", b"<revoked")
_KEY_NUMBERS = tuple(int.from_bytes(key, "little") for key in _KEYS)
_PATIENCE_S = (0.002, 0.05, 2.0)  # for answers; an owner that waits for the rest of a frame sends none
_LAST = Notify(1 << 61, b"last", b"")


def mutate_frames(rng: random.Random, case: bytes, other: bytes, tokens: Sequence[bytes]) -> bytes:
    """Mutate a sequence of frames: their order, their bytes with right lengths, msgpack bodies, or bytes anywhere."""
    whole = _split(case)
    if not whole or rng.random() < 0.3:
        return mutation.mutate_bytes(rng, case, other, tokens)
    at, action = rng.randrange(len(whole)), rng.randrange(8)
    if action == 0:
        whole.insert(rng.randrange(len(whole) + 1), rng.choice(_split(other) or whole))
    elif action == 1:
        whole.insert(at, whole[at])
    elif action == 2:
        del whole[at]
    else:
        whole[at] = _mutated_frame(rng, whole[at], tokens)
    return b"".join(whole)[: mutation.MAX_CASE_NBYTES]


def _mutated_frame(rng: random.Random, frame: bytes, tokens: Sequence[bytes]) -> bytes:
    head, body = bytearray(frame[: PREFIX.size]), frame[PREFIX.size :]
    try:
        value = msgpack.unpackb(body, strict_map_key=False) if rng.random() < 0.6 else None
        if isinstance(value, list):
            body = msgpack.packb(mutation.mutate_value(rng, value), unicode_errors="surrogatepass")
        else:
            body = mutation.mutate_bytes(rng, body, body, tokens)
    except (ValueError, OverflowError, TypeError, msgpack.UnpackException):
        body = mutation.mutate_bytes(rng, body, body, tokens)
    if rng.random() < 0.9:
        struct.pack_into("<I", head, PREFIX.size - 4, len(body))
    return bytes(head) + body


def _split(data: bytes) -> list[bytes]:
    """Return the frames, with what follows them (payloads, garbage) as part of the last whole one."""
    starts, at = [], 0
    magic = data[:4]
    while len(magic) == 4 and at >= 0 and at + PREFIX.size <= len(data):
        starts.append(at)
        (length,) = struct.unpack_from("<I", data, at + PREFIX.size - 4)
        at = data.find(magic, at + PREFIX.size + int(length))
    return [data[start:end] for start, end in itertools.pairwise([*starts, len(data)])]


class Frames(FuzzTarget):
    """Decoding of single frames of the messenger and of the local pool server; the magic selects the protocol."""

    name = "frames"
    covers: tuple[str, ...] = ("messenger/frames.py",)
    allowed: tuple[type[BaseException], ...] = (ProtocolError,)
    tokens: tuple[bytes, ...] = (
        frames.MAGIC,
        local_protocol.MAGIC,
        b"\x16\x03\x01",
        b"\xc1",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa1a\xc0",
    )

    def seeds(self) -> Sequence[bytes]:
        rows = np.array([[0, 8], [16, 8]], np.int64).tobytes()
        messages: tuple[Any, ...] = (
            Hello("a", 1, "b", 2, b"s" * 16, "tcp"), Welcome("b", 2), ConnectionReject("full", "no"),
            Write(1, 1, 1, 5, 0, 16, rows, True, b"t", b"p"), Notify(2, b"t", b"p"), Read(3, 1, 5, 16, rows),
            Offer(1, 4096), Ack(1, 16), Refused(1, "no"), Goodbye(), Fabric(b"x"), KeyQuery(1, 5),
            KeyInfo(1, 5, 0, 4096, 0, 8, True, False, b"\0\0\0\1", "", False),
        )  # fmt: skip
        local: tuple[Any, ...] = (
            Attach("w", 1), GetIndex(), RegisterMemory(1, 4096), TouchBlocks(bytes(16), bytes(32)),
            PutBlocks(bytes(16), b"", 1, bytes(16), bytes(16), bytes(8), b"", bytes(4), 0.5),
        )  # fmt: skip
        return [*map(encode, messages), *map(local_protocol.encode, local)]

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate the frame."""
        return mutate_frames(rng, case, other, self.tokens)

    def run(self, case: bytes) -> None:
        """Decode a frame; what was decoded must survive its own encoding."""
        if len(case) < PREFIX.size:
            raise ProtocolError("shorter than a prefix: the link waits for more bytes")
        is_local = case[:4] == local_protocol.MAGIC
        prefix, body_of, pack = (
            (local_protocol.decode_prefix, local_protocol.decode_body, local_protocol.encode)
            if is_local
            else (frames.decode_prefix, frames.decode_body, frames.encode)
        )
        kind, length = prefix(case[: PREFIX.size])
        body = case[PREFIX.size : PREFIX.size + length]
        message: Any = body_of(kind, body)
        frame = pack(message)
        kind_again, length_again = prefix(frame[: PREFIX.size])
        again: Any = body_of(kind_again, frame[PREFIX.size : PREFIX.size + length_again])
        if type(again) is not type(message) or repr(again) != repr(message):
            raise Misjudged(f"{type(message).__name__} is another message after it was encoded and decoded")


_NONCE, _OTHER_NONCE = b"n" * 16, b"o" * 16
_RAIL = Rail("mlx5_0", 1, "Ethernet", 3, bytes(10) + b"\xff\xff\x0a\0\0\1", 120, 0, 4096, 100.0, 0, False)


class _ReplayLink:
    """Link whose next frame is given."""

    address = "a caller"

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def receive(self) -> Fabric:
        return Fabric(self._payload)


class RdmaHandshake(FuzzTarget):
    """Messages of RDMA's handshake, as both sides check them, without a device."""

    name = "rdma-handshake"
    covers: tuple[str, ...] = ("messenger/rdma/handshake.py",)
    allowed: tuple[type[BaseException], ...] = (ProtocolError, NoPath)
    tokens: tuple[bytes, ...] = (
        _NONCE,
        _OTHER_NONCE,
        b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"Ethernet",
        b"InfiniBand",
        b"\xff",
    )

    def seeds(self) -> Sequence[bytes]:
        rails, ends = handshake.packed_rails([_RAIL]), [[17, 5, 99]]
        messages = (
            (0, frames.VERSION, handshake.fingerprint(), _OTHER_NONCE, rails),
            (1, _NONCE, _OTHER_NONCE, rails, [[0, 0]], 1 << 40, ends),
            (2, _NONCE, 1 << 40, ends),
            (3, _NONCE),
        )
        return [msgpack.packb(message) for message in messages]

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate the message as msgpack, or bytes."""
        try:
            value = msgpack.unpackb(case, strict_map_key=False)
            if rng.random() < 0.7:
                packed: bytes = msgpack.packb(mutation.mutate_value(rng, value), unicode_errors="surrogatepass")
                return packed
        except (ValueError, OverflowError, TypeError, msgpack.UnpackException):
            pass
        return mutation.mutate_bytes(rng, case, other, self.tokens)

    def run(self, case: bytes) -> None:
        """Receive the message as the side that expects its kind, and check all that the side uses."""
        link = cast("Link", _ReplayLink(case))
        kind = case[1] if len(case) > 1 else 0
        if kind == 1:
            reply = handshake.receive(link, handshake.HandshakeReply)
            rails, pairs = handshake.check_answer(reply, _NONCE, 1)
            if any(mine != 0 or not 0 <= theirs < len(rails) for mine, theirs in pairs):
                raise Misjudged("a pair names a rail that does not exist")
            self._ends(handshake.check_ends(reply, len(pairs)))
        elif kind == 2:
            confirm = handshake.receive(link, handshake.HandshakeConfirm)
            handshake.check_nonce(confirm.your_nonce, _NONCE)
            self._ends(handshake.check_ends(confirm, 1))
        elif kind == 3:
            handshake.check_nonce(handshake.receive(link, handshake.HandshakeReady).your_nonce, _NONCE)
        else:
            opening = handshake.receive(link, handshake.HandshakeOffer)
            remote = handshake.check_opening(opening)
            for one in remote:
                _ = one.name, one.address
            pair(remote, [_RAIL])
            handshake.packed_rails(remote)

    @staticmethod
    def _ends(ends: Sequence[tuple[Any, int]]) -> None:
        for end, rkey in ends:
            if not (0 <= end.qp_num < 1 << 24 and 0 <= end.psn < 1 << 24 and 0 <= rkey < 1 << 32):
                raise Misjudged("a number of a queue pair, a packet or a key that the hardware does not have")


class _Owner:
    """A messenger with one region and keys with different rights, and what it was notified of."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        folder.mkdir()
        settings = {"shm_dir": folder, "handshake_timeout_s": 5.0, "max_connections_per_peer": 64, **config}
        self.messenger = Messenger(assemble(MessengerConfig, **settings), node_id="b", incarnation=1)
        self.memory = SharedMemory.create(_NBYTES, "fuzz")
        self.accepted = 0
        self._count_accepted()
        self.endpoint = self.messenger.start()
        region = self.messenger.register(self.memory)
        grant, whole = self.messenger.grant, (region, 0, _NBYTES)
        # Tokens are those of the cases, in every messenger, so that answers can be compared.
        with mock.patch("messenger.grants.secrets.randbits", side_effect=_KEY_NUMBERS):
            keys = [
                grant(*whole, read=True, write=True),
                grant(region, 8, 100, read=True, write=True),
                grant(*whole, read=True, write=False),
                grant(*whole, read=False, write=True),
                grant(*whole, read=True, write=True),
            ]
        self.messenger.revoke(keys[-1])
        self.notes: list[tuple[str, bytes, bytes]] = []
        self.messenger.on_notify(lambda *note: self.notes.append(note))

    def _count_accepted(self) -> None:
        server: Any = self.messenger._server
        begin = server._begin

        def counted(*connection: Any) -> None:
            begin(*connection)
            self.accepted += 1

        server._begin = counted

    def ended(self, number: int, timeout_s: float) -> bool:
        """Wait until connection `number` was accepted and none is open. Returns False if it takes longer."""
        end_s = time.monotonic() + timeout_s
        while self.accepted < number or self.messenger.counters()["connections_in_open"]:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.0002)
        return True

    def close(self) -> None:
        """Close the messenger."""
        self.messenger.close()
        self.memory.close()


class MessengerTarget(FuzzTarget):
    """Base of the targets that connect. A case's first byte: 0 for requests after a good greeting,
    else a raw stream."""

    deadline_s = 30.0
    covers: tuple[str, ...] = (
        "messenger/inbound.py",
        "messenger/frames.py",
        "messenger/sockets.py",
        "messenger/sessions.py",
        "messenger/server.py",
    )
    tokens: tuple[bytes, ...] = (
        *_KEYS,
        frames.MAGIC,
        struct.pack("<q", -1),
        struct.pack("<q", 1 << 62),
        struct.pack("<q", _NBYTES),
    )
    config: ClassVar[dict[str, Any]]

    def open(self) -> None:
        """Start the messengers."""
        self._folder = tempfile.TemporaryDirectory(prefix="mpf-")
        self.path = Path(self._folder.name)
        self._numbers = itertools.count()
        self.owners = [_Owner(self.path / name, self.settings()) for name in self.names()]
        if len(self.owners) > 1:
            reference = self.owners[1].messenger
            for kind in (TcpResponder, ShmResponder):
                _without_loop(kind, reference)

    def names(self) -> Sequence[str]:
        """Return the names of the messengers to run."""
        return "compiled", "reference"

    def settings(self) -> dict[str, Any]:
        """Return the messengers' settings."""
        return self.config

    @abstractmethod
    def connect(self, owner: _Owner) -> socket.socket:
        """Return a connected socket."""

    def hello(self, owner: _Owner, session: bytes, transport: str) -> bytes:
        """Return a greeting that the owner accepts."""
        return encode(Hello("raw", 9, owner.endpoint.node_id, owner.endpoint.incarnation, session, transport))

    def seeds(self) -> Sequence[bytes]:
        rows = np.array([[0, 8], [16, 8]], np.int64).tobytes()
        everything, window, reads, writes, revoked = _KEY_NUMBERS
        payload = bytes(range(16))
        requests = [
            encode(Write(1, 1, 1, everything, 0, 16, rows, True, b"t", b"p")) + payload,
            encode(Write(2, 2, 1, window, 0, 8, np.array([[8, 8]], np.int64).tobytes(), False, b"", b"")) + payload[:8],
            encode(Write(3, 3, 1, reads, 0, 16, rows, True, b"t", b"")) + payload,
            encode(Write(4, 4, 1, revoked, 0, 16, rows, False, b"", b"")) + payload,
            encode(Read(1 << 33, 1, writes, 16, rows)),
            encode(Read(1 << 33, 1, everything, 16, rows)),
            encode(Notify(5, b"tag", b"payload")),
            encode(KeyQuery(1, everything)),
        ]
        raw = encode(Hello("raw", 9, "b", 1, b"s" * 16, "tcp")) + requests[0]
        return [b"\0" + b"".join(requests[:-1]), *(b"\0" + one for one in requests), b"\1" + raw]

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate the frames."""
        mode = case[:1] if rng.random() < 0.97 else rng.choice((b"\0", b"\1"))
        return mode + mutate_frames(rng, case[1:], other[1:], self.tokens)

    def run(self, case: bytes) -> None:
        """Send the case to each messenger; if the outcomes differ, again with more patience."""
        outcomes: list[Any] = []
        for patience_s in _PATIENCE_S:
            session = next(self._numbers).to_bytes(16, "little")
            outcomes = [self.outcome(owner, case, session, patience_s) for owner in self.owners]
            if len(outcomes) < 2 or _agree(*outcomes):
                return
        raise Misjudged(f"the compiled responder and the reference differ: {outcomes[0]!r} {outcomes[1]!r}")

    def outcome(self, owner: _Owner, case: bytes, session: bytes, patience_s: float) -> Any:
        """Return answers, notifications, memory and counts after one case."""
        owner.memory.array[:] = 0
        owner.notes.clear()
        before, number = owner.messenger.counters(), owner.accepted + 1
        sock = self.connect(owner)
        answers = b""
        try:
            sock.settimeout(patience_s)
            stream = case[1:]
            if case[:1] == b"\0":
                stream = self.greeting(owner, session) + stream + encode(_LAST)
            self.send(sock, stream)
            answers = _received(sock)
        except OSError:
            pass  # the owner has ended the connection
        finally:
            sock.close()
        if not owner.ended(number, 10.0):
            raise Misjudged("the connection stays open although its caller has left")
        after = owner.messenger.counters()
        counted = {
            name: after.get(name, 0) - before.get(name, 0)
            for name in {*before, *after}
            if name.startswith(("bytes_", "slices_", "accesses", "malformed", "notifies"))
        }
        return (
            self.parsed(answers, case),
            owner.notes.copy(),
            owner.memory.array.tobytes(),
            {k: n for k, n in counted.items() if n},
        )

    def greeting(self, owner: _Owner, session: bytes) -> bytes:
        """Return the bytes that precede a case's requests."""
        return self.hello(owner, session, "tcp")

    def parsed(self, answers: bytes, case: bytes) -> list[Any]:
        """Return the messages in the bytes received."""
        return _parsed(answers, _reads_in(case))

    def send(self, sock: socket.socket, stream: bytes) -> None:
        """Send a case."""
        sock.sendall(stream)

    def close(self) -> None:
        """Close the messengers."""
        for owner in self.owners:
            owner.close()
        self._folder.cleanup()


def _agree(one: Any, other: Any) -> bool:
    """Return True if two outcomes are the same; the last answers may be lost if the owner closed the connection."""
    answers, others = one[0], other[0]
    if "malformed_frames" in one[-1]:
        shorter = min(len(answers), len(others))
        answers, others = answers[:shorter], others[:shorter]
    return bool(answers == others and one[1:] == other[1:])


def _without_loop(kind: Any, messenger: Messenger) -> None:
    original = kind.compiled_loop

    def compiled_loop(self: Any, grants: Any, *rest: Any) -> CompiledLoop | None:
        return None if grants is messenger._grants else original(self, grants, *rest)

    kind.compiled_loop = compiled_loop


def _received(sock: socket.socket) -> bytes:
    """Return all bytes up to the answer to the last request, the end of the connection, or a pause."""
    data, last = bytearray(), encode(Ack(_LAST.seq, 0))
    try:
        while piece := sock.recv(1 << 20):
            data += piece
            if data.endswith(last):
                break
    except (TimeoutError, OSError):
        pass
    return bytes(data)


def _reads_in(case: bytes) -> set[int]:
    """Return the numbers of a case's reads."""
    reads = set()
    for frame in _split(case[1:]):
        with suppress(ProtocolError):
            kind, length = frames.decode_prefix(frame)
            message = frames.decode_body(kind, frame[PREFIX.size : PREFIX.size + length])
            reads |= {message.seq} if isinstance(message, Read) else set()
    return reads


def _parsed(data: bytes, reads: Set[int]) -> list[Any]:
    """Return the answers; bytes follow the answers to `reads`. What cannot be told apart is returned as it is."""
    found: list[Any] = []
    at = 0
    while at + PREFIX.size <= len(data):
        try:
            kind, length = frames.decode_prefix(data[at : at + PREFIX.size])
            message = frames.decode_body(kind, data[at + PREFIX.size : at + PREFIX.size + length])
        except ProtocolError:  # a write had the number of a read, or the answer is cut off
            found.append(data[at:])
            break
        at += PREFIX.size + length
        if isinstance(message, ConnectionReject):  # lost if the owner closes while bytes of the caller are unread
            continue
        if not (isinstance(message, Offer) and message.region_id == PAGE_ID):  # offered with a compiled loop alone
            found.append(message)
        if isinstance(message, Ack) and message.seq in reads:
            found.append(data[at : at + message.nbytes])
            at += message.nbytes
    return found


class Tcp(MessengerTarget):
    """Connections over tcp."""

    name = "messenger-tcp"
    covers: tuple[str, ...] = (*MessengerTarget.covers, "messenger/tcp/transport.py")
    config: ClassVar[dict[str, Any]] = {"transport": "tcp"}

    def connect(self, owner: _Owner) -> socket.socket:
        return socket.create_connection((owner.endpoint.tcp_host, owner.endpoint.tcp_port), 10)


class Shm(MessengerTarget):
    """Connections over unix sockets, with shared memory. A first byte above 1 sends that many descriptors along."""

    name = "messenger-shm"
    covers: tuple[str, ...] = (*MessengerTarget.covers, "messenger/shm/transport.py")
    config: ClassVar[dict[str, Any]] = {"transport": "shm"}

    def open(self) -> None:
        """Make the memory that cases offer."""
        super().open()
        self._source = SharedMemory.create(1 << 16, "source")
        self._source.array[:] = np.arange(1 << 16) % 251

    def connect(self, owner: _Owner) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(owner.endpoint.shm_socket)
        return sock

    def seeds(self) -> Sequence[bytes]:
        rows, everything = np.array([[0, 0, 8], [16, 16, 8]], np.int64).tobytes(), _KEY_NUMBERS[0]
        requests = [
            encode(Write(1, 1, 1, everything, 1, 16, rows, True, b"t", b"p")),
            encode(Write(2, 2, 1, _KEY_NUMBERS[2], 1, 16, rows, True, b"t", b"p")),
            encode(Read(1 << 33, 1, everything, 16, np.array([[0, 8], [16, 8]], np.int64).tobytes())),
            encode(Notify(3, b"tag", b"payload")),
            encode(Offer(1, 0)),
            encode(Offer(2, 4096)),
        ]
        return [b"\0" + b"".join(requests[:4]), *(b"\0" + one for one in requests), b"\0" + b"".join(requests)]

    def parsed(self, answers: bytes, case: bytes) -> list[Any]:
        return _parsed(answers, set())  # bytes read go to shared memory

    def greeting(self, owner: _Owner, session: bytes) -> bytes:
        return self.hello(owner, session, "shm") + encode(Offer(1, self._source.nbytes))

    def send(self, sock: socket.socket, stream: bytes) -> None:
        """Send the greeting, then the rest with the descriptor of its first offer."""
        at = PREFIX.size + struct.unpack_from("<I", stream, PREFIX.size - 4)[0] if len(stream) >= PREFIX.size else 0
        sock.sendall(stream[:at])
        socket.send_fds(sock, [stream[at : at + 1]], [self._source.fd])
        sock.sendall(stream[at + 1 :])

    def close(self) -> None:
        """Free the memory."""
        super().close()
        self._source.close()


class Tls(MessengerTarget):
    """Connections over tcp with TLS: bytes in place of the handshake, and requests of a member of the cluster."""

    name = "messenger-tls"
    covers: tuple[str, ...] = ("messenger/tcp/tls_link.py", "messenger/inbound.py", "messenger/link.py")
    config: ClassVar[dict[str, Any]] = {"transport": "tcp"}
    tokens: tuple[bytes, ...] = (
        *MessengerTarget.tokens,
        b"\x16\x03\x01",
        b"\x15\x03\x03\x00\x02\x02\x28",
        b"\x17\x03\x03",
        b"GET / HTTP/1.1\r\n",
    )

    def names(self) -> Sequence[str]:
        return ("encrypted",)  # TLS has no compiled responder

    def settings(self) -> dict[str, Any]:
        """Return the settings, with copies of the tests' certificates that only this user can read."""
        files = {}
        for name, source in (("tls_cert", "node.pem"), ("tls_key", "node.key"), ("tls_ca", "ca.pem")):
            files[name] = self.path / source
            shutil.copyfile(ROOT / "tests" / "data" / "tls" / source, files[name])
            files[name].chmod(0o600)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname = False
        self._context.load_verify_locations(files["tls_ca"])
        self._context.load_cert_chain(files["tls_cert"], files["tls_key"])
        return self.config | files

    def seeds(self) -> Sequence[bytes]:
        client, out = ssl.MemoryBIO(), ssl.MemoryBIO()
        shaking = self._context.wrap_bio(client, out)
        try:
            shaking.do_handshake()
        except ssl.SSLWantReadError:
            pass
        return [*super().seeds(), b"\1" + out.read()]

    def connect(self, owner: _Owner) -> socket.socket:
        self._plain = socket.create_connection((owner.endpoint.tcp_host, owner.endpoint.tcp_port), 10)
        return self._plain

    def parsed(self, answers: bytes, case: bytes) -> list[Any]:
        return [answers]

    def outcome(self, owner: _Owner, case: bytes, session: bytes, patience_s: float) -> Any:
        """Send raw bytes as they are, and requests inside TLS."""
        if case[:1] != b"\0":
            return super().outcome(owner, case, session, patience_s)
        number = owner.accepted + 1
        with socket.create_connection((owner.endpoint.tcp_host, owner.endpoint.tcp_port), 10) as plain:
            try:
                with self._context.wrap_socket(plain) as sock:
                    sock.settimeout(patience_s)
                    sock.sendall(self.greeting(owner, session) + case[1:] + encode(_LAST))
                    _parsed(_received(sock), _reads_in(case))
            except OSError:
                pass  # the owner has ended the connection
        if not owner.ended(number, 10.0):
            raise Misjudged("the connection stays open although its caller has left")
        return None
