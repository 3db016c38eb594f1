"""Starting, addressing and closing a messenger."""

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from messenger import (
    AddressInUse,
    BindFailed,
    Endpoint,
    InvalidArgument,
    Messenger,
    MessengerClosed,
    MessengerConfig,
)
from settings.keys import assemble


def test_an_endpoint_survives_the_wire(make_node: Any) -> None:
    endpoint = make_node("a", incarnation=(1 << 64) - 1).endpoint
    assert Endpoint.from_proto(endpoint.to_proto()) == endpoint


def test_a_peer_is_made_once_per_endpoint(make_node: Any) -> None:
    a, b = make_node("a"), make_node("b")
    peer = a.messenger.connect(b.endpoint)
    assert a.messenger.connect(dataclasses.replace(b.endpoint)) is peer
    assert a.messenger.counters()["connections_out_open"] == 0
    peer.notify(b"t", b"").result()
    assert a.messenger.counters()["connections_out_open"] == 1


def test_auto_takes_shared_memory_on_one_host_and_tcp_between_hosts(tmp_path: Path) -> None:
    here = Messenger(assemble(MessengerConfig, shm_dir=tmp_path), node_id="a", incarnation=1)
    neighbour = Messenger(assemble(MessengerConfig, shm_dir=tmp_path), node_id="b", incarnation=1)
    distant = Messenger(assemble(MessengerConfig, shm_dir=tmp_path, host_id="elsewhere"), node_id="c", incarnation=1)
    here.start()
    try:
        assert here.connect(neighbour.start()).transport == "shm"
        assert here.connect(distant.start()).transport == "tcp"
        out_of_sight = dataclasses.replace(neighbour.endpoint, shm_socket="/nowhere/m.sock")
        assert here.connect(out_of_sight).transport == "tcp"
        with pytest.raises(InvalidArgument, match="no transport in common"):
            here.connect(dataclasses.replace(out_of_sight, tcp_port=0))
    finally:
        for messenger in (here, neighbour, distant):
            messenger.close()


def test_a_tcp_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        messenger = Messenger(assemble(MessengerConfig, data_port=port), node_id="a", incarnation=1)
        with pytest.raises(AddressInUse, match=str(port)):
            messenger.start()


def test_a_second_messenger_of_one_node_is_found_out(tmp_path: Path) -> None:
    config = assemble(MessengerConfig, transport="shm", shm_dir=tmp_path)
    first, second = Messenger(config, node_id="a", incarnation=1), Messenger(config, node_id="a", incarnation=2)
    first.start()
    with pytest.raises(AddressInUse):
        second.start()
    first.close()
    third = Messenger(config, node_id="a", incarnation=3)
    third.start()
    third.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"shm_dir": Path("/nowhere")}, {"data_host": "no-such-host.invalid"}])
def test_an_address_that_cannot_be_bound_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(BindFailed, match=r"nowhere|no-such-host"):
        Messenger(assemble(MessengerConfig, **wrong), node_id="a", incarnation=1).start()


def test_a_private_run_directory_goes_with_the_messenger() -> None:
    messenger = Messenger(assemble(MessengerConfig, transport="shm"), node_id="a", incarnation=1)
    directory = Path(messenger.start().shm_socket).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    messenger.close()
    messenger.close()
    assert not directory.exists()


def test_a_messenger_may_be_closed_by_its_own_handler(make_node: Any, wait_until: Any) -> None:
    a, b = make_node("a"), make_node("b")
    b.messenger.on_notify(lambda _node, _tag, _payload: b.messenger.close())
    a.messenger.connect(b.endpoint).notify(b"t", b"").exception()
    wait_until(lambda: b.messenger.counters()["connections_in_open"] == 0, "the connection has ended")


def test_a_messenger_may_be_closed_by_a_futures_callback(make_node: Any) -> None:
    a, b = make_node("a"), make_node("b")
    closed = threading.Event()

    def close(_future: Future[None]) -> None:
        a.messenger.close()
        closed.set()

    a.messenger.connect(b.endpoint).notify(b"t", b"").add_done_callback(close)
    assert closed.wait(10)


def test_a_messenger_may_be_closed_when_a_deadline_passes(make_node: Any) -> None:
    a, b = make_node("a", handshake_timeout_s=0.5), make_node("b", max_inbound_connections=1)
    c = make_node("c")
    c.messenger.connect(b.endpoint).notify(b"t", b"").result()
    closed = threading.Event()

    def close(_future: Future[None]) -> None:
        a.messenger.close()
        closed.set()

    a.messenger.connect(b.endpoint).notify(b"t", b"", deadline_s=0.05).add_done_callback(close)
    assert closed.wait(10)


@pytest.mark.parametrize("settled_by", ["a callback", "a callback while a caller receives"])
def test_a_callback_may_close_the_messenger(make_node: Any, wait_until: Callable[..., None], settled_by: str) -> None:
    a, b = make_node("a"), make_node("b")
    peer = a.messenger.connect(b.endpoint)
    for _ in range(20):  # until callers receive themselves
        peer.notify(b"t", b"").result()
    future = peer.notify(b"t", b"")
    future.add_done_callback(lambda _: a.messenger.close())
    if settled_by == "a callback while a caller receives":
        with contextlib.suppress(MessengerClosed):
            peer.notify(b"t", b"").result()
    assert future.result(30) is None
    wait_until(lambda: a.messenger.counters()["connections_out_open"] == 0, "it is closed")
