"""Encrypted tcp: what is moved, who is let in, what each side is told when it is not, and certificates that change."""

import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from messenger import Messenger, MessengerConfig, PeerUnreachable, TransferDeadlineExceeded
from messenger.frames import PREFIX, REJECTIONS, ConnectionReject, Hello, decode_body, decode_prefix, encode
from messenger.tcp import tls_link
from rpc import tls
from rpc.errors import InvalidArgument
from rpc.tls import Identity, TlsFiles
from settings.keys import assemble

MakeNode = Callable[..., Any]
TlsSettings = Callable[..., dict[str, Path]]

pytestmark = pytest.mark.transports("tcp")


@pytest.fixture
def pair(make_node: MakeNode, tls_settings: TlsSettings) -> tuple[Any, Any]:
    settings = tls_settings()
    return make_node("a", 4 << 20, **settings), make_node("b", 4 << 20, **settings)


def context_of(files: dict[str, Path]) -> ssl.SSLContext:
    """Return the context of an outsider, who shows these files and accepts any peer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if files:
        context.load_cert_chain(files["tls_cert"], files["tls_key"])
    return context


def greeting_of(node: Any) -> bytes:
    return encode(Hello("outsider", 1, node.endpoint.node_id, node.endpoint.incarnation, b"s" * 16, "tcp"))


def dial(node: Any) -> socket.socket:
    return socket.create_connection((node.endpoint.tcp_host, node.endpoint.tcp_port), 20)


def frame_from(received: bytes) -> Any:
    kind, length = decode_prefix(received[: PREFIX.size])
    return decode_body(kind, received[PREFIX.size : PREFIX.size + length])


def test_bytes_of_every_shape_go_both_ways_and_notifies_follow_them(pair: tuple[Any, Any]) -> None:
    a, b = pair
    a.fill(1)
    b.fill(2)
    key = b.grant()
    peer = a.messenger.connect(b.endpoint)
    shapes = [[[0, 0, 1]], [[0, 3 << 20, 1 << 20]], [[7 * i, (1 << 20) + 16 * i, 5] for i in range(3000)]]
    for slices in shapes:
        result = peer.write_notify(key, a.region, slices, b"written", b"").result()
        assert result.transport == "tcp"
        for local, remote, nbytes in slices:
            assert np.array_equal(a.array[local : local + nbytes], b.array[remote : remote + nbytes])
    assert [tag for _, tag, _ in b.notes] == [b"written"] * 3
    peer.read(key, a.region, [[2 << 20, 0, 1 << 20], [1 << 20, (1 << 20) + 16, 5]]).result()
    assert np.array_equal(a.array[2 << 20 : 3 << 20], b.array[: 1 << 20])
    assert np.array_equal(a.array[1 << 20 : (1 << 20) + 5], b.array[(1 << 20) + 16 : (1 << 20) + 21])


def test_both_directions_at_once_on_one_connection(make_node: MakeNode, tls_settings: TlsSettings) -> None:
    settings = tls_settings()
    a, b = (make_node(name, 4 << 20, streams_per_peer=1, **settings) for name in "ab")
    a.array[:] = 0
    b.fill(3)
    key = b.grant()
    peer = a.messenger.connect(b.endpoint)
    a.array[: 1 << 20] = 7
    moves = []
    for _ in range(8):
        moves.append(peer.write(key, a.region, [[0, 0, 1 << 20]]))
        moves.append(peer.read(key, a.region, [[2 << 20, 2 << 20, 2 << 20]]))
    for move in moves:
        move.result()
    assert np.array_equal(a.array[2 << 20 :], b.array[2 << 20 :])
    assert (b.array[: 1 << 20] == 7).all()


def test_nothing_readable_crosses_the_wire(
    make_node: MakeNode, tls_settings: TlsSettings, nothing_left_behind: None
) -> None:
    settings = tls_settings()
    a, b = make_node("a", **settings), make_node("b", **settings)
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        eavesdropper = threading.Thread(target=_relay, args=(listener, b.endpoint, seen))
        eavesdropper.start()
        a.array[:] = np.frombuffer(b"secret thing" * (a.region.nbytes // 12 + 1), np.uint8)[: a.region.nbytes]
        peer = a.messenger.connect(replace(b.endpoint, tcp_port=listener.getsockname()[1]))
        peer.write_notify(b.grant(), a.region, [[0, 0, 1 << 20]], b"secret thing", b"secret thing").result()
        a.messenger.close()
        eavesdropper.join()
    assert b.array[:12].tobytes() == b"secret thing"
    assert len(seen) > 1 << 20
    assert b"secret" not in seen
    assert b"moonpool test node" not in seen  # the certificates' subject


def _relay(listener: socket.socket, endpoint: Any, seen: bytearray) -> None:
    caller, _ = listener.accept()
    with caller, socket.create_connection((endpoint.tcp_host, endpoint.tcp_port)) as owner:

        def pump(source: socket.socket, target: socket.socket) -> None:
            try:
                while received := source.recv(1 << 16):
                    seen.extend(received)
                    target.sendall(received)
                target.shutdown(socket.SHUT_WR)
            except OSError:
                pass

        back = threading.Thread(target=pump, args=(owner, caller))
        back.start()
        pump(caller, owner)
        back.join()


def test_a_caller_in_the_clear_is_told_so_at_once(make_node: MakeNode, tls_settings: TlsSettings) -> None:
    a, b = make_node("a"), make_node("b", **tls_settings())
    with pytest.raises(
        PeerUnreachable, match="do not agree on encryption: set tls_cert, tls_key and tls_ca on both sides, or on none"
    ):
        a.messenger.connect(b.endpoint).notify(b"t", b"").result()
    assert b.messenger.counters()["tls_refused"] == 1
    assert b.notes == []


def test_a_caller_that_encrypts_is_told_by_an_owner_in_the_clear(
    make_node: MakeNode, tls_settings: TlsSettings, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = make_node("a", **tls_settings()), make_node("b")
    with pytest.raises(PeerUnreachable, match="does not speak TLS, and the other side speaks nothing else"):
        a.messenger.connect(b.endpoint).notify(b"t", b"").result()
    assert b.messenger.counters()["malformed_frames"] == 1
    assert "the other side begins a TLS handshake, and this side does not use TLS" in caplog.text


def test_another_program_at_the_port_is_not_taken_for_a_peer(make_node: MakeNode, tls_settings: TlsSettings) -> None:
    a = make_node("a", **tls_settings())
    b = make_node("b", **tls_settings())
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            other, _ = listener.accept()
            with other:
                other.recv(1 << 16)
                other.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        program = threading.Thread(target=answer)
        program.start()
        with pytest.raises(PeerUnreachable, match="does not speak TLS"):
            a.messenger.connect(replace(b.endpoint, tcp_port=listener.getsockname()[1])).notify(b"t", b"").result()
        program.join()


@pytest.mark.parametrize(
    ("shown", "alert"),
    [
        ({}, "CERTIFICATE_REQUIRED"),
        ({"name": "stranger", "ca": "other_ca"}, "UNKNOWN_CA"),
        ({"name": "expired"}, "CERTIFICATE_EXPIRED"),
    ],
)
def test_an_outsider_is_not_let_in(
    make_node: MakeNode, tls_settings: TlsSettings, shown: dict[str, str], alert: str, wait_until: Callable[..., None]
) -> None:
    files = tls_settings(**shown, of="outsider") if shown else {}
    context = context_of(files)
    b = make_node("b", **tls_settings())
    with context.wrap_socket(dial(b)) as outsider, pytest.raises(ssl.SSLError, match=alert):
        outsider.recv(1)
    wait_until(lambda: b.messenger.counters().get("tls_refused") == 1, "the outsider is counted")


def test_a_certificate_of_the_ca_for_another_name_is_not_let_in(
    make_node: MakeNode, tls_settings: TlsSettings, caplog: pytest.LogCaptureFixture
) -> None:
    context = context_of(tls_settings("misnamed", of="outsider"))
    b = make_node("b", **tls_settings())
    with context.wrap_socket(dial(b)) as outsider:
        answer = frame_from(outsider.recv(1 << 16))
    assert answer == ConnectionReject("tls", REJECTIONS["tls"])
    assert "is for elsewhere, not for 'moonpool'" in caplog.text


def test_an_owner_with_a_certificate_of_another_ca_is_not_believed(
    make_node: MakeNode, tls_settings: TlsSettings, caplog: pytest.LogCaptureFixture, wait_until: Callable[..., None]
) -> None:
    b = make_node("b", **tls_settings("stranger", ca="other_ca", of="b"))
    a = make_node("a", **tls_settings())
    a.fill(1)
    with pytest.raises(PeerUnreachable, match=r"certificate of b at .* is not accepted: self-signed certificate"):
        a.messenger.connect(b.endpoint).notify(b"t", b"").result()
    said = "does not accept this node's certificate: unknown ca"
    wait_until(lambda: said in caplog.text, "the owner says why it was left")


def test_a_caller_above_the_limit_is_told_so(make_node: MakeNode, tls_settings: TlsSettings) -> None:
    settings = tls_settings()
    owner, first = make_node("a", max_inbound_connections=1, **settings), make_node("b", **settings)
    writing = first.messenger.connect(owner.endpoint)
    writing.write_notify(owner.grant(), first.region, [[0, 0, 10]], b"first", b"").result()
    peer = make_node("c", **settings).messenger.connect(owner.endpoint)
    with pytest.raises(TransferDeadlineExceeded, match="rejected the connection: no connection is free"):
        peer.notify(b"too many", b"", deadline_s=0.5).result()
    first.messenger.close()
    peer.notify(b"second", b"").result()
    assert [tag for _, tag, _ in owner.notes] == [b"first", b"second"]


def test_a_caller_that_stops_in_the_handshake_is_cut_off(make_node: MakeNode, tls_settings: TlsSettings) -> None:
    b = make_node("b", handshake_timeout_s=0.3, **tls_settings())
    with dial(b) as silent, dial(b) as dribbling:
        dribbling.sendall(b"\x16\x03\x01\x02\x00")
        closing = 0
        for caller in (silent, dribbling):
            closing += not caller.recv(1)
    assert closing == 2


def test_new_certificates_are_shown_to_new_connections_and_old_ones_live_on(
    make_node: MakeNode, tls_settings: TlsSettings
) -> None:
    def shown_by(node: Any) -> bytes:
        with context_of(tls_settings_now).wrap_socket(dial(node)) as caller:
            certificate = caller.getpeercert(binary_form=True)
            assert certificate is not None
            return certificate

    tls_settings_now = tls_settings("node")
    a, b = make_node("a", **tls_settings_now), make_node("b", **tls_settings_now)
    peer = a.messenger.connect(b.endpoint)
    peer.notify(b"before", b"").result()
    before = shown_by(b)
    tls_settings("successor")
    assert shown_by(b) != before
    peer.notify(b"after", b"").result()
    assert a.messenger.counters()["connects"] == 1
    b.cut_inbound()
    peer.notify(b"again", b"").result()
    assert [tag for _, tag, _ in b.notes] == [b"before", b"after", b"again"]


def test_files_that_cannot_be_used_leave_the_old_certificate_in_force(
    tls_settings: TlsSettings, caplog: pytest.LogCaptureFixture
) -> None:
    settings = tls_settings()
    identity = Identity(TlsFiles(settings["tls_cert"], settings["tls_key"], settings["tls_ca"]))
    before = identity.material()
    tls_settings("successor", key="node")
    assert identity.material() is before
    assert "keeping the previous certificate: tls_key" in caplog.text
    tls_settings("successor")
    assert identity.material() is not before


@pytest.mark.parametrize("step", ["_context", "_warn_of_open_key"])
@pytest.mark.parametrize("which", ["tls_cert", "tls_key", "tls_ca"])
def test_a_file_that_vanishes_while_it_is_read_leaves_the_certificate_in_force(
    tls_settings: TlsSettings, monkeypatch: pytest.MonkeyPatch, which: str, step: str
) -> None:
    settings = tls_settings()
    identity = Identity(TlsFiles(settings["tls_cert"], settings["tls_key"], settings["tls_ca"]))
    before = identity.material()
    tls_settings("successor")
    go_on = getattr(tls, step)

    def late(*args: Any, **how: Any) -> Any:
        settings[which].unlink(missing_ok=True)
        return go_on(*args, **how)

    monkeypatch.setattr(tls, step, late)
    assert (identity.material() is before) == (step == "_context")


def test_a_key_that_was_used_up_is_renewed_by_a_new_connection(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    monkeypatch.setattr(tls_link, "MAX_RECORDS", 40)
    a.fill(1)
    key, peer = b.grant(), a.messenger.connect(b.endpoint)
    for _ in range(40):
        peer.write(key, a.region, [[0, 0, 1 << 16]]).result()
    assert np.array_equal(a.array[: 1 << 16], b.array[: 1 << 16])
    assert a.messenger.counters()["connects"] > 4


def test_the_end_of_a_certificate_is_told_once_a_day_of_the_last_fortnight(
    tls_settings: TlsSettings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, day_s = tls_settings(), 86400.0
    identity = Identity(TlsFiles(settings["tls_cert"], settings["tls_key"], settings["tls_ca"]))
    end_s = identity.material().expires_s
    told = []
    for days_left in (15.0, 13.5, 13.0, 12.4, 1.0, -0.5, -1.6):
        caplog.clear()
        now_s = end_s - days_left * day_s
        monkeypatch.setattr("rpc.tls.time.time", lambda now_s=now_s: now_s)
        identity.left_s()
        told += [record.getMessage().split(" ", 4)[4].split(";")[0] for record in caplog.records]
    assert told == [
        *("expires in 13.5 days", "expires in 12.4 days", "expires in 1.0 days"),
        *["has expired: no connection can be made"] * 2,
    ]


def test_nodes_tell_how_long_their_certificate_lasts(pair: tuple[Any, Any]) -> None:
    a, _ = pair
    left_s = a.messenger.reported()["tls_certificate_left_seconds"]
    assert 0 < left_s <= Identity(a.messenger._config.tls_files).material().expires_s - time.time() + 60


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"key": "successor"}, "tls_key .* does not belong to the certificate in tls_cert"),
        ({"key": "locked"}, "tls_key .* must not be encrypted: decrypt it"),
        ({"name": "expired"}, "certificate has expired: tls_cert .*: issue a new one"),
        ({"name": "stranger"}, "is not signed by the CA in tls_ca"),
        ({"name": "misnamed"}, "lacks the DNS name 'moonpool' of this cluster"),
    ],
)
def test_key_material_that_cannot_work_is_refused_at_the_start(
    tls_settings: TlsSettings, given: dict[str, str], message: str
) -> None:
    settings = tls_settings(**given)
    with pytest.raises(InvalidArgument, match=message):
        Identity(TlsFiles(settings["tls_cert"], settings["tls_key"], settings["tls_ca"]))


@pytest.mark.parametrize("which", ["tls_cert", "tls_key", "tls_ca"])
@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\n-----BEGIN PRIVATE KEY-----\n"])
def test_files_that_are_missing_or_no_pem_are_named(
    tls_settings: TlsSettings, which: str, content: bytes | None
) -> None:
    settings = tls_settings()
    settings[which].unlink()
    if content is not None:
        settings[which].write_bytes(content)
    with pytest.raises(InvalidArgument, match=str(settings[which])):
        Identity(TlsFiles(settings["tls_cert"], settings["tls_key"], settings["tls_ca"]))


def test_a_messenger_does_not_start_without_its_key_material(tls_settings: TlsSettings, tmp_path: Path) -> None:
    settings = tls_settings(key="successor")
    with pytest.raises(InvalidArgument, match="tls_key"):
        Messenger(assemble(MessengerConfig, shm_dir=tmp_path, **settings), node_id="a", incarnation=1).start()  # type: ignore[arg-type]


def test_a_key_that_others_can_read_is_warned_of(tls_settings: TlsSettings, caplog: pytest.LogCaptureFixture) -> None:
    settings = tls_settings()
    settings["tls_key"].chmod(0o644)
    Identity(TlsFiles(settings["tls_cert"], settings["tls_key"], settings["tls_ca"]))
    assert "other users of this machine can read the private key; run chmod 600" in caplog.text
